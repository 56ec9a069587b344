"""A stream never shows what may turn out to be the beginning of a stop string."""

from __future__ import annotations

import pytest

from guided_spec.engine.request import OutputText
from tests.toys import VOCABULARY

TOKENS = {text: token for token, text in enumerate("abcd")}


def fed(stop: list[str], text: str) -> list[str]:
    """What is released behind each of the letters, and at the end of the text."""
    output = OutputText(VOCABULARY, stop)
    found = []
    for letter in text:
        output.feed(TOKENS[letter])
        found.append(output.text)
    output.finish()
    return [*found, output.text]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("stop", "text", "released"),
    [
        (["abc"], "dabc", ["d", "d", "d", "d", "d"]),
        (["abc"], "abd", ["", "", "abd", "abd"]),
        (["abc"], "ab", ["", "", "ab"]),
        (["abc"], "aabc", ["", "a", "a", "a", "a"]),
        (["abab"], "ababab", ["", "", "", "", "", "", ""]),
        (["bc", "abcd"], "abd", ["", "", "abd", "abd"]),
        (["d"], "abd", ["a", "ab", "ab", "ab"]),
        ([], "ab", ["a", "ab", "ab"]),
    ],
)
def test_what_is_released(stop: list[str], text: str, released: list[str]) -> None:
    assert fed(stop, text) == released
