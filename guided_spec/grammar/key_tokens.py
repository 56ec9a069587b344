"""A vocabulary's tokens as the keys of a JSON text see them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.json_keys import Mode, Place, follow, unescape

__all__ = ["KeyTokens"]

_PIECE = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)
_SPECIAL = re.compile(rb'["\\{}\[\],]')
_CHANGELESS = (Mode.OUTSIDE, Mode.BEFORE_KEY, Mode.STRING)


class KeyTokens:
    """Which tokens may end, spell or begin a key; shared by all grammars of one vocabulary.

    closers: by the decoded rest of a key, the tokens that write it and the quote behind it.
    whole: by a decoded key, the tokens that hold it with both quotes.
    loaded: tokens that may hold the ends of two keys of one object.
    texts: by their bytes, all tokens.

    All of it is made at once, where grammars are compiled: a row must not wait for it.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], ids_by_bytes: Mapping[bytes, Sequence[int]]
    ) -> None:
        self.data = token_bytes
        self.texts = ids_by_bytes
        self._is_special = [bool(_SPECIAL.search(data)) for data in self.data]
        self.closers: dict[bytes, list[int]] = {}
        self.whole: dict[bytes, list[int]] = {}
        self.loaded: list[int] = []
        self._quoted = self._having(b'"')
        for token in self._quoted.tolist():
            self._add(token, self.data[token])
        commas = self._having(b",")
        both = np.intersect1d(self._quoted, commas)
        self._turning = {
            Mode.OUTSIDE: commas,
            Mode.BEFORE_KEY: self._quoted,
            Mode.KEY: np.union1d(both, self._having(b"\\")),
            Mode.STRING: both,
            Mode.ESCAPE: both,
        }

    def _add(self, token: int, data: bytes) -> None:
        pieces = _pieces(data)
        self.closers.setdefault(_decoded(pieces[0]), []).append(token)
        # It may begin outside of strings, inside of one, or there and behind a backslash.
        starts = [(pieces, 1), (pieces, 2), (_pieces(data[1:]), 2)]
        keys = [_decoded(piece) for found, first in starts for piece in found[first:-1:2]]
        for key in dict.fromkeys(keys):
            self.whole.setdefault(key, []).append(token)
        if any(
            found[at - 1].rstrip().endswith(b",")
            for found, first in starts
            for at in range(3 if first == 1 else 2, len(found) - 1, 2)
        ):
            self.loaded.append(token)

    def quoted(self, row: NDArray[np.int32]) -> list[int]:
        """Those that hold a quote and are legal in a mask row, int32 [W]."""
        return _legal(self._quoted, row)

    def turning(self, mode: Mode, row: NDArray[np.int32]) -> list[int]:
        """Those that may lead from ``mode`` to a place before a key or in one, and are legal.

        From a key to one further on, only those with a backslash are among them.
        """
        return _legal(self._turning[mode], row)

    def follow(self, place: Place, token_id: int) -> Place | None:
        """``json_keys.follow`` of one token."""
        data = self.data[token_id]
        if not self._is_special[token_id] and place.mode in _CHANGELESS:
            return place
        return follow(place, data, self.whole) if data else place

    def _having(self, part: bytes) -> NDArray[np.int64]:
        found = (token for token, data in enumerate(self.data) if part in data)
        return np.fromiter(found, dtype=np.int64)


def _legal(token_ids: NDArray[np.int64], row: NDArray[np.int32]) -> list[int]:
    bits = row[token_ids >> 5] >> (token_ids & 31).astype(np.int32)
    legal: list[int] = token_ids[(bits & 1).astype(np.bool_)].tolist()
    return legal


def _pieces(data: bytes) -> list[bytes]:
    """What stands between the quotes that are not escaped."""

    def split() -> Iterator[bytes]:
        at = 0
        while at <= len(data):
            found = _PIECE.match(data, at)
            assert found is not None
            end = found.end() if data[found.end() : found.end() + 1] != b"\\" else len(data)
            yield data[at:end]
            at = end + 1

    return list(split())


def _decoded(piece: bytes) -> bytes:
    return unescape(piece)[0]
