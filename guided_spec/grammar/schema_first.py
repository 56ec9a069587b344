"""What a string can begin with, by its pattern."""

from __future__ import annotations

import importlib
import re
from functools import lru_cache
from typing import Any

__all__ = ["first_characters"]

_parser: Any = importlib.import_module("re._parser")
_OTHER = "é"  # stands for everything beyond ASCII
_ASCII = [chr(code) for code in range(128)]


@lru_cache(maxsize=256)
def first_characters(pattern: str) -> frozenset[str] | None:
    """ASCII characters that a match may begin with, and "é" for all others.

    None where the pattern is not anchored, may be empty, or begins with what is not seen through.
    """
    parsed = _parser.parse(pattern)
    items = list(parsed)
    if parsed.state.flags & (re.IGNORECASE | re.MULTILINE):
        return None
    if len(items) < 2 or not str(items[0][1]).startswith("AT_BEGINNING"):
        return None
    return _of_item(*items[1])


def _of_item(op: Any, value: Any) -> frozenset[str] | None:
    match str(op):
        case "LITERAL":
            return frozenset([chr(value) if value < 128 else _OTHER])
        case "IN":
            return _of_class(value)
        case "SUBPATTERN":
            inner = list(value[3])
            return _of_item(*inner[0]) if inner and not value[1] and not value[2] else None
        case "MAX_REPEAT" | "MIN_REPEAT":
            inner = list(value[2])
            return _of_item(*inner[0]) if inner and value[0] > 0 else None
        case "BRANCH":
            parts = [_of_item(*list(option)[0]) if list(option) else None for option in value[1]]
            known = [part for part in parts if part is not None]
            return frozenset().union(*known) if len(known) == len(parts) else None
    return None


def _of_class(members: Any) -> frozenset[str]:
    found: set[str] = set()
    negated = str(members[0][0]) == "NEGATE"
    for kind, member in members[1:] if negated else members:
        match str(kind):
            case "LITERAL":
                found.add(chr(member) if member < 128 else _OTHER)
            case "RANGE":
                low, high = member
                found.update(char for char in _ASCII if low <= ord(char) <= high)
                found.update([_OTHER] if high >= 128 else [])
            case _:
                letter = str(member).rsplit("_", 1)[-1][0].lower()
                letter = letter.upper() if "_NOT_" in str(member) else letter
                found.update(char for char in _ASCII if re.match(f"\\{letter}", char))
                found.add(_OTHER)
    if not negated:
        return frozenset(found)
    return frozenset([*(char for char in _ASCII if char not in found), _OTHER])
