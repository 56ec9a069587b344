"""Reasoning before an answer: where it stands in a prompt and in a text."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from guided_spec.grammar.marked_text import MarkedText

__all__ = ["BEGINNINGS", "Reasoning", "ReasoningState", "SplitText"]

BEGINNINGS = {
    "</think>": "<think>",
    "[/THINK]": "[THINK]",
    "</seed:think>": "<seed:think>",
    "<|END_THINKING|>": "<|START_THINKING|>",
    "</thought>": "<thought>",
    "\u25c1/think\u25b7": "\u25c1think\u25b7",
}
"""What begins the reasoning that a marker of ``DEFAULT_MARKERS`` ends; gpt-oss has channels."""

ReasoningState = Literal["unopened", "open", "closed"]


class SplitText(NamedTuple):
    """reasoning: None where the text has none. answer: what follows it."""

    reasoning: str | None
    answer: str


class Reasoning(NamedTuple):
    """How a model family writes its reasoning: between ``begin`` and ``end``."""

    begin: str
    end: str

    @classmethod
    def of_template(cls, template: str) -> Reasoning | None:
        """By the first end that a chat template holds; None where it holds none."""
        for end, begin in BEGINNINGS.items():
            if end in template:
                return cls(begin, end)
        return None

    def state_behind(self, prompt: str) -> ReasoningState:
        """Whether a rendered prompt has opened or closed the reasoning, or left it to the model."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return "open"
        return "closed" if prompt.endswith(self.end) else "unopened"

    def before(self, content: dict[str, Any]) -> dict[str, Any]:
        """A format of structural tags behind reasoning, which the model may write or leave out."""
        block = {"type": "tag", "begin": self.begin, "content": {"type": "any_text"}}
        return {
            "type": "sequence",
            "elements": [
                {"type": "optional", "content": {**block, "end": self.end}},
                *self.behind(content),
            ],
        }

    @staticmethod
    def behind(content: dict[str, Any]) -> list[dict[str, Any]]:
        """The elements of a sequence that follows the end: empty lines, and the content."""
        return [{"type": "regex", "pattern": "\\n{0,2}"}, content]

    def split(self, text: str, state: ReasoningState, marks: MarkedText) -> SplitText:
        """A text that ``marks`` has read, behind a prompt of that state.

        Reasoning that was cut off before its end is all of the text.
        """
        begin, end = marks.mark(self.begin), marks.mark(self.end)
        inner = text.lstrip().removeprefix(begin)
        has_begun = text.lstrip().startswith(begin)
        if state == "closed" or (state == "unopened" and not has_begun):
            return SplitText(None, text)
        reasoning, _, answer = inner.partition(end)
        return SplitText(reasoning.strip(), answer.lstrip("\n"))
