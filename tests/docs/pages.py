"""Markdown pages as lists of fenced code blocks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = sorted([README, *DOCS.glob("*.md"), *DOCS.glob("performance/*.md")])
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

FENCE = re.compile(
    r"^(?P<note><!-- not run: (?P<reason>[^\n]+?) -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<code>.*?)^```$(?P<after>\n*)",
    re.MULTILINE | re.DOTALL,
)
OUTPUTS = ("text", "output")


class Block(NamedTuple):
    """One fenced block.

    line: of its first line of code. output: the text of an output block directly behind it.
    reason: why it is not run, from the comment ``<!-- not run: reason -->`` right above it.
    """

    language: str
    code: str
    line: int
    output: str | None = None
    reason: str | None = None


def read_blocks(text: str) -> list[Block]:
    """The code blocks of a page; each carries the output block that directly follows it."""
    blocks: list[Block] = []
    end_of_last = -1
    for match in FENCE.finditer(text):
        language, code = match["language"], match["code"]
        if language in OUTPUTS and blocks and match.start() == end_of_last:
            blocks[-1] = blocks[-1]._replace(output=code)
            end_of_last = -1
            continue
        line = text.count("\n", 0, match.start("code")) + 1
        blocks.append(Block(language, code, line, reason=match["reason"]))
        end_of_last = match.end()
    return blocks
