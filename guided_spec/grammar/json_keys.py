"""Where a JSON text stands, byte by byte, and the keys that each object around it has so far."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Container
from enum import IntEnum
from typing import NamedTuple

__all__ = ["START", "Frame", "Keys", "Mode", "Place", "follow", "unescape"]

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

    OUTSIDE = 0  # of strings: to a value, or to what stands behind a key or value
    BEFORE_KEY = 1  # behind an object's brace or comma
    KEY = 2
    STRING = 3  # a value
    ESCAPE = 4  # in such a string, behind a backslash


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
    """An open object, or an array (keys: None), and what it stands in.

    spelled: keys of this object and those around it that one token may spell in full.
    """

    keys: Keys | None
    around: Frame | None
    spelled: tuple[bytes, ...]


class Place(NamedTuple):
    """A position in a text. key: so far, decoded. escape: one that is not complete, in a key."""

    mode: Mode = Mode.OUTSIDE
    frame: Frame | None = None
    key: bytes = b""
    escape: bytes = b""

    @property
    def is_pending(self) -> bool:
        """Whether the key's last character can still change."""
        return bool(self.escape) or _ends_in_half(self.key)


START = Place()


def follow(place: Place, data: bytes, spelled: Container[bytes] = ()) -> Place | None:
    """The place behind ``data``; None where a key is written for the second time in one object.

    What is no JSON leads anywhere. spelled: the keys to remember as such.
    """
    mode, frame, key, escape = place
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
    return Place(mode, frame, key, escape)


def unescape(
    data: bytes, at: int = 0, key: bytes = b"", escape: bytes = b""
) -> tuple[bytes, bytes, int]:
    """Read on in a string from ``data[at]``, up to its end or to the quote that closes it.

    Returns the decoded text behind ``key``, an escape that is not complete, and where that is.
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
    """Behind one byte of structure."""
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
    if 0xDC00 <= code <= 0xDFFF and _ends_in_half(key):
        high = ord(key[-3:].decode("utf-8", "surrogatepass"))
        key, code = key[:-3], 0x10000 + ((high - 0xD800) << 10) + code - 0xDC00
    return key + chr(code).encode("utf-8", "surrogatepass")


def _ends_in_half(key: bytes) -> bool:
    return len(key) >= 3 and key[-3] == 0xED and 0xA0 <= key[-2] <= 0xAF
