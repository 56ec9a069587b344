"""Whether objects of a prepared schema may have keys that it does not list, and how many."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["FreeKeys", "free_keys"]

_parser: Any = importlib.import_module("re._parser")
_CODE = re.compile(r"\\u\{([0-9a-f]+)\}")
_LISTS = ("anyOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs")
_ONE = ("items", "additionalProperties")
_OWN = frozenset({"type", "properties", "additionalProperties", "patternProperties", "items"})
_COMBINED = frozenset({"$ref", "anyOf", "allOf"})
_SETS = (["IN"], ["ANY"], ["LITERAL"], ["NOT_LITERAL"])
_PRINTABLE, _DELETE = 0x20, 0x7F


class FreeKeys(NamedTuple):
    """are_there: whether an object may have keys that are not listed.

    run_out: whether an object's text may come to where only keys are left that it has already.
    """

    are_there: bool
    run_out: bool


def free_keys(schema: Any) -> FreeKeys:
    """About a schema that ``prepare_schema`` or ``prepare_for_llguidance`` has made.

    Where it is not plain to see, the answer is yes.
    """
    nodes = [node for node in _nodes(schema) if _takes_free_keys(node)]
    return FreeKeys(bool(nodes), any(map(_runs_out, nodes)))


def _nodes(schema: Any) -> Iterator[Any]:
    stack = [schema]
    while stack:
        node = stack.pop()
        yield node
        if not isinstance(node, dict):
            continue
        stack += [node.get(keyword, False) for keyword in _ONE]
        for keyword in _LISTS:
            stack += node.get(keyword, ())
        for keyword in _MAPS:
            stack += node.get(keyword, {}).values()


def _takes_free_keys(node: Any) -> bool:
    """Whether an object under this one schema, those below it aside, may have free keys."""
    if not isinstance(node, dict):
        return node is not False
    if "enum" in node or "const" in node:
        return False
    if _OWN.isdisjoint(node) and not _COMBINED.isdisjoint(node):
        return False  # the parts say it
    types = node.get("type", ("object", "array"))
    if "object" in types and (
        node.get("additionalProperties", True) is not False or node.get("patternProperties")
    ):
        return True
    return "array" in types and "items" not in node  # any values


def _runs_out(node: Any) -> bool:
    patterns = node.get("patternProperties", {}) if isinstance(node, dict) else {}
    parsed = [_parse(pattern) for pattern in patterns]
    is_open = bool(patterns) and node.get("additionalProperties", True) is not False
    return not all(map(_is_endless, parsed)) or (is_open and not all(map(_is_prefix, parsed)))


def _parse(pattern: str) -> Any:
    """A pattern that covers the whole key, as ``to_fullmatch`` writes it, anchored or not."""
    readable = _CODE.sub(lambda match: f"\\U{int(match[1], 16):08x}", pattern)
    return _plain(_parser.parse(readable.removeprefix("^").removesuffix("$")))


def _plain(items: Any) -> list[Any]:
    """Without groups around single things."""
    nodes = [(str(op), value) for op, value in items]
    while len(nodes) == 1 and nodes[0][0] == "SUBPATTERN":
        nodes = [(str(op), value) for op, value in nodes[0][1][3]]
    return nodes


def _is_endless(nodes: list[Any]) -> bool:
    """Whether what has begun to match can go on to infinitely many texts: a loop comes last."""
    if not nodes:
        return False
    op, value = nodes[-1]
    match op:
        case "MAX_REPEAT":
            return value[1] is _parser.MAXREPEAT and _is_written(value[2])
        case "SUBPATTERN":
            return _is_endless(_plain(value[3]))
        case "BRANCH":
            return all(_is_endless(_plain(option)) for option in value[1])
    return False


def _is_written(items: Any) -> bool:
    """Whether JSON can hold it without escapes, which not every backend writes."""
    for op, value in _plain(items):
        match op:
            case "LITERAL":
                found = value >= _PRINTABLE
            case "IN":
                found = any(
                    str(kind) == "RANGE"
                    and part[1] > _DELETE
                    or str(kind) == "LITERAL"
                    and part >= _PRINTABLE
                    for kind, part in value
                )
            case "SUBPATTERN":
                found = _is_written(value[3])
            case "BRANCH":
                found = any(map(_is_written, value[1]))
            case _:
                found = op == "MAX_REPEAT" and _is_written(value[2])
        if not found:
            return False
    return True


def _is_prefix(nodes: list[Any]) -> bool:
    """Whether it is a plain text and then a loop over one set of characters.

    Then what does not match it can go on to infinitely many other texts, too.
    """
    *first, (op, value) = _flat(nodes) or [("", None)]
    if not all(name == "LITERAL" for name, _ in first) or op != "MAX_REPEAT":
        return False
    low, high, inner = value
    return low == 0 and high is _parser.MAXREPEAT and [n for n, _ in _plain(inner)] in _SETS


def _flat(nodes: list[Any]) -> list[Any]:
    """Groups of a sequence in line with it."""
    found: list[Any] = []
    for op, value in nodes:
        found += _flat(_plain(value[3])) if op == "SUBPATTERN" else [(op, value)]
    return found
