"""The subschemas of a schema that ``lower`` has written, for every walk over one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from guided_spec.grammar.schema.report import escape

__all__ = ["HOLDS_PARTS", "all_parts", "change_parts", "parts_of"]

_ONE = ("items", "additionalProperties")
_LISTS = ("allOf", "anyOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
HOLDS_PARTS = frozenset({*_ONE, *_LISTS, *_MAPS})
"""Keywords of a subschema, or several."""


def parts_of(node: dict[str, Any]) -> Iterator[Any]:
    """The subschemas right below ``node``, definitions aside."""
    yield from (node[keyword] for keyword in _ONE if keyword in node)
    for keyword in _LISTS:
        yield from node.get(keyword, ())
    for keyword in _MAPS:
        yield from node.get(keyword, {}).values()


def all_parts(schema: Any) -> Iterator[Any]:
    """A schema and all below it, definitions aside."""
    stack = [schema]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, dict):
            stack += parts_of(node)


def change_parts(node: dict[str, Any], change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """A copy of ``node`` with ``change(part, path)`` for each subschema right below it.

    path: the way from ``node`` to the part, the tail of a JSON pointer.
    """
    changed = dict(node)
    for keyword in node:
        if keyword in _ONE:
            changed[keyword] = change(node[keyword], keyword)
        elif keyword in _LISTS:
            changed[keyword] = [
                change(part, f"{keyword}/{index}") for index, part in enumerate(node[keyword])
            ]
        elif keyword in _MAPS:
            changed[keyword] = {
                name: change(part, f"{keyword}/{escape(name)}")
                for name, part in node[keyword].items()
            }
    return changed
