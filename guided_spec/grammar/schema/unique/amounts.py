"""How many different values a lowered schema has at least: whether unique items can be found."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from guided_spec.grammar.formats import FORMATS
from guided_spec.grammar.regex import ANY_CASE, RE_PARSER
from guided_spec.grammar.schema.joining import merge_parts
from guided_spec.grammar.schema.values import keep_valid
from guided_spec.grammar.steps import spend, spend_on_value

_OF_PLACE = 16  # steps
_DEPTH = 12
_ENOUGH = 10**6  # values: more are not told apart
_NO_CONDITION = frozenset({"anyOf", "title", "description", "default", "$comment"})
_LOOKS = re.compile(r"\(\?(?:[=!]|<[=!]|\()")  # at what comes next, or came before


def listed_in(node: dict[str, Any]) -> list[Any] | None:
    return [node["const"]] if "const" in node else node.get("enum")


def text_of_item(value: Any) -> str:
    """The same for equal values."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, list):
        return f"[{','.join(map(text_of_item, value))}]"
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}:{text_of_item(value[key])}" for key in sorted(value)]
        return f"{{{','.join(parts)}}}"
    return json.dumps(value)


def of_index(node: dict[str, Any], index: int) -> Any:
    prefix = node.get("prefixItems", ())
    return prefix[index] if index < len(prefix) else node.get("items")


class _Amount(NamedTuple):
    """least: a number of different values that there surely are. values: all, if these are few."""

    least: float
    values: frozenset[str] | None = None


_NONE = _Amount(0, frozenset())


class Amounts:
    """How many different values lowered schemas have at least. target: of a reference."""

    def __init__(self, target: Callable[[dict[str, Any]], Any]) -> None:
        self._target = target

    def lacking(self, node: dict[str, Any], length: int) -> Iterator[str]:
        """Which of the first ``length`` items may have no value left, whatever comes before."""
        before: list[tuple[Any, _Amount]] = []
        if "items" not in node and "prefixItems" not in node:
            return
        for at in range(int(min(length, node.get("maxItems", length)))):
            item = of_index(node, at)
            found = self._of({} if item is None else item, 0)
            if found.least >= _ENOUGH and at >= len(node.get("prefixItems", ())):
                return
            taken = sum(not _are_apart(found, *other) for other in before)
            if taken and found.least <= taken:
                yield f"item {at + 1} may have no value left, of the {found.least:g} that are known"
                return
            before.append((item, found))

    def _of(self, node: Any, depth: int) -> _Amount:
        spend(_OF_PLACE)
        if node is True or node == {}:
            return _Amount(math.inf)
        if not isinstance(node, dict) or depth > _DEPTH:
            return _NONE if node is False else _Amount(0)
        if "allOf" in node or ("$ref" in node and len(node) > 1):
            return self._of(merge_parts(node, self._target), depth + 1)
        values = listed_in(node)
        if values is not None:
            return _of_listed(node, values)
        if "$ref" in node:
            return self._of(self._target(node), depth + 1)
        if "anyOf" in node:
            return self._of_options(node, depth)
        types = node.get("type", ["string"] if "pattern" in node else ())
        kinds = [types] if isinstance(types, str) else types
        return _either([self._of_kind(kind, node, depth) for kind in kinds])

    def _of_options(self, node: dict[str, Any], depth: int) -> _Amount:
        rest = {key: value for key, value in node.items() if key not in _NO_CONDITION}
        options = node["anyOf"]
        if rest:
            options = [merge_parts({**rest, "allOf": [part]}, self._target) for part in options]
        return _either([self._of(part, depth + 1) for part in options])

    def _of_kind(self, kind: str, node: dict[str, Any], depth: int) -> _Amount:
        match kind:
            case "null":
                return _Amount(1, frozenset({"null"}))
            case "boolean":
                return _Amount(2, frozenset({"true", "false"}))
            case "string":
                return _of_string(node)
            case "integer" | "number":
                return _of_number(kind, node)
            case "array":
                return self._of_array(node, depth)
        return self._of_object(node, depth)

    def _of_array(self, node: dict[str, Any], depth: int) -> _Amount:
        high = node.get("maxItems", math.inf)
        if "prefixItems" in node or node.get("minItems", 0) > 1 or high < 1:
            return _Amount(0)
        return _Amount(self._of(node.get("items", {}), depth + 1).least)

    def _of_object(self, node: dict[str, Any], depth: int) -> _Amount:
        if "minProperties" in node or "maxProperties" in node:
            return _Amount(0)
        listed, required = node.get("properties", {}), node.get("required", ())
        if not listed and not required and "patternProperties" not in node:
            is_open = node.get("additionalProperties", True) in (True, {})
            return _Amount(math.inf if is_open else 1)
        found = {name: self._of(part, depth + 1).least for name, part in listed.items()}
        if any(found.get(name, 0) == 0 for name in required):
            return _Amount(0)
        return _Amount(max(found.values(), default=1))


def _of_listed(node: dict[str, Any], values: list[Any]) -> _Amount:
    spend_on_value(values)
    rest = {key: value for key, value in node.items() if key not in ("enum", "const")}
    kept = keep_valid(values, rest)
    if kept is None:
        return _Amount(0)
    found = frozenset(map(text_of_item, kept))
    return _Amount(len(found), found)


def _either(found: Sequence[_Amount]) -> _Amount:
    """Of values under any of several schemas."""
    known = [amount.values for amount in found if amount.values is not None]
    values = frozenset().union(*known)
    if len(known) == len(found):
        return _Amount(len(values), values)
    return _Amount(max([len(values), *(amount.least for amount in found)]))


def _are_apart(one: _Amount, schema: Any, other: _Amount) -> bool:
    """Whether no value of one amount is one of ``other``, which ``schema`` has."""
    if one.values is None:
        return False
    if other.values is not None and one.values.isdisjoint(other.values):
        return True
    values = [json.loads(text) for text in sorted(one.values)]
    return isinstance(schema, dict) and keep_valid(values, schema) == []


def _of_number(kind: str, node: dict[str, Any]) -> _Amount:
    lows = [node[name] for name in ("minimum", "exclusiveMinimum") if name in node]
    highs = [node[name] for name in ("maximum", "exclusiveMaximum") if name in node]
    step = node.get("multipleOf", 1)
    if not isinstance(step, int):
        return _Amount(0)
    if not lows or not highs:
        return _Amount(math.inf if kind == "integer" or "multipleOf" not in node else _ENOUGH)
    if kind == "number" and "multipleOf" not in node:  # some decimals suffice for many
        return _Amount(1_000 if min(highs) - max(lows) >= 0.01 else 0)
    # Without the ends: whether these count does not matter here.
    between = (math.ceil(min(highs)) - 1 - math.floor(max(lows))) // step
    return _Amount(max(0, between))


def _of_string(node: dict[str, Any]) -> _Amount:
    high = node.get("maxLength", math.inf)
    pattern = node.get("pattern")
    if "format" in node:
        if pattern is not None or "maxLength" in node or "minLength" in node:
            return _Amount(0)
        pattern = FORMATS.get(node["format"])
    if pattern is None:
        return _Amount(math.inf if high == math.inf else 90 if high >= 1 else 1)
    if high < math.inf or "minLength" in node:
        return _Amount(0)
    return _Amount(texts_of(pattern))


def texts_of(pattern: str) -> float:
    """How many different texts a pattern surely matches, if it covers the whole text."""
    if _LOOKS.search(pattern) or ANY_CASE.search(pattern):
        return 0
    return _of_parts(RE_PARSER.parse(pattern))


def _of_parts(parts: Sequence[Any]) -> float:
    """Different texts that surely match a part of a pattern, if it covers the whole text."""
    return max([1, *(_of_part(str(op), value) for op, value in parts)])


def _of_part(op: str, value: Any) -> float:
    match op:
        case "IN":
            return _of_class(value)
        case "ANY" | "NOT_LITERAL":
            return 90
        case "MAX_REPEAT" | "MIN_REPEAT":
            low, high, inner = value
            if high is RE_PARSER.MAXREPEAT:
                return math.inf
            return max(high - low + 1, _of_parts(inner) if high else 1) if _is_fixed(inner) else 1
        case "SUBPATTERN":
            return _of_parts(value[3])
        case "BRANCH":
            return max(map(_of_parts, value[1]))
    return 1


def _is_fixed(parts: Any) -> bool:
    """Whether all texts of a part have one length, above 0."""
    low, high = parts.getwidth()
    return bool(0 < low == high)


def _of_class(members: Any) -> float:
    if str(members[0][0]) == "NEGATE":
        return 32
    found = 0
    for kind, member in members:
        if str(kind) == "RANGE":
            found += member[1] - member[0] + 1
        elif str(kind) == "LITERAL":
            found += 1
        else:
            found += 1 if "SPACE" in str(member) else 10
    return found
