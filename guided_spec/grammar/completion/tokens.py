"""A vocabulary's tokens as a search for the end of a text sees them."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion.endings import pack_row
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["SearchTokens", "add_tokens", "bits_of", "first_tokens", "spread_tokens"]

_SMALL = 64  # tokens of a vocabulary that are all searched
_CLOSING = b'"}]'  # quotes first: brackets close no string
_LEADING = b":,"
_RANK_OF_REST = 16
_WORN = 512  # above all ranks
_BLANK = re.compile(rb"[ \t\r\n]+")
_WORD = re.compile(rb'[^\[\]{},:"\\ \t\r\n]+')
_PARTIAL = b"\xff"
_PART = re.compile(rb"[\xc2-\xdf]$|[\xe0-\xef][\x80-\xbf]?$|[\xf0-\xf4][\x80-\xbf]{0,2}$")


class SearchTokens:
    """Made once for a vocabulary.

    is_small: whether it has so few tokens that each of them is searched.
    steps: int64, the tokens that a search goes by: those of a single byte, where there are more.
    stops: int64, the tokens that end a text.
    content: int32 [W], a row of the tokens of whole characters without quotes and backslashes: in a
    JSON string they neither end nor escape anything.
    turns: int64, all other tokens that write anything. kinds: int64 [turns], equal for tokens that
    are alike in JSON but for their words; short ones come first. num_plain: those below it hold no
    backslash.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        data = vocabulary.token_bytes[: vocabulary.vocab_size]
        self.is_small = vocabulary.vocab_size <= _SMALL
        self.stops = np.array(sorted(vocabulary.stop_token_ids), dtype=np.int64)
        is_content = np.array([bool(text) and _is_content(text) for text in data])
        self.content = pack_row(is_content)
        written = [token for token, text in enumerate(data) if text]
        self.turns = np.array([t for t in written if not is_content[t]], dtype=np.int64)
        kinds = [_kind(data[token]) for token in self.turns.tolist()]
        order = sorted(dict.fromkeys(kinds), key=_order_of_kinds)
        self.num_plain = sum(b"\\" not in kind for kind in order)
        numbers = {kind: number for number, kind in enumerate(order)}
        self.kinds = np.array([numbers[kind] for kind in kinds], dtype=np.int64)
        singles = vocabulary.single_byte_ids
        steps = written if self.is_small else singles[singles >= 0].tolist()
        self.steps = np.array(steps, dtype=np.int64)
        self._rank = np.array([_rank(data[token]) for token in steps], dtype=np.int64)
        self._is_worn = self._rank >= _RANK_OF_REST

    def next_steps(
        self, row: NDArray[np.int32], used: NDArray[np.int64], count: int
    ) -> NDArray[np.int64]:
        """The first ``count`` indices into ``steps`` to try, of those in ``row``.

        Closing bytes, those between values, what was used least so far; blanks last. A search that
        prefers the same byte again and again never leaves a loop of the grammar.

        used: int64 [steps], how often the search has used each of them.
        """
        legal = np.flatnonzero(bits_of(row, self.steps))
        order = self._rank[legal] + np.where(self._is_worn[legal], used[legal] * _WORN, 0)
        found: NDArray[np.int64] = legal[np.argsort(order, kind="stable")[:count]]
        return found


def bits_of(row: NDArray[np.int32], token_ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [tokens]: the bits that ``row``, int32 [W], has for some tokens."""
    found: NDArray[np.bool_] = (row[token_ids >> 5] >> (token_ids & 31) & 1).astype(np.bool_)
    return found


def first_tokens(row: NDArray[np.int32], count: int) -> list[int]:
    """The first ``count`` tokens of ``row``, int32 [W]."""
    words = np.flatnonzero(row)[:count]
    bits = np.unpackbits(row[words].view(np.uint8), bitorder="little").reshape(-1, 32)
    at, bit = np.nonzero(bits)
    found: list[int] = (words[at] * 32 + bit)[:count].tolist()
    return found


def spread_tokens(row: NDArray[np.int32], count: int) -> list[int]:
    """At most ``count`` tokens of ``row``, int32 [W]: the first ones, and some from all over."""
    words = np.flatnonzero(row)
    steps = min(len(words), count // 2)
    spread = words[np.linspace(0, len(words) - 1, steps).astype(np.int64)] if steps else words
    bits = np.unpackbits(row[spread].view(np.uint8), bitorder="little").reshape(-1, 32)
    far: list[int] = (spread * 32 + bits.argmax(axis=1)).tolist()
    return list(dict.fromkeys([*first_tokens(row, count // 2), *far]))


def add_tokens(row: NDArray[np.int32], token_ids: NDArray[np.int64]) -> None:
    """Set the bits of some tokens in ``row``, int32 [W]."""
    bits = (np.uint32(1) << (token_ids & 31).astype(np.uint32)).view(np.int32)
    np.bitwise_or.at(row, token_ids >> 5, bits)


def _rank(text: bytes) -> int:
    first = text[0]
    if first in _CLOSING:
        return _CLOSING.index(first)
    if first in _LEADING:
        return len(_CLOSING) + _LEADING.index(first)
    if text.isspace():
        return _WORN - 1
    is_digit = chr(first).isdigit()
    return _RANK_OF_REST + (0 if is_digit else 128) + first // 2


def _is_content(data: bytes) -> bool:
    return b'"' not in data and b"\\" not in data and _is_utf8(data)


def _kind(data: bytes) -> bytes:
    """The token with words and blanks shortened, and what it lacks of a character at its end."""
    found = _PART.search(data)
    part = found[0] if found else b""
    whole = _WORD.sub(b"a", _BLANK.sub(b" ", data[: len(data) - len(part)]))
    if not part and _is_utf8(data):
        return whole
    return _PARTIAL + whole + _lead(part[:1]) + b"." * len(part)


def _lead(byte: bytes) -> bytes:
    """First bytes of characters that may go on alike."""
    if byte in (b"\xe0", b"\xed", b"\xf0", b"\xf4") or byte < b"\xc2":
        return byte
    return b"\xc2" if byte < b"\xe0" else b"\xe1" if byte < b"\xf0" else b"\xf1"


def _order_of_kinds(kind: bytes) -> tuple[bool, bool, int]:
    is_part = kind.startswith(_PARTIAL)
    return b"\\" in kind, is_part, len(kind) - 2 * kind.startswith(b'"')


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
