"""A prepared schema taken apart: into schemas that combine nothing, of which any admits a value."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from guided_spec.grammar.schema_merge import keep_valid, merge
from guided_spec.grammar.schema_report import escape
from guided_spec.grammar.schema_values import constant

__all__ = ["PREFIX", "SchemaParts", "matches"]

_DEEPEST = 16
_CODE = re.compile(r"\\u\{([0-9a-f]+)\}")
_MOST_BRANCHES = 128
_MOST_LOOKED_AT = 20_000
PREFIX = "#/$defs/"
"""Of a reference to a definition."""


class SchemaParts:
    """The schemas of one document, whose references all name one of its definitions.

    root: without ``$defs``. definitions: by their reference.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        self.root: Any = {key: value for key, value in schema.items() if key != "$defs"}
        self.definitions: dict[str, Any] = {
            PREFIX + escape(name): part for name, part in schema.get("$defs", {}).items()
        }
        self.definitions["#"] = self.root
        self._ordered: set[str] = set()
        self._num_looked_at = 0
        users: dict[str, list[str]] = {}
        for name, part in self.definitions.items():
            for node in _nodes(part):
                users.setdefault(node.get("$ref", ""), []).append(name)
        waiting = [name for name, part in self.definitions.items() if self.is_ordered(part)]
        while waiting:
            name = waiting.pop()
            if name not in self._ordered:
                self._ordered.add(name)
                waiting += users.get(name, ())

    def is_ordered(self, schema: Any) -> bool:
        """Whether some object in a value of ``schema`` has keys that it lists."""
        return any(
            node.get("properties")
            or node.get("required")
            or node.get("$ref") in self._ordered
            or _has_keys([node.get("const"), *node.get("enum", ())])
            for node in _nodes(schema)
        )

    def references(self, schema: Any) -> dict[str, Any]:
        """What ``schema`` refers to, and all that this does in turn."""
        found: dict[str, Any] = {}
        waiting = [schema]
        while waiting:
            for node in _nodes(waiting.pop()):
                name = node.get("$ref")
                if name is not None and name not in found:
                    found[name] = self.definitions.get(name, False)
                    waiting.append(found[name])
        return found

    def branches(self, node: Any, depth: int = 0) -> list[Any] | None:
        """Schemas that combine nothing, of which any admits a value; None where there are no such.

        Each is a lone reference, or holds no ``$ref`` and no combinator, unless no keys are listed
        in it.
        """
        if node is False:
            return []
        if not isinstance(node, dict):
            return [{}]
        self._num_looked_at += 1
        if depth > _DEEPEST or self._num_looked_at > _MOST_LOOKED_AT:
            return None
        if node.keys() == {"$ref"}:
            return [node]
        for keyword in ("allOf", "$ref", "anyOf"):
            if keyword in node:
                rest = {key: value for key, value in node.items() if key != keyword}
                value = node[keyword]
                parts = value if keyword == "allOf" else [{keyword: value}]
                if keyword == "anyOf" and not rest:
                    return self._alternatives(value, depth)
                return self._joined([rest, *parts] if rest else parts, depth)
        return _one_by_one(node) if _holds_values(node) else [node]

    def _alternatives(self, options: list[Any], depth: int) -> list[Any] | None:
        found: list[Any] = []
        for option in options:
            parts: list[Any] | None = [option] if option is not False else []
            if self.is_ordered(option):
                parts = self.branches(option, depth + 1)
            if parts is None or len(found) + len(parts) > _MOST_BRANCHES:
                return None
            found += parts
        return found

    def _joined(self, parts: list[Any], depth: int) -> list[Any] | None:
        """Every branch of one part with every branch of the others."""
        found: list[Any] = [{}]
        for part in parts:
            options = self.branches(self._follow(part), depth + 1)
            if options is None or len(found) * len(options) > _MOST_BRANCHES:
                return None
            options = [self._follow(option) for option in options]
            joined = [self._both(one, option) for one in found for option in options]
            if None in joined:
                return None
            found = [node for node in joined if node is not False]
        return self._alternatives(found, depth)

    def _both(self, one: dict[str, Any], other: Any) -> Any:
        """One schema for both; None where that is not plain to see."""
        if other is False:
            return False
        if _holds_values(one) and _holds_values(other):
            return _common_values(one, other)
        if "items" in one and "items" in other and "prefixItems" not in {**one, **other}:
            one = {**one, "items": {"allOf": [one["items"], other["items"]]}}
            other = {key: value for key, value in other.items() if key != "items"}
        both = _settled(merge(one, other))
        if both is None and not self.is_ordered(one) and not self.is_ordered(other):
            return {"allOf": [one, other]}
        return both

    def _follow(self, node: Any) -> Any:
        """What ``node`` refers to, if it is nothing but a reference."""
        for _ in range(_DEEPEST):
            if not isinstance(node, dict) or node.keys() != {"$ref"}:
                break
            node = self.definitions.get(node["$ref"], False)
        return node


def _has_keys(value: Any) -> bool:
    """Whether a JSON value holds an object with any key."""
    if isinstance(value, list):
        return any(map(_has_keys, value))
    return isinstance(value, dict) and bool(value)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all below it."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if not isinstance(node, dict):
            continue
        yield node
        stack += [node[keyword] for keyword in ("items", "additionalProperties") if keyword in node]
        for keyword in ("allOf", "anyOf", "prefixItems"):
            stack += node.get(keyword, ())
        for keyword in ("properties", "patternProperties"):
            stack += node.get(keyword, {}).values()


def _holds_values(node: dict[str, Any]) -> bool:
    return "const" in node or "enum" in node


def _values_of(node: dict[str, Any]) -> list[Any]:
    if "const" not in node:
        return list(node["enum"])
    texts = [json.dumps(value, sort_keys=True) for value in node.get("enum", [node["const"]])]
    return [node["const"]] if json.dumps(node["const"], sort_keys=True) in texts else []


def _beside_values(node: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key not in ("const", "enum")}


def _common_values(one: dict[str, Any], other: dict[str, Any]) -> Any:
    """A schema for the values that both list."""
    texts = {json.dumps(value, sort_keys=True) for value in _values_of(other)}
    values = [v for v in _values_of(one) if json.dumps(v, sort_keys=True) in texts]
    rest = merge(_beside_values(one), _beside_values(other))
    if rest is None or rest is False or not values:
        return None if rest is None else False
    return _settled({**rest, "enum": values})


def _settled(node: Any) -> Any:
    """``node``, or False where it lists values and admits none of them."""
    values = None
    if isinstance(node, dict) and _holds_values(node):
        values = _one_by_one(node)
    if values is None or len(values) > 1:
        return node
    return values[0] if values else False


def _one_by_one(node: dict[str, Any]) -> list[Any] | None:
    """The values that ``node`` lists and admits: those with keys as schemas of their own."""
    rest = _beside_values(node)
    pattern = rest.pop("pattern", None)
    # Elsewhere patterns are not spelled as Python has them either.
    kept = None if '"pattern' in json.dumps(rest) else keep_valid(_values_of(node), rest)
    if kept is None:
        return None
    if pattern is not None:
        kept = [v for v in kept if not isinstance(v, str) or matches(pattern, v)]
    plain = [value for value in kept if not _has_keys(value)]
    parts = [constant(value) for value in kept if _has_keys(value)]
    return [*parts, *([{"enum": plain}] if plain else [])]


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern as llguidance gets it, anchored at both ends, matches ``text``."""
    readable = _CODE.sub(lambda match: f"\\U{int(match[1], 16):08x}", pattern)
    return re.fullmatch(readable.removeprefix("^").removesuffix("$"), text) is not None
