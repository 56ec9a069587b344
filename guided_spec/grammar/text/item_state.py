"""A position in a JSON text for which the items of some arrays have to differ.

Outside of these arrays only the place in the schema is known. Inside of them every value is read,
and of the value that is being written it is known which earlier ones it may still equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

from guided_spec.grammar.recipe import ItemRules
from guided_spec.grammar.text.key_tokens import ends_in_half, unescape

Value: TypeAlias = Any
"""A JSON value, so that equal ones are equal in Python: null, true and false are texts, strings are
bytes, arrays are tuples, and objects are frozen sets of pairs."""

_STRUCTURE = re.compile(rb'["{}\[\],]')
_IN_STRING = re.compile(rb'["\\]')
_BLANKS = b" \t\r\n"
_WORD = re.compile(rb"[^\s,\]}]*")
# Numbers that floats tell apart as far as that is possible, and that do not become 0 or infinite.
_NUMBER = re.compile(rb"-?\d*(?:\.\d*)?(?:[eE][-+]?\d{0,2})?")
LONGEST_FRACTION = 24
"""Characters of a number with a fraction or an exponent, as an item or inside of one."""
_LONGEST_INTEGER = 400
_LONG_FRACTION = 12
_NAMES = {b"null": "null", b"true": "true", b"false": "false"}
_DIGITS = 20
_TOLERANCE = 10**_DIGITS >> 52


class Mode(IntEnum):
    """What the next byte belongs to."""

    VALUE = 0  # to a value, or before one; outside of arrays of unique items after one too
    STRING = 1  # a value
    WORD = 2  # a number, or one of true, false and null
    AFTER = 3  # after a value
    BEFORE_KEY = 4
    KEY = 5
    COLON = 6  # or what comes before it


class Frame(NamedTuple):
    """An open array or object. place: in the rules.

    is_unique: whether it is an array of unique items. is_read: whether its value matters: it is
    such an array, or inside of one.
    alike: values that it may still equal. parts: its items, or its pairs of a key and a value.
    at: the index of the item, where it is not read. key: whose value comes.
    """

    place: int
    is_object: bool
    is_unique: bool
    is_read: bool
    around: Frame | None
    alike: tuple[Value, ...] = ()
    parts: tuple[Value, ...] | frozenset[Value] = ()
    at: int = 0
    key: bytes = b""


class ItemState(NamedTuple):
    """A position in a text.

    place: of the value that comes or has begun. alike: values that it may equal. text: of the
    string, word or key so far; of a string, decoded. escape: one that is not complete.
    """

    mode: Mode = Mode.VALUE
    frame: Frame | None = None
    place: int = 1
    alike: tuple[Value, ...] = ()
    text: bytes = b""
    escape: bytes = b""

    @property
    def is_read(self) -> bool:
        """Whether an array of unique items is open."""
        return self.frame is not None and self.frame.is_read

    @property
    def is_pending(self) -> bool:
        """Whether the last character of a string or key can still change."""
        return bool(self.escape) or ends_in_half(self.text)


START = ItemState()


def advance(rules: ItemRules, state: ItemState, data: bytes) -> ItemState | None:
    """The state after ``data``; None where an item equals an earlier one, or a number is too long.

    Bytes that are not JSON may lead to any state.
    """
    at, now = 0, state
    while at < len(data):
        if now.mode is Mode.STRING and not now.is_read:
            now, at = _skip_string(now, data, at)
        elif now.mode in (Mode.STRING, Mode.KEY):
            text, escape, at = unescape(data, at, now.text, now.escape)
            now = now._replace(text=text, escape=escape)
            if at < len(data):  # the quote
                at += 1
                found = _with_key(rules, now) if now.mode is Mode.KEY else _after(now, now.text)
                if found is None:
                    return None
                now = found
        elif now.is_read:
            read = _read(rules, now, data, at)
            if read is None:
                return None
            now, at = read
        else:
            match = _STRUCTURE.search(data, at)
            at = len(data) if match is None else match.end()
            if match is not None:
                now = _step(rules, now, match[0])
    return now


def is_near(rules: ItemRules, state: ItemState) -> bool:
    """Whether there may be no way on but to what is forbidden; False where there surely is one."""
    frame = state.frame
    if frame is None or not frame.is_read:
        return False
    match state.mode:
        case Mode.VALUE:
            is_empty = not frame.is_object and not frame.parts  # so that it may be closed at once
            if is_empty and () in frame.alike:
                return True
            return bool(state.alike) and not rules[state.place].is_free
        case Mode.WORD:
            return is_long(state.text) or any(_may_be(state.text, one) for one in state.alike)
        case Mode.STRING if rules[state.place].has_free_strings:
            return False
        case Mode.STRING | Mode.KEY:
            return next(starting(state), None) is not None
        case Mode.COLON:
            return any(key == frame.key for one in frame.alike for key, _ in one)
    return bool(frame.alike)


def starting(state: ItemState) -> Iterator[bytes]:
    """The strings, or keys, that the one that is being written may turn out to be."""
    frame, text = state.frame, state.text
    assert frame is not None
    if state.mode is Mode.KEY:
        found: Iterator[Value] = (key for one in frame.alike for key, _ in one)
    else:
        found = (one for one in state.alike if isinstance(one, bytes))
    return (one for one in found if state.is_pending or one.startswith(text))


def is_long(text: bytes) -> bool:
    """Whether a number may become too long."""
    is_whole = text.lstrip(b"-").isdigit()
    return len(text) > (_LONGEST_INTEGER // 2 if is_whole else _LONG_FRACTION)


def _skip_string(state: ItemState, data: bytes, at: int) -> tuple[ItemState, int]:
    """Read on in a string of no interest."""
    if state.escape:
        return state._replace(escape=b""), at + 1
    match = _IN_STRING.search(data, at)
    if match is None:
        return state, len(data)
    if match[0] == b"\\":
        return state._replace(escape=b"\\"), match.end()
    return state._replace(mode=Mode.VALUE), match.end()


def _step(rules: ItemRules, state: ItemState, byte: bytes) -> ItemState:
    """The state after one byte of structure where no array of unique items is open."""
    frame = state.frame
    match byte:
        case b'"':
            is_key = state.mode is Mode.BEFORE_KEY
            return state._replace(mode=Mode.KEY if is_key else Mode.STRING, text=b"")
        case b"{" | b"[":
            return _open(rules, state, is_object=byte == b"{")
        case b",":
            if frame is None or not frame.place:
                return state
            if frame.is_object:
                return ItemState(Mode.BEFORE_KEY, frame, 0)
            return _item(rules, frame._replace(at=frame.at + 1))
    return ItemState(Mode.VALUE, frame.around if frame else None, 0)


def _read(rules: ItemRules, state: ItemState, data: bytes, at: int) -> tuple[ItemState, int] | None:
    """Read on outside of strings, inside of an array of unique items."""
    byte, frame = data[at : at + 1], state.frame
    assert frame is not None
    if state.mode is Mode.WORD:
        return _in_word(state, data, at)
    if byte in (b" ", b"\t", b"\r", b"\n"):
        return state, at + 1
    at += 1
    match byte:
        case b"]" | b"}":
            closed = _closed(frame)
            return None if closed is None else (closed, at)
        case b",":
            if frame.is_object:
                return ItemState(Mode.BEFORE_KEY, frame, 0), at
            return _item(rules, frame), at
        case b":":
            return state._replace(mode=Mode.VALUE), at
        case b'"':
            is_key = state.mode is Mode.BEFORE_KEY
            return state._replace(mode=Mode.KEY if is_key else Mode.STRING, text=b""), at
        case b"{" | b"[":
            return _open(rules, state, is_object=byte == b"{"), at
    return state._replace(mode=Mode.WORD, text=b""), at - 1


def _in_word(state: ItemState, data: bytes, at: int) -> tuple[ItemState, int] | None:
    match = _WORD.match(data, at)
    assert match is not None
    text = state.text + match[0]
    if text[:1] not in b"tfn":
        is_whole = text.lstrip(b"-").isdigit()
        most = _LONGEST_INTEGER if is_whole else LONGEST_FRACTION
        if len(text) > most or _NUMBER.fullmatch(text) is None:
            return None
    if match.end() == len(data):
        if text not in _NAMES:
            return state._replace(text=text), len(data)
        after = _after(state, _NAMES[text])
    else:
        after = _after(state, _NAMES.get(text) or _number(text))
    return None if after is None else (after, match.end())


def _number(text: bytes) -> Value:
    try:
        return int(text) if text.lstrip(b"-").isdigit() else float(text)
    except ValueError:  # no JSON
        return text


def _open(rules: ItemRules, state: ItemState, *, is_object: bool) -> ItemState:
    """Inside of a new array or object."""
    place, around = state.place, state.frame
    is_unique = rules[place].is_unique and not is_object
    is_read = state.is_read or is_unique
    kind = frozenset if is_object else tuple
    alike = tuple(one for one in state.alike if isinstance(one, kind))
    frame = Frame(place, is_object, is_unique, is_read, around, alike, kind())
    if not is_object:
        return _item(rules, frame)
    is_followed = is_read or place > 0
    return ItemState(Mode.BEFORE_KEY if is_followed else Mode.VALUE, frame, 0)


def _item(rules: ItemRules, frame: Frame) -> ItemState:
    """Before an item of an array."""
    rule, parts = rules[frame.place], frame.parts
    assert isinstance(parts, tuple)
    index = len(parts) if frame.is_read else frame.at
    place = rule.prefix[index] if index < len(rule.prefix) else rule.items
    alike = [one[index] for one in frame.alike if index < len(one)]
    if frame.is_unique:
        alike += parts
    return ItemState(Mode.VALUE, frame, place, tuple(dict.fromkeys(alike)))


def _with_key(rules: ItemRules, state: ItemState) -> ItemState:
    """After a key."""
    frame, key = state.frame, state.text
    assert frame is not None
    rule = rules[frame.place]
    place = rule.keys.get(key, rule.other)
    if not frame.is_read:
        return ItemState(Mode.VALUE, frame, place)
    alike = dict.fromkeys(part for one in frame.alike for name, part in one if name == key)
    return ItemState(Mode.COLON, frame._replace(key=key), place, tuple(alike))


def _after(state: ItemState, value: Value) -> ItemState | None:
    """After a value inside of an array of unique items; None where an item is there already."""
    frame = _with_part(state.frame, value)
    return None if frame is None else ItemState(Mode.AFTER, frame, 0)


def _with_part(frame: Frame | None, value: Value) -> Frame | None:
    assert frame is not None
    parts = frame.parts
    if isinstance(parts, frozenset):
        pair = (frame.key, value)
        alike = tuple(one for one in frame.alike if pair in one)
        return frame._replace(parts=parts | {pair}, alike=alike, key=b"")
    if frame.is_unique and value in parts:
        return None
    at = len(parts)
    alike = tuple(one for one in frame.alike if at < len(one) and one[at] == value)
    return frame._replace(parts=(*parts, value), alike=alike)


def _closed(frame: Frame) -> ItemState | None:
    """After an array or object that is read; None where it is an item that is there already."""
    around = frame.around
    if around is None or not around.is_read:
        return ItemState(Mode.VALUE, around, 0)
    with_part = _with_part(around, frame.parts)
    return None if with_part is None else ItemState(Mode.AFTER, with_part, 0)


def _may_be(text: bytes, value: Value) -> bool:
    """Whether a word that begins with ``text`` may equal ``value``; true where unsure."""
    if isinstance(value, str):
        return value.encode().startswith(text)
    if not isinstance(value, int | float) or text[:1] in b"tfn":
        return False
    mantissa, exponent, _ = text.lower().partition(b"e")
    digits = mantissa.lstrip(b"-").replace(b".", b"").lstrip(b"0")
    if value == 0:
        return not digits
    if (value < 0) != text.startswith(b"-"):
        return False
    if not digits:
        return not exponent
    low = int(digits[:_DIGITS].ljust(_DIGITS, b"0"))
    high = low + (0 if exponent else 10 ** max(0, _DIGITS - len(digits)))
    found = _significand(value)
    around = (found // 10, found, found * 10)
    return any(low <= one + _TOLERANCE and one - _TOLERANCE <= high for one in around)


@lru_cache(maxsize=4096)
def _significand(number: int | float) -> int:
    """Its first 20 digits."""
    written = f"{abs(Decimal(number)):.{_DIGITS - 1}e}"
    return int(written.partition("e")[0].replace(".", ""))
