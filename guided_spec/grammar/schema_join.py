"""Lowered schemas put together: all of them, or any."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from guided_spec.grammar.schema_merge import merge

__all__ = ["any_of", "join_all"]


def join_all(parts: Sequence[Any]) -> Any:
    """One schema for what all parts admit: side by side where they share no keyword, else allOf."""
    if any(part is False for part in parts):
        return False
    joined: dict[str, Any] = {}
    place = 0  # of the joined ones: properties are generated in the order of the parts
    rest: list[Any] = []
    for part in _distinct([part for part in parts if part is not True]):
        merged = None
        if "allOf" not in part and "$ref" not in part:
            merged = merge(joined, part)
        if merged is False:
            return False
        if merged is None:
            rest += part["allOf"] if part.keys() == {"allOf"} else [part]
        else:
            place = place if joined else len(rest)
            joined = merged
    if not rest:
        return joined
    if not joined and len(rest) == 1:
        return rest[0]
    return {"allOf": [*rest[:place], *([joined] if joined else []), *rest[place:]]}


def any_of(parts: Sequence[Any]) -> Any:
    """One schema for what any part admits; False for none."""
    if any(part is True or part == {} for part in parts):
        return {}
    options: list[Any] = []
    for part in _distinct([part for part in parts if part is not False]):
        options += part["anyOf"] if part.keys() == {"anyOf"} else [part]
    if len(options) < 2:
        return options[0] if options else False
    return {"anyOf": options}


def _distinct(parts: Sequence[Any]) -> list[Any]:
    seen: set[str] = set()
    kept = []
    for part in parts:
        text = json.dumps(part, sort_keys=True)
        if part and text not in seen:
            kept.append(part)
            seen.add(text)
    return kept
