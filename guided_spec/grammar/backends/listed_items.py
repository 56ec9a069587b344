"""Arrays whose items are among listed values: all that is asked of them, as lists of values.

llguidance would join each listed value with each condition by itself, such as those of ``contains``
in several alternatives: it compiles for seconds then, and its lexer outgrows its limits in a text.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from guided_spec.grammar.schema.joining import any_of, text_of
from guided_spec.grammar.schema.values import keep_valid
from guided_spec.grammar.steps import spend

_MOST_VALUES = 256
_MOST_ARRAYS = 256
_UNSEEN = frozenset({"$ref", "enum", "const"})


def with_listed_items(schema: dict[str, Any]) -> dict[str, Any]:
    """A lowered schema whose arrays of listed values combine nothing; those below it aside.

    What each alternative of an object says of such an array, it says alone. As it is where this is
    not plain to see.
    """
    own = None if schema.keys().isdisjoint(("allOf", "anyOf")) else _written(schema)
    if own is not None:
        return {"enum": []} if own is False else own
    options = schema.get("anyOf", ())
    keys = [] if "$ref" in schema else [*schema.get("properties", {})]
    for name in keys if options else ():
        base = schema["properties"][name]
        if _listed(base) is None or not all(name in _keys_of(option) for option in options):
            continue
        parts = [_written({"allOf": [base, option["properties"][name]]}) for option in options]
        if None in parts:
            continue
        options = [
            {**option, "properties": {**option["properties"], name: part}}
            for option, part in zip(options, parts, strict=True)
            if part is not False or name not in option.get("required", ())
        ]
        schema = {**schema, "properties": {**schema["properties"], name: True}, "anyOf": options}
    return schema


def _keys_of(option: Any) -> Any:
    return option.get("properties", {}) if isinstance(option, dict) else {}


def _listed(node: Any) -> list[Any] | None:
    """The plain values among which all items of an array are; None unless it is one of these."""
    if not isinstance(node, dict):
        return None
    items = node.get("items")
    if node.get("type") == "array" and isinstance(items, dict) and "prefixItems" not in node:
        values = items.get("enum")
        if values and len(values) <= _MOST_VALUES:
            return None if any(isinstance(value, list | dict) for value in values) else values
    return next(filter(None, map(_listed, node.get("allOf", ()))), None)


def _written(node: dict[str, Any]) -> Any:
    """A schema for the arrays of ``node``, False for none; None where it cannot be seen."""
    values = _listed(node)
    if values is None:
        return None
    try:
        found = _Listing(values).arrays(node)
    except _UnseenError:
        return None
    return any_of([array.schema(values) for array in dict.fromkeys(found)])


class _UnseenError(Exception):
    """What a schema says of arrays is not plain to see."""


class _Array(NamedTuple):
    """Arrays by the values of their items, which are numbers of listed ones.

    first: of the first items; rest: of all after these. low, high: how many items there are.
    """

    first: tuple[frozenset[int], ...]
    rest: frozenset[int]
    low: int
    high: float

    def at(self, index: int) -> frozenset[int]:
        return self.first[index] if index < len(self.first) else self.rest

    def both(self, other: _Array) -> _Array | None:
        """The arrays that are also in ``other``; None for none."""
        rest, low, high = self.rest & other.rest, max(self.low, other.low), self.high
        high = min(high, other.high)
        first: list[frozenset[int]] = []
        for index in range(max(len(self.first), len(other.first))):
            first.append(self.at(index) & other.at(index))
            if not first[-1]:
                high = min(high, index)
        high = high if rest else min(high, len(first))
        if low > high:
            return None
        return _Array(tuple(first[: int(min(high, len(first)))]), rest, low, high)

    def schema(self, values: list[Any]) -> dict[str, Any]:
        """What the arrays are, written with ``enum``."""
        first, rest = (
            [{"enum": [values[at] for at in sorted(one)]} for one in ones]
            for ones in (self.first, [self.rest])
        )
        written: dict[str, Any] = {"type": "array"}
        written |= {"prefixItems": first} if first else {}
        written |= {"items": rest[0] if self.rest else False}
        written |= {"minItems": self.low} if self.low else {}
        return written if self.high == math.inf else {**written, "maxItems": int(self.high)}


class _Listing:
    """What schemas say of arrays, all items of which are among ``values``."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values
        self._known: dict[str, frozenset[int]] = {}
        self._every = _Array((), frozenset(range(len(values))), 0, math.inf)

    def arrays(self, node: Any) -> list[_Array]:
        """The arrays of any length that a schema admits. Raises _UnseenError."""
        if not isinstance(node, dict):
            return [] if node is False else [self._every]
        if not _UNSEEN.isdisjoint(node):
            raise _UnseenError
        if "array" not in node.get("type", "array"):
            return []
        first = tuple(map(self._admitted, node.get("prefixItems", ())))
        low, high = int(node.get("minItems", 0)), node.get("maxItems", math.inf)
        own = _Array(first, self._admitted(node.get("items", True)), low, high)
        found = _all_of([own], [self._every])
        for part in node.get("allOf", ()):
            found = _all_of(found, self.arrays(part))
        if "anyOf" in node:
            options = map(self.arrays, node["anyOf"])
            found = _all_of(found, [*itertools.chain.from_iterable(options)])
        return found

    def _admitted(self, part: Any) -> frozenset[int]:
        """The numbers of the values that are valid under a schema."""
        if isinstance(part, bool):
            return self._every.rest if part else frozenset()
        text = text_of(part)
        if text not in self._known:
            spend(len(self._values) * (1 + len(text)))
            kept = keep_valid(self._values, part)
            if kept is None:
                raise _UnseenError
            ids = set(map(id, kept))
            self._known[text] = frozenset(
                at for at, value in enumerate(self._values) if id(value) in ids
            )
        return self._known[text]


def _all_of(some: Iterable[_Array], others: list[_Array]) -> list[_Array]:
    pairs = [one.both(other) for one in dict.fromkeys(some) for other in dict.fromkeys(others)]
    found = [array for array in pairs if array is not None]
    spend(len(pairs))
    if len(found) > _MOST_ARRAYS:
        raise _UnseenError
    return found
