"""A vocabulary's tokens byte by byte, and texts written in as few of them as possible."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion.endings import NEVER
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import row_of

_LONGEST = 24  # bytes of a token that a shortest end is written with
_MOST_SPELLED = 1 << 16
_MOST_WRITTEN = 1 << 12
_MOST_SETS = 8  # of characters; each takes 9 bytes a token
_PARTIAL = 2
_MOST_SPELLINGS = 8  # that are remembered; one of 150,000 tokens takes some 60 MB


_LOW = 2**64 - 1


class Characters(NamedTuple):
    """A set of characters.

    ascii: bit b for the byte b. is_wide: whether it holds every other character, too.
    """

    ascii: int
    is_wide: bool

    def holds(self, other: Characters) -> bool:
        """Whether all of the other ones are among these."""
        return other.ascii & ~self.ascii == 0 and self.is_wide >= other.is_wide


class MadeOf(NamedTuple):
    """Tokens of nothing but some characters, and the others; as indices into ``Spelling.ids``.

    is_token: bool [V], the first ones by their ids.
    """

    own: NDArray[np.int64]
    others: NDArray[np.int64]
    is_token: NDArray[np.bool_]


class Spelling:
    """One vocabulary, prepared to advance an automaton over bytes by all its tokens at once.

    ids: int64, the tokens with any bytes, the longest first. columns: entry i holds byte i of
    those that have one, uint8, in the order of ``ids``. longest: bytes of the longest token.
    heads: [256], by their first byte, indices into ``ids``. num_characters: int64 [tokens].
    made_of: a set of characters to the tokens that are made of them. second: a first byte to [257],
    its head by the second byte; last the token of that one byte.
    write: tokens that write some bytes, one a byte if there are such; None where none do.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.vocab_size
        self.token_bytes = vocabulary.token_bytes
        self.stops = frozenset(vocabulary.stop_token_ids)
        self.stop_token_ids = np.array(vocabulary.stop_token_ids, dtype=np.int64)
        self.single_bytes = frozenset(np.flatnonzero(vocabulary.single_byte_ids >= 0).tolist())
        self._ids = vocabulary.ids_by_bytes
        self._num_tokens: dict[bytes, int] = {b"": 0}
        self._singles: list[int] = vocabulary.single_byte_ids.tolist()
        self.write = lru_cache(maxsize=_MOST_WRITTEN)(self._write_all)
        self.made_of = lru_cache(maxsize=_MOST_SETS)(self._made_of)
        self.second = cache(self._by_second)
        lengths = np.array([len(data) for data in self.token_bytes])
        order = np.argsort(-lengths, kind="stable")
        self.ids: NDArray[np.int64] = order[: int((lengths > 0).sum())].astype(np.int64)
        self.longest = vocabulary.longest_token
        counts = [int((lengths > at).sum()) for at in range(self.longest)]
        texts = [self.token_bytes[token] for token in self.ids.tolist()]
        self.columns = [
            np.frombuffer(bytes(text[at] for text in texts[:count]), dtype=np.uint8)
            for at, count in enumerate(counts)
        ]
        self.heads = self._heads()
        self._held: NDArray[np.uint64] = np.zeros((len(texts), 2), dtype=np.uint64)
        self.num_characters: NDArray[np.int64] = np.zeros(len(texts), dtype=np.int64)
        for column in self.columns:
            rows = np.flatnonzero(column < 128)
            bits = np.uint64(1) << (column[rows] & 63).astype(np.uint64)
            self._held[rows, column[rows] >> 6] |= bits
            self.num_characters[: len(column)] += column & 0xC0 != 0x80  # bytes that begin one
        self._width = np.array([_width(text) for text in texts], dtype=np.uint8)

    @cached_property
    def without_text(self) -> NDArray[np.int32]:
        """int32 [W]: the tokens with a byte that no text holds."""
        held = [token for token, data in enumerate(self.token_bytes) if NO_TEXT in data]
        return row_of(held, self.vocab_size)

    def _heads(self) -> list[NDArray[np.int64]]:
        """[256]: by their first byte the tokens, as indices into ``ids``."""
        if not self.columns:
            return [np.zeros(0, dtype=np.int64)] * 256
        first = self.columns[0]
        order = np.argsort(first, kind="stable")
        return np.split(order, np.searchsorted(first[order], np.arange(1, 256)))

    def _write_all(self, text: bytes) -> tuple[int, ...] | None:
        """Tokens that write ``text``, one a byte if there are such; None where none do."""
        written = tuple(self._write(text))
        return written if written or not text else None

    def _write(self, text: bytes) -> Iterator[int]:
        if all(self._singles[byte] >= 0 for byte in text):
            yield from map(self._singles.__getitem__, text)
            return
        if self.num_tokens(text) >= NEVER:
            return
        while text:
            ways = ((token, rest) for token, rest in self.beginnings(text))
            token, text = min(ways, key=lambda way: self.num_tokens(way[1]))
            yield token

    def _by_second(self, first: int) -> list[NDArray[np.int64]]:
        head = self.heads[first]
        longer = head[head < len(self.columns[1])] if len(self.columns) > 1 else head[:0]
        second = self.columns[1][longer] if len(longer) else np.zeros(0, dtype=np.uint8)
        order = np.argsort(second, kind="stable")
        parts = np.split(longer[order], np.searchsorted(second[order], np.arange(1, 256)))
        return [*parts, head[len(longer) :]]  # the longest come first

    def _made_of(self, characters: Characters) -> MadeOf:
        held, width = self._held, self._width
        low, high = ~characters.ascii & _LOW, ~(characters.ascii >> 64) & _LOW
        outside = (held[:, 0] & np.uint64(low)) | (held[:, 1] & np.uint64(high))
        is_made = (outside == 0) & (width <= characters.is_wide)
        own, others = np.flatnonzero(is_made), np.flatnonzero(~is_made)
        is_token: NDArray[np.bool_] = np.zeros(self.vocab_size, dtype=np.bool_)
        is_token[self.ids[own]] = True
        return MadeOf(own, others, is_token)

    def beginnings(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        """Tokens of at most 24 bytes that ``text`` begins with, each with the rest of it."""
        for length in range(1, min(len(text), _LONGEST) + 1):
            for token_id in self._ids.get(text[:length], ()):
                yield token_id, text[length:]

    def num_tokens(self, text: bytes) -> int:
        """The fewest tokens that write ``text``, of those of at most 24 bytes; else ``NEVER``."""
        known = self._num_tokens
        if text in known:
            return known[text]
        if len(known) > _MOST_SPELLED:
            self._num_tokens = known = {b"": 0}
        for start in range(len(text) - 1, -1, -1):
            rest = text[start:]
            if rest not in known:
                lengths = range(1, min(len(rest), _LONGEST) + 1)
                ways = [known[rest[n:]] for n in lengths if rest[:n] in self._ids]
                known[rest] = min(NEVER, 1 + min(ways, default=NEVER))
        return known[text]


NO_TEXT = 0xFF
"""A byte that no text holds in UTF-8. It begins what stands for an added token, see ``mark_of``."""


def mark_of(token_id: int) -> bytes:
    """What an added token that a grammar names is spelled with, where rules are read as bytes.

    No mark is the beginning of another one.
    """
    return b"%c%08d" % (NO_TEXT, token_id)


class Spellings:
    """The spellings of one vocabulary, for each set of added tokens that a grammar names."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self.of = lru_cache(maxsize=_MOST_SPELLINGS)(self._make)

    def _make(self, named: frozenset[int] = frozenset()) -> Spelling:
        if not named:
            return Spelling(self._vocabulary)
        data = list(self._vocabulary.token_bytes)
        for token_id in named:
            data[token_id] = mark_of(token_id)
        return Spelling(replace(self._vocabulary, token_bytes=tuple(data)))


def _width(text: bytes) -> int:
    """0 for ASCII, 1 where whole characters of other kinds are in it, 2 for parts of them."""
    if text.isascii():
        return 0
    try:
        text.decode()
    except UnicodeDecodeError:
        return _PARTIAL
    return 1
