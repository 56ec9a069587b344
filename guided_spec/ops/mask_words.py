"""Rows of token bitmasks on the host: int32 [W], bit ``t % 32`` of word ``t // 32`` for token t.

Grammars are compiled where torch is not loaded: this needs none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

BITS = 32
"""Of a word."""
_WORDS_AT_ONCE = 16


def num_mask_words(vocab_size: int) -> int:
    """W, the number of int32 words that hold ``vocab_size`` bits."""
    return -(-vocab_size // BITS)


def pack_row(is_legal: NDArray[np.bool_]) -> NDArray[np.int32]:
    """bool [V] to int32 [W]; the bits after the last token are 0."""
    bits = np.zeros(num_mask_words(len(is_legal)) * BITS, dtype=np.uint8)
    bits[: len(is_legal)] = is_legal
    row: NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)
    return row


@lru_cache(maxsize=4)
def full_row(vocab_size: int) -> NDArray[np.int32]:
    """The row that forbids no token of V. Read only."""
    row = pack_row(np.ones(vocab_size, dtype=np.bool_))
    row.flags.writeable = False
    return row


def row_of(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """The row of these tokens."""
    row = np.zeros(num_mask_words(vocab_size), dtype=np.int32)
    add_tokens(row, np.array(token_ids, dtype=np.int64))
    return row


def add_tokens(row: NDArray[np.int32], token_ids: NDArray[np.int64]) -> None:
    """Set the bits of some tokens."""
    bits = (np.uint32(1) << (token_ids & 31).astype(np.uint32)).view(np.int32)
    np.bitwise_or.at(row, token_ids >> 5, bits)


def bits_of(row: NDArray[np.int32], token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [tokens]: the bits of some tokens."""
    bits: NDArray[np.bool_] = (row[token_ids >> 5] >> (token_ids & 31) & 1).astype(np.bool_)
    return bits


def ids_of(row: NDArray[np.int32], vocab_size: int | None = None) -> list[int]:
    """The tokens whose bits are set, ascending; those of V at most."""
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    ids: list[int] = np.flatnonzero(bits[:vocab_size]).tolist()
    return ids


def set_bits(row: NDArray[np.int32]) -> Iterator[int]:
    """Yield the tokens whose bits are set, ascending; little is read for the first ones."""
    words = np.flatnonzero(row)
    for start in range(0, len(words), _WORDS_AT_ONCE):
        some = words[start : start + _WORDS_AT_ONCE]
        bits = np.unpackbits(row[some].view(np.uint8), bitorder="little").reshape(-1, 32)
        at, bit = np.nonzero(bits)
        yield from (some[at] * 32 + bit).tolist()


def first_tokens(row: NDArray[np.int32], count: int) -> list[int]:
    """The first ``count`` tokens; most of a long row is not read."""
    words = np.flatnonzero(row)[:count]
    bits = np.unpackbits(row[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    at, bit = np.nonzero(bits)
    found: list[int] = (words[at] * 32 + bit)[:count].tolist()
    return found


def spread_tokens(row: NDArray[np.int32], count: int) -> list[int]:
    """At most ``count`` tokens: the first ones, and some from all over."""
    words = np.flatnonzero(row)
    steps = min(len(words), count // 2)
    spread = words[np.linspace(0, len(words) - 1, steps).astype(np.int64)] if steps else words
    bits = np.unpackbits(row[spread].view(np.uint8), bitorder="little").reshape(-1, 32)
    far: list[int] = (spread * 32 + bits.argmax(axis=1)).tolist()
    return list(dict.fromkeys([*first_tokens(row, count // 2), *far]))
