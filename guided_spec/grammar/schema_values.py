"""What is left when some values are taken away, as schemas."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

__all__ = [
    "ALL_TYPES",
    "Disjuncts",
    "constant",
    "other_characters",
    "others",
    "type_of",
    "unique_arrays",
]

ALL_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
"""The types; an integer is a number."""
_LONGEST = 4_000  # characters of a pattern
_MOST_GAPS = 32
_MOST_ARRAYS = 500
_RUN = re.compile(r"\^\[(\^?)((?:\\.|[^\\\]])+)\][+*]\$")


class Disjuncts(NamedTuple):
    """Schemas, of which any admits a value. exact: whether these are all the values meant."""

    schemas: list[Any]
    exact: bool = True


def type_of(value: Any) -> str:
    """Its JSON type, "number" for an integer too."""
    for kind, python in (("boolean", bool), ("number", int | float), ("string", str)):
        if isinstance(value, python):
            return kind
    return "null" if value is None else "array" if isinstance(value, list) else "object"


def others(values: Sequence[Any], types: frozenset[str]) -> Disjuncts:
    """Every value of ``types`` that is none of ``values``; arrays and objects as far as it goes."""
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(type_of(value), []).append(value)
    schemas: list[Any] = []
    exact = True
    for kind in sorted(types):
        taken = by_type.get(kind, [])
        if not taken:
            schemas.append({"type": kind})
        elif kind == "string":
            pattern = _not_one_of(taken)
            exact = exact and pattern is not None
            schemas += [{"type": "string", "pattern": pattern}] if pattern else []
        elif kind == "number" and len(set(taken)) <= _MOST_GAPS:
            schemas += _gaps(sorted(set(taken)))
        elif kind == "boolean":
            schemas += [{"enum": [value]} for value in (True, False) if value not in taken]
        elif kind != "null":
            exact = False
    return Disjuncts(schemas, exact)


def _gaps(numbers: list[Any]) -> list[Any]:
    bounds = [
        {"exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in itertools.pairwise(numbers)
    ]
    ends = [{"exclusiveMaximum": numbers[0]}, {"exclusiveMinimum": numbers[-1]}]
    return [{"type": "number", **bound} for bound in [*ends[:1], *bounds, *ends[1:]]]


def _not_one_of(texts: Sequence[str]) -> str | None:
    """A pattern for the strings that are none of ``texts``; None if it would be very long."""
    if sum(map(len, texts)) > _LONGEST // 8 or max(map(len, texts)) > 60:
        return None
    written = _write_others(tuple(texts))
    return written if len(written) <= _LONGEST else None


@lru_cache(maxsize=256)  # of a oneOf with a constant, each branch excludes those of all others
def _write_others(texts: tuple[str, ...]) -> str:
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return f"^(?:{_outside(tree)})$"


def _outside(node: dict[str, Any]) -> str:
    """A pattern for what can follow here without ending on one of the texts."""
    chars = sorted(char for char in node if char)
    options = [] if "" in node else [""]
    excluded = "".join(re.escape(char) if char != "^" else "\\^" for char in chars)
    options.append(f"[^{excluded}](?s:.)*" if chars else "(?s:.)+")
    options += [f"{re.escape(char)}(?:{_outside(node[char])})" for char in chars]
    return "|".join(options)


def other_characters(pattern: str) -> str | None:
    """For ``^[...]+$`` a pattern for strings with a character outside, else None."""
    match = _RUN.fullmatch(pattern)
    if match is None:
        return None
    negated, members = match.groups()
    if negated:
        return f"^[^\\n]*[{members}]"
    # Python's $ also matches before a last newline, which therefore does not count as outside.
    return f"^$|[^{members}\\n]" if pattern.endswith("+$") else f"[^{members}\\n]"


def unique_arrays(values: Sequence[Any], low: int, high: int) -> list[list[Any]]:
    """The arrays of ``low`` to ``high`` different values, up to a length that makes few of them.

    They are all of these where the last one has ``high`` values.
    """
    arrays: list[list[Any]] = []
    for size in range(low, high + 1):
        if len(arrays) + math.perm(len(values), size) > _MOST_ARRAYS:
            break
        arrays += map(list, itertools.permutations(values, size))
    return arrays


def constant(value: Any) -> dict[str, Any]:
    """A schema for this one value, an array or an object written out part by part."""
    if isinstance(value, list):
        items = [constant(item) for item in value]
        schema: dict[str, Any] = {"type": "array", "items": False, "minItems": len(items)}
        return {**schema, "prefixItems": items} if items else schema
    if isinstance(value, dict):
        properties = {name: constant(part) for name, part in value.items()}
        schema = {"type": "object", "required": list(value), "additionalProperties": False}
        return {**schema, "properties": properties} if properties else schema
    return {"enum": [value]}
