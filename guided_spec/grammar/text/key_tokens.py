"""The state of a JSON text, byte by byte, and what each token does to the keys around it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Container, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.ops.mask_words import bits_of, full_row, row_of

_MOST_NEW = 64
_QUOTE, _BACKSLASH = b'"\\'
_STRUCTURE = re.compile(rb'["{}\[\],]')
_IN_STRING = re.compile(rb'["\\]')
_SIMPLE = dict(
    zip(b'"\\/bfnrt', (b'"', b"\\", b"/", b"\b", b"\f", b"\n", b"\r", b"\t"), strict=True)
)
_LONG_ESCAPE = len("\\u0061")


class Mode(IntEnum):
    """What the next byte belongs to."""

    OUTSIDE = 0  # of strings: to a value, or to what stands after a key or value
    BEFORE_KEY = 1  # after an object's brace or comma
    KEY = 2
    STRING = 3  # a value
    ESCAPE = 4  # in such a string, after a backslash


class Keys(NamedTuple):
    """The keys of one object, decoded, as UTF-8; never changed. ``old`` is sorted.

    Most are in ``old``, which positions of a text share.
    """

    old: tuple[bytes, ...] = ()
    new: tuple[bytes, ...] = ()

    def holds(self, key: bytes) -> bool:
        """Whether the object has this key."""
        at = bisect_left(self.old, key)
        return key in self.new or (at < len(self.old) and self.old[at] == key)

    def with_key(self, key: bytes) -> Keys:
        """These and one more."""
        if len(self.new) < _MOST_NEW:
            return Keys(self.old, (*self.new, key))
        return Keys(tuple(sorted((*self.old, *self.new, key))))

    def starting(self, prefix: bytes) -> list[bytes]:
        """Those that begin with ``prefix``."""
        found = [key for key in self.new if key.startswith(prefix)]
        for at in range(bisect_left(self.old, prefix), len(self.old)):
            if not self.old[at].startswith(prefix):
                break
            found.append(self.old[at])
        return found


class Frame(NamedTuple):
    """An open object, or an array (keys: None), and the frame around it.

    spelled: keys of this object and those around it that one token may spell in full.
    """

    keys: Keys | None
    around: Frame | None
    spelled: tuple[bytes, ...]


class KeyState(NamedTuple):
    """A position in a text. key: so far, decoded. escape: one that is not complete, in a key."""

    mode: Mode = Mode.OUTSIDE
    frame: Frame | None = None
    key: bytes = b""
    escape: bytes = b""

    @property
    def is_pending(self) -> bool:
        """Whether the key's last character can still change."""
        return bool(self.escape) or ends_in_half(self.key)


START = KeyState()


def advance(state: KeyState, data: bytes, spelled: Container[bytes] = ()) -> KeyState | None:
    """The state after ``data``; None where a key is written for the second time in one object.

    Bytes that are not JSON may lead to any state. spelled: the keys to remember as such.
    """
    mode, frame, key, escape = state
    at, end = 0, len(data)
    while at < end:
        match mode:
            case Mode.KEY:
                key, escape, at = unescape(data, at, key, escape)
                if at < end:  # the quote
                    frame = _closed(frame, key, spelled)
                    if frame is None:
                        return None
                    mode, key, at = Mode.OUTSIDE, b"", at + 1
            case Mode.STRING:
                found = _IN_STRING.search(data, at)
                at = end if found is None else found.end()
                if found is not None:
                    mode = Mode.OUTSIDE if found[0] == b'"' else Mode.ESCAPE
            case Mode.ESCAPE:
                mode, at = Mode.STRING, at + 1
            case _:
                found = _STRUCTURE.search(data, at)
                at = end if found is None else found.end()
                if found is not None:
                    mode, frame = _step(found[0], mode, frame)
    return KeyState(mode, frame, key, escape)


def unescape(
    data: bytes, at: int = 0, key: bytes = b"", escape: bytes = b""
) -> tuple[bytes, bytes, int]:
    """Read on in a string from ``data[at]``, up to its end or to the quote that closes it.

    Returns ``key`` with the decoded text added, an incomplete escape, and the index reached.
    """
    if not escape and b"\\" not in data:
        stop = data.find(b'"', at)
        stop = len(data) if stop < 0 else stop
        return key + data[at:stop], b"", stop
    while at < len(data) and (escape or data[at] != _QUOTE):
        byte, at = data[at : at + 1], at + 1
        if not escape and byte != b"\\":
            key += byte
            continue
        escape += byte
        if escape[1:2] == b"u" and len(escape) == _LONG_ESCAPE:
            key, escape = _with_unit(key, escape[2:]), b""
        elif len(escape) > 1 and escape[1:2] != b"u":
            key, escape = key + _SIMPLE.get(escape[1], b""), b""
    return key, escape, at


def _step(byte: bytes, mode: Mode, frame: Frame | None) -> tuple[Mode, Frame | None]:
    """The mode and frame after one byte of structure."""
    match byte:
        case b'"':
            return (Mode.KEY if mode is Mode.BEFORE_KEY else Mode.STRING), frame
        case b",":
            in_object = frame is not None and frame.keys is not None
            return (Mode.BEFORE_KEY if in_object else Mode.OUTSIDE), frame
        case b"{" | b"[":
            is_object = byte == b"{"
            inner = Frame(Keys() if is_object else None, frame, frame.spelled if frame else ())
            return (Mode.BEFORE_KEY if is_object else Mode.OUTSIDE), inner
        case _:
            return Mode.OUTSIDE, frame.around if frame else None


def _closed(frame: Frame | None, key: bytes, spelled: Container[bytes]) -> Frame | None:
    """The object with one key more; None where it has it."""
    if frame is None or frame.keys is None or frame.keys.holds(key):
        return None
    more = (*frame.spelled, key) if key in spelled else frame.spelled
    return Frame(frame.keys.with_key(key), frame.around, more)


def _with_unit(key: bytes, digits: bytes) -> bytes:
    """``key`` and one code unit of UTF-16; two halves of a character are joined."""
    try:
        code = int(digits, 16)
    except ValueError:  # no JSON
        return key
    if 0xDC00 <= code <= 0xDFFF and ends_in_half(key):
        high = ord(key[-3:].decode("utf-8", "surrogatepass"))
        key, code = key[:-3], 0x10000 + ((high - 0xD800) << 10) + code - 0xDC00
    return key + chr(code).encode("utf-8", "surrogatepass")


def ends_in_half(key: bytes) -> bool:
    return len(key) >= 3 and key[-3] == 0xED and 0xA0 <= key[-2] <= 0xAF


_PIECE = re.compile(rb'(?:[^"\\]|\\.)*', re.DOTALL)
_SPECIAL = re.compile(rb'["\\{}\[\],]')
_OPENER = re.compile(rb'[ \t\r\n]*"([^"\\{}\[\],]*)')
_CALM = re.compile(rb'[^"]*"[\s}]*(?:,\s*(?:"[^"]*)?|\][^"\[{]*)?', re.DOTALL)
_MIXED = re.compile(rb'"[^"]*["{}\[\],:]|[{}\[\],:].*"', re.DOTALL)
_EMPTY = re.compile(rb"\[[^\[\],]*\]")
_NESTED = re.compile(rb'\[.*[\]}"\del]\s*,', re.DOTALL)
CHANGELESS = (Mode.OUTSIDE, Mode.BEFORE_KEY, Mode.STRING)
"""Modes in which tokens that are not ``special`` change nothing."""


class KeyTokens:
    """Which tokens may end, spell or begin a key; shared by all grammars of one vocabulary.

    closers: by the decoded rest of a key, the tokens that write it and the quote after it.
    whole: by a decoded key, the tokens that hold it with both quotes.
    loaded: tokens that may hold the ends of two keys of one object.
    texts: by their bytes, all tokens.
    special: tokens that hold a part of JSON's structure.
    openers: by the rest, tokens of blanks, a quote and a rest without structure; the row has all
    others.
    mixed: tokens that hold a quote and other structure. dense: of these, those that may write all
    of a value after the end of a string. escaping: those that hold a backslash.
    escaped: of these, by what they write, those without a quote. longest: bytes of what the longest
    token writes.
    nested: tokens that may begin an array and end an item of it.

    All of it is made at once, where grammars are compiled: a row must not wait for it.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], ids_by_bytes: Mapping[bytes, Sequence[int]]
    ) -> None:
        self.data = token_bytes
        self.texts = ids_by_bytes
        self.special = frozenset(t for t, data in enumerate(self.data) if _SPECIAL.search(data))
        self.closers: dict[bytes, list[int]] = {}
        self.whole: dict[bytes, list[int]] = {}
        self.loaded: list[int] = []
        self._quoted = self._having(b'"')
        for token in self._quoted.tolist():
            self._add(token, self.data[token])
        self.openers: dict[bytes, list[int]] = {}
        for token in self._quoted.tolist():
            if found := _OPENER.fullmatch(self.data[token]):
                self.openers.setdefault(found[1], []).append(token)
        every = [token for tokens in self.openers.values() for token in tokens]
        self.no_openers_row = full_row(len(self.data)) & ~row_of(every, len(self.data))
        self.mixed = self._matching(_MIXED, self._quoted)
        dense = [token for token in self.mixed.tolist() if not _CALM.fullmatch(self.data[token])]
        self.dense = np.array(dense, dtype=np.int64)
        nested = [t for t in sorted(self.special) if _may_end_item(self.data[t])]
        self.nested = np.array(nested, dtype=np.int64)
        commas = self._having(b",")
        both = np.intersect1d(self._quoted, commas)
        self.escaping = self._having(b"\\")
        self.escaped: dict[bytes, list[int]] = {}
        for token in np.setdiff1d(self.escaping, self._quoted).tolist():
            self.escaped.setdefault(_decoded(self.data[token]), []).append(token)
        self.longest = max(map(len, self.data), default=0)
        self._turning = {
            Mode.OUTSIDE: commas,
            Mode.BEFORE_KEY: self._quoted,
            Mode.KEY: np.union1d(both, self.escaping),
            Mode.STRING: both,
            Mode.ESCAPE: both,
        }

    def _add(self, token: int, data: bytes) -> None:
        pieces = _pieces(data)
        self.closers.setdefault(_decoded(pieces[0]), []).append(token)
        # It may begin outside of strings, inside of one, or there and after a backslash.
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
        return legal(self._quoted, row)

    def turning(self, mode: Mode, row: NDArray[np.int32]) -> list[int]:
        """Those that may lead from ``mode`` to a state before a key or in one, and are legal.

        From a key to one further on, only those with a backslash are among them.
        """
        return legal(self._turning[mode], row)

    def advance(self, state: KeyState, token_id: int) -> KeyState | None:
        """``advance`` by the bytes of one token."""
        data = self.data[token_id]
        if token_id not in self.special and state.mode in CHANGELESS:
            return state
        return advance(state, data, self.whole) if data else state

    def _matching(self, form: re.Pattern[bytes], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        found = (token for token in tokens.tolist() if form.search(self.data[token]))
        return np.fromiter(found, dtype=np.int64)

    def _having(self, part: bytes) -> NDArray[np.int64]:
        found = (token for token, data in enumerate(self.data) if part in data)
        return np.fromiter(found, dtype=np.int64)


def _may_end_item(data: bytes) -> bool:
    """Whether a token may begin an array and write a comma in it."""
    while b'"' not in data and (shorter := _EMPTY.sub(b"0", data)) != data:
        data = shorter
    return _NESTED.search(data) is not None


def legal(token_ids: NDArray[np.int64], row: NDArray[np.int32]) -> list[int]:
    """Those whose bits are set in a mask row, int32 [W]."""
    found: list[int] = token_ids[bits_of(row, token_ids)].tolist()
    return found


def _pieces(data: bytes) -> list[bytes]:
    """The pieces between the quotes that are not escaped."""

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
