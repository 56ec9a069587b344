"""Drafts 4 to 2020-12 of JSON schema, one schema at a time in the spelling of the last one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jsonschema

from guided_spec.errors import UnsupportedSchemaError
from guided_spec.grammar.characters import complement, general_category
from guided_spec.grammar.languages import without_looks
from guided_spec.grammar.steps import spend

_OF_SPELLING = 8  # steps of reading one schema

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
_ONE = frozenset(
    {"additionalProperties", "unevaluatedProperties", "propertyNames", "items", "contains"}
    | {"additionalItems", "unevaluatedItems", "not", "if", "then", "else", "contentSchema"}
)
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems", "items"})
_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_DATA = ("enum", "const", "default", "examples")
_COUNTS = frozenset(
    f"{end}{counted}"
    for end in ("min", "max")
    for counted in ("Length", "Items", "Properties", "Contains")
)
_MOST = 2**31 - 2  # of a count: xgrammar holds no more, and no text is that long
# Neither a lookbehind nor an escaped parenthesis.
_GROUP = re.compile(r"((?<!\\)(?:\\\\)*)\(\?<(?=[A-Za-z_])")
_FOREIGN = re.compile(r"\(\?(?:<[A-Za-z_]|[=!])|\\[pP]\{")
_PROPERTY = re.compile(r"\\([pP])\{([^{}]*)\}")
_PREFIXES = ("General_Category=", "gc=")
_BOUNDS = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))


NEWEST = "https://json-schema.org/draft/2020-12/schema"
"""What a schema is taken for that does not say of which draft it is."""
_OLDER_NAMES = {
    4: "http://json-schema.org/draft-04/schema#",
    2019: "https://json-schema.org/draft/2019-09/schema",
}


def draft_of(schema: Any, default: int = 2020) -> int:
    """The draft that ``$schema`` names, ``default`` where it names none that is known."""
    if not isinstance(schema, dict) or "$schema" not in schema:
        return default
    return _DRAFTS.get(jsonschema.validators.validator_for(schema, default=None), default)  # type: ignore[arg-type]


def with_draft(schema: Any) -> Any:
    """A schema that names no draft and can only be of an older one, with that one's ``$schema``.

    A bound that is ``exclusiveMinimum: true`` is of draft 4, which OpenAPI 3.0 follows; a list of
    ``items`` is of 2019-09 or older. Any other schema is returned as it is.
    """
    if not isinstance(schema, dict) or "$schema" in schema:
        return schema
    is_listed = False
    for node in _schemas(schema):
        if any(_is_flag(node, exclusive) for _, exclusive in _BOUNDS):
            return {"$schema": _OLDER_NAMES[4], **schema}
        is_listed |= isinstance(node.get("items"), list) and "prefixItems" not in node
    return {"$schema": _OLDER_NAMES[2019], **schema} if is_listed else schema


def _schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All that are of the root's draft."""
    stack: list[Any] = [root]
    while stack:
        node = stack.pop()
        spend(1)
        if not isinstance(node, dict):
            continue
        if node is root or not isinstance(node.get("$schema"), str):
            yield node
            stack += [part for _, part in subschemas(node)]


def for_python(schema: Any, *, is_plain: bool = False) -> Any:
    """A schema of the same meaning that Python's libraries read.

    Patterns name groups as Python does: ECMAScript's ``(?<a>`` is ``(?P<a>``, and ``\\p{L}`` a
    class of all letters. ``dependencies`` are all schemas where some are: referencing 0.37 takes
    the first of them for all. Counts without effect, such as 2**53 for no limit, are those that
    ``re`` and all backends can hold. is_plain: without lookahead too, where patterns begin with it.

    Raises UnsupportedSchemaError for a ``\\p`` of no general category, and for a least count that
    no text reaches.
    """
    if not isinstance(schema, dict) or not any(map(_is_foreign, _schemas(schema))):
        return schema
    return _for_python(schema, _plainly_in_python if is_plain else _in_python)


def _is_foreign(node: dict[str, Any]) -> bool:
    """Few schemas are, and each is asked: a look at few keys has to do for the others."""
    if "dependencies" in node and _is_mixed(node["dependencies"]):
        return True
    if not _COUNTS.isdisjoint(node) and any(_is_vast(node, name) for name in _COUNTS):
        return True
    named = node.get("patternProperties")
    patterns = [*named] if isinstance(named, dict) else []
    if "pattern" in node:
        patterns.append(node["pattern"])
    return any(isinstance(text, str) and _FOREIGN.search(text) for text in patterns)


def _is_vast(node: dict[str, Any], name: str) -> bool:
    count = node.get(name)
    return isinstance(count, int | float) and count > _MOST


def _is_mixed(dependencies: Any) -> bool:
    parts = dependencies.values() if isinstance(dependencies, dict) else ()
    return len({isinstance(part, list) for part in parts}) > 1


def _for_python(value: Any, write: Callable[[str], str]) -> Any:
    if isinstance(value, list):
        return [_for_python(part, write) for part in value]
    if not isinstance(value, dict):
        return value
    changed = {
        key: {name: _for_python(inner, write) for name, inner in part.items()}
        if key in _MAPS and isinstance(part, dict)  # of any names, those of keywords too
        else (part if key in _DATA else _for_python(part, write))
        for key, part in value.items()
    }
    for name in (name for name in _COUNTS if _is_vast(value, name)):
        if name.startswith("min"):
            reason = f"the JSON schema asks for {name}={value[name]}: no text reaches it"
            raise UnsupportedSchemaError(f"{reason}; use at most {_MOST}")
        changed[name] = _MOST
    if isinstance(value.get("pattern"), str):
        changed["pattern"] = write(value["pattern"])
    if isinstance(parts := changed.get("patternProperties"), dict):
        written = {write(pattern): part for pattern, part in parts.items()}
        if len(written) == len(parts):  # else two of them say the same, and both hold
            changed["patternProperties"] = written
    if _is_mixed(value.get("dependencies")):
        changed["dependencies"] = {
            name: {"required": part} if isinstance(part, list) else part
            for name, part in changed["dependencies"].items()
        }
    return changed


def _in_python(pattern: str) -> str:
    return _GROUP.sub(lambda found: f"{found[1]}(?P<", with_categories(pattern))


def with_categories(pattern: str) -> str:
    """A pattern with classes of characters for ECMAScript's ``\\p{...}`` and ``\\P{...}``.

    Raises UnsupportedSchemaError for a name of no general category.
    """
    if not _PROPERTY.search(pattern):
        return pattern
    written: list[str] = []
    at, in_class = 0, False
    while at < len(pattern):
        found = _PROPERTY.match(pattern, at)
        if found:
            if in_class and written[-1] == "-" and written[-2] not in ("[", "[^"):
                raise _no_category(found[0], "it cannot end a range")
            members = _members(found)
            written.append(members if in_class else f"[{members}]")
            at = found.end()
            continue
        length = 2 if pattern[at] == "\\" else 1
        part = pattern[at : at + length]
        if part == "[" and not in_class:
            in_class = True
            part = "[^" if pattern.startswith("[^", at) else part
            part += "]" if pattern.startswith("]", at + len(part)) else ""  # as ``re`` reads it
        elif part == "]":
            in_class = False
        written.append(part)
        at += len(part)
    return "".join(written)


def _members(found: re.Match[str]) -> str:
    """What stands in a class for one property."""
    name = found[2]
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    ranges = general_category(name)
    if ranges is None or (name != found[2] and name in ("Any", "ASCII", "Assigned")):
        raise _no_category(found[0], "only general categories are known, such as L or Letter")
    if found[1] == "P":
        ranges = complement(ranges)
    if not ranges:
        raise _no_category(found[0], "no character is in it")
    spend(len(ranges))
    return "".join(f"{_written(low)}-{_written(high)}" for low, high in ranges)


def _written(code: int) -> str:
    is_plain = chr(code).isalnum() or 0xA0 < code < 0xD800 or code > 0xFFFF
    return chr(code) if is_plain else f"\\u{code:04x}"


def _no_category(text: str, reason: str) -> UnsupportedSchemaError:
    fix = "write the characters out, as in [a-z]"
    message = f"the JSON schema cannot be enforced in full: {text}: {reason}; {fix}"
    return UnsupportedSchemaError(message)


def _plainly_in_python(pattern: str) -> str:
    named = _in_python(pattern)
    return without_looks(named) or named


def subschemas(node: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """The schemas right below one, in the keywords of any draft, with the keys that lead there."""
    for keyword, part in node.items():
        if keyword in _ONE and isinstance(part, dict):
            yield (keyword,), part
        elif keyword in _LISTS and isinstance(part, list):
            yield from (((keyword, index), one) for index, one in enumerate(part))
        elif keyword in _MAPS and isinstance(part, dict):
            yield from (((keyword, name), one) for name, one in part.items())
        elif keyword == "components" and isinstance(part, dict):  # where OpenAPI keeps them
            schemas = part.get("schemas")
            for name, one in schemas.items() if isinstance(schemas, dict) else ():
                yield (keyword, "schemas", name), one


def in_newest(schema: Any) -> Any:
    """A copy of a schema without parts in other dialects, in the keywords of 2020-12.

    It is to be validated as that: references to what has moved are not changed.
    """
    if isinstance(schema, list):
        return [in_newest(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    words = {name: in_newest(part) for name, part in schema.items() if name != "$schema"}
    for inclusive, exclusive in _BOUNDS:
        if _is_flag(words, exclusive):
            _bound(words, inclusive, exclusive)
    if isinstance(words.get("items"), list) and "prefixItems" not in words:
        _prefix(words)
    return words


def split_dialects(schema: Any) -> tuple[Any, list[Any]]:
    """A schema without the parts that name a ``$schema`` of their own, and these, likewise.

    Values that are no schemas, such as those of ``const``, may hold that key too, and stay.
    """
    inner: list[Any] = []

    def split(node: Any, *, is_root: bool) -> Any:
        if not isinstance(node, dict):
            return node
        if not is_root and isinstance(node.get("$schema"), str):
            inner.append(split(node, is_root=True))
            return {}
        outer = node
        for keys, part in subschemas(node):
            left = split(part, is_root=False)
            if left is not part:
                outer = _with_part(outer, keys, left)
        return outer

    return split(schema, is_root=True), inner


def _with_part(node: Any, keys: Sequence[str | int], part: Any) -> Any:
    """A copy of a JSON value with another part where the keys lead."""
    if not keys:
        return part
    changed = node.copy()
    changed[keys[0]] = _with_part(node[keys[0]], keys[1:], part)
    return changed


def _is_flag(node: dict[str, Any], name: str) -> bool:
    return isinstance(node.get(name), bool)


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """All objects in a JSON value."""
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            yield part
            stack += part.values()
        elif isinstance(part, list):
            stack += part


def spell(node: dict[str, Any], draft: int, *, strict: bool = False) -> dict[str, Any]:
    """One schema with the keywords of draft 2020-12; its subschemas stay as they are.

    Keywords that ``draft`` does not know are kept, for their author meant them; ``strict`` leaves
    them out, which is what the specification says.
    """
    spend(_OF_SPELLING + len(node))
    if draft <= 7 and "$ref" in node:
        return {"$ref": node["$ref"]}
    words = dict(node)
    if strict:
        for name in node:
            if not _SINCE.get(name, 0) <= draft <= _UNTIL.get(name, draft):
                del words[name]
    if draft < 6:
        for inclusive, exclusive in _BOUNDS:
            _bound(words, inclusive, exclusive)
    if draft < 2020 and isinstance(words.get("items"), list):
        _prefix(words)
    words.pop("additionalItems", None)
    if "dependencies" in words:
        _split_dependencies(words)
    return words


def _bound(words: dict[str, Any], inclusive: str, exclusive: str) -> None:
    """Draft 4: ``exclusiveMinimum`` is true or false."""
    if isinstance(words.get(exclusive), bool) and words.pop(exclusive) and inclusive in words:
        words[exclusive] = words.pop(inclusive)


def _prefix(words: dict[str, Any]) -> None:
    """Before 2020-12 a list of ``items`` is what ``prefixItems`` is now."""
    words["prefixItems"] = words.pop("items")
    words.update({"items": words["additionalItems"]} if "additionalItems" in words else {})


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
