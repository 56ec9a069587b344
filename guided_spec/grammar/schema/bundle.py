"""A schema with the schemas that it refers to in it, as one compound document.

Section 9.3 of the core specification of draft 2020-12: each stands under ``definitions`` with its
URI as ``$id`` and the draft that it is of, and references stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urldefrag, urljoin

from guided_spec.errors import ConfigError
from guided_spec.grammar.schema.dialect import NEWEST, with_draft

_PLACE = "definitions"  # which every draft knows
_OLD = ("draft-03", "draft-04")  # where "$id" is "id"
_REFERENCES = ("$ref", "$dynamicRef")


def bundle(schema: Mapping[str, Any], resources: Mapping[str, Any]) -> dict[str, Any]:
    """``schema`` and those of ``resources`` that it refers to, also by way of others.

    resources: schemas by URI, or by the relative reference that names them. One that has an ``$id``
        is known by that too. Raises ConfigError where it is none.
    """
    known: dict[str, Mapping[str, Any]] = {}
    for name, part in resources.items():
        _require_schema(name, part)
        known[urldefrag(name).url] = part
    for name, part in list(known.items()):
        if (own := _id_of(part)) is not None:
            known.setdefault(urldefrag(urljoin(name, own)).url, part)
    draft = schema.get("$schema", NEWEST)
    places = dict(schema.get(_PLACE, {}))
    base = urldefrag(str(_id_of(schema) or "")).url
    waiting: list[tuple[Any, str]] = [(schema, base)]
    taken = {base}
    while waiting:
        for reference, at in _references(*waiting.pop()):
            uri = urldefrag(urljoin(at, reference)).url
            part = known.get(uri, known.get(urldefrag(reference).url))
            if part is not None and uri not in taken:
                taken.add(uri)
                places[_free(uri, places)] = _with_id(part, uri, draft)
                waiting.append((part, uri))
    return {**schema, _PLACE: places} if len(taken) > 1 else dict(schema)


def _require_schema(name: object, part: object) -> None:
    if not isinstance(name, str) or not urldefrag(name).url or urldefrag(name).fragment:
        raise ConfigError("resources", name, "must have URIs without a fragment as keys")
    if not isinstance(part, Mapping):
        raise ConfigError(f"resources[{name!r}]", part, "must be a JSON schema as a dict")


def _references(schema: Any, base: str) -> Iterator[tuple[str, str]]:
    """Each reference with the URI to which it is relative."""
    stack = [(schema, base)]
    while stack:
        part, at = stack.pop()
        if isinstance(part, Mapping):
            own = _id_of(part)
            at = at if own is None or part is schema else urljoin(at, own)
            for name in _REFERENCES:
                if isinstance(part.get(name), str):
                    yield part[name], at
            stack += [(inner, at) for inner in part.values()]
        elif isinstance(part, list):
            stack += [(inner, at) for inner in part]


def _id_of(schema: Mapping[str, Any]) -> str | None:
    for name in ("$id", "id"):
        if isinstance(schema.get(name), str):
            return str(schema[name])
    return None


def _with_id(schema: Mapping[str, Any], uri: str, draft: str) -> dict[str, Any]:
    """draft: of a schema that names none and can be of any."""
    rest = {name: part for name, part in schema.items() if name not in ("$id", "id")}
    rest = {"$schema": draft, **with_draft(rest)}
    if "$ref" in rest:  # next to which older drafts see no $id
        rest["allOf"] = [{"$ref": rest.pop("$ref")}, *rest.get("allOf", ())]
    is_old = any(name in str(rest["$schema"]) for name in _OLD)
    return {"id" if is_old else "$id": uri, **rest}


def _free(name: str, places: Mapping[str, Any]) -> str:
    while name in places:
        name += "'"
    return name
