"""Sets of characters as sorted ranges of code points."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

__all__ = [
    "ANY_CHARACTER",
    "JSON_PLAIN",
    "Ranges",
    "category",
    "complement",
    "intersect",
    "normalize",
]

Ranges = tuple[tuple[int, int], ...]
"""Inclusive, ascending, and neither touching nor overlapping."""

_LAST = 0x10FFFF
# Without U+0000, which the backend cannot hold, and surrogates, which UTF-8 cannot.
ANY_CHARACTER: Ranges = ((1, 0xD7FF), (0xE000, _LAST))
# What may stand unescaped between the quotes of a JSON string.
JSON_PLAIN: Ranges = ((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, _LAST))

_ASCII: dict[str, Ranges] = {
    "digit": ((48, 57),),
    "space": ((9, 13), (32, 32)),
    "word": ((48, 57), (65, 90), (95, 95), (97, 122)),
}
_UNICODE: dict[str, Callable[[str], bool]] = {
    "digit": str.isdecimal,
    "space": str.isspace,
    "word": lambda char: char.isalnum() or char == "_",
}


def normalize(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Sort, and join what touches."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(high, joined[-1][1]))
        else:
            joined.append((low, high))
    return tuple(joined)


def complement(ranges: Ranges) -> Ranges:
    """Every code point that is not in ``ranges``."""
    gaps = []
    start = 0
    for low, high in ranges:
        if start < low:
            gaps.append((start, low - 1))
        start = high + 1
    if start <= _LAST:
        gaps.append((start, _LAST))
    return tuple(gaps)


def intersect(one: Ranges, other: Ranges) -> Ranges:
    """The code points in both."""
    return complement(normalize((*complement(one), *complement(other))))


@cache
def category(kind: str, *, ascii_only: bool) -> Ranges:
    """The characters of ``\\d`` ("digit"), ``\\s`` ("space") or ``\\w`` ("word")."""
    if ascii_only:
        return _ASCII[kind]
    holds = _UNICODE[kind]
    return normalize((code, code) for code in range(_LAST + 1) if holds(chr(code)))
