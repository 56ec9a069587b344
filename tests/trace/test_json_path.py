"""The pointer of the value being written, against the values that the finished text holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.trace.record import JsonPath

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)


def find(document: Any, pointer: str) -> Any:
    """RFC 6901."""
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        document = document[int(name)] if isinstance(document, list) else document[name]
    return document


def pieces(value: Any, pointer: str = "") -> Iterator[tuple[str, str]]:
    """The text of ``json.dumps`` in pieces, each with the pointer right before it."""
    if isinstance(value, dict) and value:
        for number, (key, item) in enumerate(value.items()):
            yield ("{" if number == 0 else ", "), pointer
            yield json.dumps(key) + ": ", pointer
            yield from pieces(item, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}")
        yield "}", pointer
    elif isinstance(value, list) and value:
        for number, item in enumerate(value):
            yield ("[" if number == 0 else ", "), pointer
            yield from pieces(item, f"{pointer}/{number}")
        yield "]", pointer
    else:
        yield json.dumps(value), pointer


@given(VALUES)
def test_before_every_piece(value: Any) -> None:
    path, text = JsonPath(), ""
    for piece, expected in pieces(value):
        # A number or word ends with what follows it, and behind "[" the array may end at once.
        is_open = text[-1:].isalnum() or (text.endswith("[") and piece != "]")
        if not is_open:
            assert path.pointer == expected, text
        path.feed(piece.encode())
        text += piece
    assert text == json.dumps(value)
    assert path.pointer == ""


@given(VALUES, st.data())
def test_wherever_it_is_cut(value: Any, data: st.DataObject) -> None:
    """Byte by byte, in forks, or at once; keys and strings beyond ASCII too."""
    whole = json.dumps(value, ensure_ascii=False).encode()
    cut = data.draw(st.integers(0, len(whole)))
    path, one = JsonPath(), JsonPath()
    path.feed(whole[:cut])
    for byte in whole[:cut]:
        one = one.fork()
        one.feed(bytes([byte]))
    assert path.pointer == one.pointer
    other = path.fork()
    other.feed(b"[]}],,{{")
    assert path.pointer == one.pointer, "a fork moves its origin"
    find(value, path.pointer)


@pytest.mark.parametrize(
    ("text", "pointer"),
    [
        ("", ""),
        ("{", ""),
        ('{"a', ""),
        ('{"a"', ""),
        ('{"a":', "/a"),
        ('{"a": "b', "/a"),
        ('{"a": "b"', ""),
        ('{"a": 12', "/a"),
        ('{"a": 12,', ""),
        ('{"a": [', "/a"),
        ('{"a": [1', "/a/0"),
        ('{"a": [1,', "/a/1"),
        ('{"a": [{"b": 1}, {"c', "/a/1"),
        ('{"a": [{"b": 1}, {"c": tr', "/a/1/c"),
        ('{"a": [[], "x"]', ""),
        ('{"a/b~": {"\\u00e9\\"": ', '/a~1b~0/é"'),
        ('["}", "[\\"', "/1"),
        ('["}", "[\\"" ', ""),
        ("12", ""),
        ('{"a": 1}', ""),
    ],
)
def test_of_a_text_so_far(text: str, pointer: str) -> None:
    path = JsonPath()
    path.feed(text.encode())
    assert path.pointer == pointer
