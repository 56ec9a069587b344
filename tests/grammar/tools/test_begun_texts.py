"""Texts with calls that are read while they grow: what is shown stays, and ends as the whole."""

from __future__ import annotations

import json
import time
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st

from guided_spec.grammar.tools.format import BegunText, MarkedText, begun_length
from guided_spec.grammar.tools.formats import TOOL_FORMATS
from tests.grammar.tools.test_tool_formats import (
    CALLS,
    KINDS,
    TOOLS,
    XML,
    Side,
    side,
    spell,
    vocabulary,
    walk,
)
from tests.tiers import examples

LIGHT = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "room": {"type": "string"}},
    "required": ["on", "room"],
}
LIGHTS = [
    {"type": "function", "function": {"name": name, "parameters": LIGHT}}
    for name in ("light", "light_2")
]
ARGUMENTS = '{"on": true, "room": "the hall"}'


def follow(found: Side, token_ids: list[int]) -> list[BegunText]:
    """What is certain behind each token; checks that nothing is taken back."""
    reader, known, written = found.marks.reader(), found.known, ""
    seen = [BegunText("")]
    for token_id in token_ids:
        written += reader.feed([token_id])
        now, last = known.read_begun(written, found.tools, found.marks), seen[-1]
        assert now.text.startswith(last.text)
        assert (now.reasoning or "").startswith(last.reasoning or "")
        assert len(now.calls) >= len(last.calls)
        for before, after in zip(last.calls, now.calls, strict=False):
            assert (before.id, before.name) == (after.id, after.name)
            assert after.arguments.startswith(before.arguments)
            if before.is_complete:
                assert after == before
            if after.is_complete:
                json.loads(found.marks.show(after.arguments))
        seen.append(now)
    return seen


def check_end(found: Side, token_ids: list[int]) -> None:
    last, read = follow(found, token_ids)[-1], found.read(token_ids)
    assert not last.is_cut
    assert all(call.is_complete for call in last.calls)
    text = found.marks.show(last.text)
    assert read.text.startswith(text) or read.text.lstrip().startswith(text)
    assert (read.reasoning or "").startswith(found.marks.show(last.reasoning or ""))
    assert [(call.id, call.name) for call in last.calls] == [(c.id, c.name) for c in read.calls]
    shown = [json.loads(found.marks.show(call.arguments)) for call in last.calls]
    assert shown == [call.arguments for call in read.calls]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=examples(20), phases=[Phase.generate])  # walks do not shrink
@given(
    tools=TOOLS,
    choice=st.sampled_from(["auto", "required", "none", "get"]),
    kind=st.sampled_from(KINDS),
    path=st.tuples(st.integers(0, 10**6), st.integers(0, 90)),
)
def test_random_texts(name: str, tools: Any, choice: str, kind: str, path: tuple[int, int]) -> None:
    found = side(name, kind, tools, choice)
    try:
        token_ids = walk(found, kind, *path)
    except AssertionError:  # it found no end, which is the other test's to judge
        reject()
    check_end(found, token_ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_arguments_come_as_they_are_written(name: str, kind: str) -> None:
    found = side(name, kind, LIGHTS, "required")
    token_ids = spell(CALLS[name].replace("%", ARGUMENTS), kind)
    check_end(found, token_ids)
    pieces = {call.arguments for seen in follow(found, token_ids) for call in seen.calls}
    assert (len(pieces) == 1) if name in XML else (len(pieces) > 20), pieces


def test_text_before_a_call_does_not_wait_for_it() -> None:
    found = side("hermes", "bytes", LIGHTS, "auto")
    call = CALLS["hermes"].replace("%", ARGUMENTS)
    seen = follow(found, spell(f"Well <b> {call}\n{call}", "bytes"))
    assert seen[8].text == "Well <b>"
    assert seen[-1].text == "Well <b>"
    assert [one.arguments for one in seen[-1].calls] == [ARGUMENTS] * 2


def test_a_name_that_begins_like_another_one() -> None:
    """Without arguments that are required, ``light`` alone could be a whole call."""
    free = {"type": "object", "properties": {}}
    loose = [
        {"type": "function", "function": {"name": name, "parameters": free}}
        for name in ("light", "light_2")
    ]
    found = side("glm_4_7", "bytes", loose, "auto")
    token_ids = spell("<tool_call>light_2</tool_call>", "bytes")
    assert [call.name for call in found.read(token_ids).calls] == ["light_2"]
    check_end(found, token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_reader_reads_as_the_whole(kind: str) -> None:
    marks = MarkedText(vocabulary(kind), ["<tool_call>"])
    token_ids = [*"é€".encode(), *spell("a<tool_call>b", kind), 0xC3, *b"x", 0xE2, 0x82]
    reader = marks.reader()
    written = "".join(reader.feed([token_id]) for token_id in token_ids)
    assert marks.read(token_ids) == written + "\ufffd"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_ends_the_text_shows_nothing_but_a_mark(kind: str) -> None:
    marks = MarkedText(vocabulary(kind), ["<tool_call>"])
    call = spell("<tool_call>", kind)
    assert marks.read([*b"ab", ord("c")], [ord("c")]) == "ab"
    assert marks.read([*b"ab", *call], call if len(call) == 1 else []) == (
        "ab" + marks.mark("<tool_call>")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_cut_is_the_longest_beginning_that_is_visible(kind: str) -> None:
    """A mark is as wide as its token is shown: not at all, or as its name."""
    marks = MarkedText(vocabulary(kind), ["<tool_call>", "</tool_call>"])
    token_ids = spell("é<tool_call><tool_call>ab</tool_call>", kind)
    text = marks.read(token_ids)
    shown = [vocabulary(kind).decode([token_id]) for token_id in token_ids]
    if len(text) != len(token_ids):  # a letter of two bytes
        shown[:2] = ["é"]
    widths = [*accumulate(map(len, shown))]
    for visible in range(widths[-1] + 2):
        assert marks.cut(text, visible) == text[: sum(width <= visible for width in widths)]


def test_to_cut_a_stream_does_not_read_all_of_it_for_every_piece() -> None:
    marks = MarkedText(vocabulary("tokens"), ["<tool_call>"])
    text = marks.mark("<tool_call>") + "x" * 500_000
    visible = len(marks.show(text))
    began = time.process_time()
    cut = [len(marks.cut(text, visible - hidden)) for hidden in range(200)]
    assert time.process_time() - began < 1  # where each letter is looked at it takes four seconds
    assert cut == [len(text) - hidden for hidden in range(200)]


def test_begun_length() -> None:
    assert [begun_length(text, "<a<b") for text in ("", "x", "x<", "<a<", "<a<b", "<a")] == [
        *(0, 0, 1, 3, 0, 2)
    ]
