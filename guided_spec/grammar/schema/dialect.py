"""Drafts 4 to 2020-12 of JSON schema, one schema at a time in the spelling of the last one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urldefrag, urljoin

import jsonschema

from guided_spec.grammar.schema.report import find

__all__ = ["Document", "Target", "draft_of", "spell"]

_DRAFTS: dict[Any, int] = {
    jsonschema.Draft3Validator: 3,
    jsonschema.Draft4Validator: 4,
    jsonschema.Draft6Validator: 6,
    jsonschema.Draft7Validator: 7,
    jsonschema.Draft201909Validator: 2019,
    jsonschema.Draft202012Validator: 2020,
}
# Keywords by the first draft that knows them; older ones ignore them.
_SINCE = {
    **dict.fromkeys(("const", "contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), 2019),
    "prefixItems": 2020,
}
_UNTIL = {"dependencies": 7}
_DATA = frozenset({"enum", "const", "default", "examples"})


def draft_of(schema: Any) -> int:
    """The draft that ``$schema`` names, 2020 where it names none that is known."""
    default = jsonschema.Draft202012Validator
    return _DRAFTS.get(jsonschema.validators.validator_for(schema, default=default), 2020)


def spell(node: dict[str, Any], draft: int, *, strict: bool = False) -> dict[str, Any]:
    """One schema with the keywords of draft 2020-12; its subschemas stay as they are.

    Keywords that ``draft`` does not know are kept, for their author meant them; ``strict`` leaves
    them out, which is what the specification says.
    """
    if draft <= 7 and "$ref" in node:
        return {"$ref": node["$ref"]}
    words = dict(node)
    if strict:
        for name in node:
            if not _SINCE.get(name, 0) <= draft <= _UNTIL.get(name, draft):
                del words[name]
    if draft < 6:
        _bound(words, "minimum", "exclusiveMinimum")
        _bound(words, "maximum", "exclusiveMaximum")
    if draft < 2020 and isinstance(words.get("items"), list):
        words["prefixItems"] = words.pop("items")
        words.update({"items": words["additionalItems"]} if "additionalItems" in words else {})
    words.pop("additionalItems", None)
    if "dependencies" in words:
        _split_dependencies(words)
    return words


def _bound(words: dict[str, Any], inclusive: str, exclusive: str) -> None:
    """Draft 4: ``exclusiveMinimum`` is true or false."""
    if isinstance(words.get(exclusive), bool) and words.pop(exclusive) and inclusive in words:
        words[exclusive] = words.pop(inclusive)


def _split_dependencies(words: dict[str, Any]) -> None:
    names = dict(words.get("dependentRequired", {}))
    schemas = dict(words.get("dependentSchemas", {}))
    for name, value in words.pop("dependencies").items():
        if isinstance(value, list | str):
            names[name] = [value] if isinstance(value, str) else value
        else:
            schemas[name] = value
    words.update({"dependentRequired": names} if names else {})
    words.update({"dependentSchemas": schemas} if schemas else {})


class Target(NamedTuple):
    """What a reference names. key: one for every target."""

    schema: Any
    key: str


class Document:
    """A root schema in which references are looked up; nothing is fetched."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.draft = draft_of(root)
        self._names: dict[str, Any] | None = None
        self._bases: dict[int, str] = {}
        self._num_bases = 0
        self._dynamic: dict[str, list[Any]] = {}

    @property
    def has_parts(self) -> bool:
        """Whether schemas in it have URIs of their own, to which references are relative."""
        self._index()
        return self._num_bases > 1

    def resolve(self, node: dict[str, Any], keyword: str = "$ref") -> Target | None:
        """The target of ``node[keyword]``, or None."""
        reference = node[keyword]
        if self.has_parts and id(node) not in self._bases:
            return None  # a schema put together here: nothing says what it is relative to
        if (reference == "#" or reference.startswith("#/")) and self._base_of(node) == "":
            return self._at(self.root, reference)
        absolute = urljoin(self._base_of(node), reference)
        url, fragment = urldefrag(absolute)
        names = self._index()
        if absolute in names:
            return Target(names[absolute], absolute)
        if url not in names:
            return None
        if fragment and not fragment.startswith("/"):
            return None
        found = self._at(names[url], f"#{fragment}")
        return None if found is None else Target(found.schema, absolute)

    def resolve_dynamic(self, node: dict[str, Any]) -> Target | None:
        """The target of ``$dynamicRef`` or ``$recursiveRef`` where it can only be one."""
        self._index()
        if "$recursiveRef" in node:
            one = not any(self._dynamic.get(name) for name in ("", "recursive"))
            return self.resolve(node, "$recursiveRef") if one else None
        anchor = node["$dynamicRef"].rpartition("#")[2]
        if len(self._dynamic.get(anchor, [])) > 1:
            return None
        return self.resolve(node, "$dynamicRef")

    def _at(self, schema: Any, reference: str) -> Target | None:
        try:
            return Target(find(schema, unquote(reference)), unquote(reference))
        except LookupError:
            return None

    def _base_of(self, node: dict[str, Any]) -> str:
        self._index()
        return self._bases.get(id(node), "")

    def _index(self) -> dict[str, Any]:
        """Every schema with a name of its own, by its absolute URI."""
        if self._names is None:
            self._names = {"": self.root}
            word = "id" if self.draft <= 4 else "$id"
            for node, base in _walk(self.root, "", word):
                self._bases[id(node)] = base
                own = node.get(word)
                if isinstance(own, str):
                    self._names.setdefault(base.rstrip("#"), node)
                for anchor in ("$anchor", "$dynamicAnchor"):
                    if isinstance(node.get(anchor), str):
                        self._names.setdefault(f"{base}#{node[anchor]}", node)
                if isinstance(node.get("$dynamicAnchor"), str):
                    self._dynamic.setdefault(node["$dynamicAnchor"], []).append(node)
                if node.get("$recursiveAnchor") is True:
                    self._dynamic.setdefault("recursive", []).append(node)
            self._num_bases = len({base.partition("#")[0] for base in self._bases.values()})
        return self._names


def _walk(node: Any, base: str, word: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Every object below ``node`` that may be a schema, with its base URI."""
    stack = [(node, base, False)]
    while stack:
        node, base, is_map = stack.pop()
        if isinstance(node, list):
            stack.extend((part, base, False) for part in node)
        if not isinstance(node, dict):
            continue
        if not is_map:
            own = node.get(word)
            if isinstance(own, str) and "$ref" not in node:
                base = urljoin(base, own)
            yield node, base
        for key, value in node.items():
            if is_map or key not in _DATA:
                maps = not is_map and key in ("properties", "patternProperties")
                stack.append((value, base, maps))
