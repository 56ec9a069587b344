"""Sets of characters as sequences of byte ranges: what UTF-8 makes of them."""

from __future__ import annotations

__all__ = ["LAST", "byte_sequences"]

LAST = 0x10FFFF
"""The largest code point. Surrogates count as characters, as the backend has it."""


def byte_sequences(ranges: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Inclusive ranges of code points to sequences of inclusive byte ranges, one for each byte."""
    found: list[list[tuple[int, int]]] = []
    for low, high in ranges:
        for first, last in ((0, 0x7F), (0x80, 0x7FF), (0x800, 0xFFFF), (0x10000, LAST)):
            if max(low, first) <= min(high, last):
                found.extend(_split(_utf8(max(low, first)), _utf8(min(high, last))))
    return found


def _utf8(code: int) -> bytes:
    return chr(code).encode("utf-8", "surrogatepass")


def _split(low: bytes, high: bytes) -> list[list[tuple[int, int]]]:
    """Byte ranges of all sequences from ``low`` to ``high``, which are equally long."""
    if len(low) == 1:
        return [[(low[0], high[0])]]
    if low[0] == high[0]:
        return [[(low[0], low[0]), *rest] for rest in _split(low[1:], high[1:])]
    least, most = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    found: list[list[tuple[int, int]]] = []
    first, last = low[0], high[0]
    if low[1:] != least:
        found.extend([(first, first), *rest] for rest in _split(low[1:], most))
        first += 1
    above: list[list[tuple[int, int]]] = []
    if high[1:] != most:
        above = [[(last, last), *rest] for rest in _split(least, high[1:])]
        last -= 1
    if first <= last:
        found.append([(first, last), *((0x80, 0xBF) for _ in least)])
    return found + above
