"""The figures of the house are what they say."""

from __future__ import annotations

from tools.house import code_lines

SOURCE = '''"""A module,
explained."""

# A comment.
import json  # and another one


def load(text: str) -> object:
    """Its value."""
    return json.loads(
        # not a line of code
        text
    )


LIMIT = 3
"""An attribute, explained."""
'''


def test_lines_of_code_are_neither_blank_nor_prose() -> None:
    assert code_lines(SOURCE) == 6
    assert code_lines('"""Nothing."""') == 0
