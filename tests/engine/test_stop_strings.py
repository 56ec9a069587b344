"""What many long stop strings cost: a few steps for each letter, however long the text is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from guided_spec.engine import request
from guided_spec.engine.request import OutputText
from guided_spec.errors import ConfigError
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.types import MAX_STOP_LETTERS, MAX_STOP_STRINGS, SamplingParams

TOKEN, OTHER = 1, 2
VOCABULARY = Vocabulary((b"", b"aaaa", b"\n"), (0,), 3)
NUM_TOKENS = MAX_STOP_LETTERS // 4 - MAX_STOP_STRINGS
MOST_LINES = 120  # of Python for a token: four letters


def lines_of(function: Callable[[], object]) -> int:
    """How many lines of the module run."""
    count = 0

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != request.__file__:
            return None  # a callback of the garbage collector
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.every_case
@pytest.mark.parametrize(
    "stop",
    [
        ["a" * (MAX_STOP_LETTERS - MAX_STOP_STRINGS + at) + "b" for at in range(MAX_STOP_STRINGS)],
        [chr(ord("b") + at) * MAX_STOP_LETTERS for at in range(MAX_STOP_STRINGS)],
        ["aab" * 300 + chr(ord("A") + at) for at in range(MAX_STOP_STRINGS)],
    ],
    ids=["equal-beginnings", "other-letters", "nearly"],
)
def test_a_token_costs_the_same_anywhere(stop: list[str]) -> None:
    output = OutputText(VOCABULARY, SamplingParams(stop=stop).stop)
    lines = [lines_of(lambda: output.feed(TOKEN)) for _ in range(NUM_TOKENS)]
    assert lines[-1] <= max(lines[:10])
    assert max(lines) <= MOST_LINES
    output.feed(OTHER)  # no string is begun any more: each of its beginnings was one to try
    assert output.text == "aaaa" * NUM_TOKENS + "\n"


def test_a_text_costs_as_much_as_it_has_letters() -> None:
    """However often a beginning that was held back turns out to be none."""
    stop = ["a" * 300 + chr(ord("d") + at) for at in range(MAX_STOP_STRINGS)]
    costs = []
    for times in (2, 4):
        output = OutputText(VOCABULARY, stop)
        token_ids = ([TOKEN] * 70 + [OTHER]) * times
        costs.append(lines_of(lambda: [output.feed(one) for one in token_ids]))  # noqa: B023
        assert output.text == "".join("aaaa" if one == TOKEN else "\n" for one in token_ids)
    assert costs[1] <= costs[0] * 2.1


def test_a_letter_more_is_refused() -> None:
    most = "a" * MAX_STOP_LETTERS
    assert SamplingParams(stop=most).stop == (most,)
    with pytest.raises(ConfigError, match=r"^stop=.*1025 letters.* at most 1024"):
        SamplingParams(stop=most + "a")


def test_a_string_more_is_refused() -> None:
    most = [str(at) for at in range(MAX_STOP_STRINGS)]
    assert len(SamplingParams(stop=most).stop) == MAX_STOP_STRINGS
    with pytest.raises(ConfigError, match=r"^stop=.*65 of them.*at most 64"):
        SamplingParams(stop=[*most, "x"])
