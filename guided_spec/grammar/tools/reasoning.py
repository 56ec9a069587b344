"""Reasoning in a reply: how a model family marks it, and where in a text it ends."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from guided_spec.grammar.tools.format import MarkedText, begun_length, in_sequence

ReasoningState = Literal["unopened", "open", "closed"]

FINAL_CHANNEL = "<|channel|>final<|message|>"
"""What begins gpt-oss's answer."""

BEGINNINGS = {
    "</think>": "<think>",  # Qwen, DeepSeek, GLM, MiniMax, Kimi, Hunyuan, Nemotron
    "[/THINK]": "[THINK]",  # Magistral
    "</seed:think>": "<seed:think>",  # Seed-OSS
    "<|END_THINKING|>": "<|START_THINKING|>",  # Command A Reasoning
    "</thought>": "<thought>",  # EXAONE Deep
    "\u25c1/think\u25b7": "\u25c1think\u25b7",  # Kimi-VL
}
"""What begins the reasoning that a marker ends; gpt-oss has channels."""

DEFAULT_MARKERS = (*BEGINNINGS, FINAL_CHANNEL)
"""How model families end their reasoning; the first one that the chat template holds counts."""

_EMPTY_LINES = {"type": "regex", "pattern": "\\n{0,2}"}


class SplitText(NamedTuple):
    """reasoning: None where the text has none. answer: what follows it."""

    reasoning: str | None
    answer: str


class Reasoning(NamedTuple):
    """How a model family writes its reasoning: between ``begin`` and ``end``.

    answer: the part of ``end`` with which a prompt ends that has no reasoning; "" for all of it.
    """

    begin: str
    end: str
    answer: str = ""

    @classmethod
    def of_template(cls, template: str) -> Reasoning | None:
        """By the first end that a chat template holds; None where it holds none."""
        for end, begin in BEGINNINGS.items():
            if end in template:
                return cls(begin, end)
        return None

    def state_after(self, prompt: str) -> ReasoningState:
        """Whether a rendered prompt has opened or closed the reasoning, or left it to the model."""
        prompt = prompt.rstrip()
        if prompt.endswith(self.begin):
            return "open"
        return "closed" if prompt.endswith(self.answer or self.end) else "unopened"

    def before(self, content: dict[str, Any]) -> dict[str, Any]:
        """Structural tags for ``content`` after optional reasoning."""
        block = {"type": "tag", "begin": self.begin, "content": {"type": "any_text"}}
        reasoning = in_sequence({**block, "end": self.end}, _EMPTY_LINES)
        return in_sequence({"type": "optional", "content": reasoning}, content)

    @staticmethod
    def after(content: dict[str, Any]) -> dict[str, Any]:
        """Structural tags for what follows the end: empty lines, and the content."""
        return in_sequence(_EMPTY_LINES, content)

    def split(self, text: str, state: ReasoningState, marks: MarkedText) -> SplitText:
        """Split a text read by ``marks``, whose prompt left the reasoning in ``state``.

        Reasoning that was cut off before its end is all of the text.
        """
        begin, end = marks.mark(self.begin), marks.mark(self.end)
        inner = text.lstrip().removeprefix(begin)
        has_begun = text.lstrip().startswith(begin)
        if state == "closed" or (state == "unopened" and not has_begun):
            return SplitText(None, text)
        reasoning, _, answer = inner.partition(end)
        return SplitText(reasoning.strip(), answer.lstrip("\n"))

    def split_begun(self, text: str, state: ReasoningState, marks: MarkedText) -> SplitText:
        """``split`` of a text that goes on: what is certain of both parts."""
        begin, end = marks.mark(self.begin), marks.mark(self.end)
        inner = text.lstrip()
        if state == "closed" or (state == "unopened" and not begin.startswith(inner[: len(begin)])):
            return SplitText(None, text)
        if len(inner) < len(begin) and begin.startswith(inner):
            return SplitText(None, "")
        inner = inner.removeprefix(begin)
        reasoning, is_over, answer = inner.partition(end)
        if not is_over:
            reasoning = inner[: len(inner) - begun_length(inner, end)]
        return SplitText(reasoning.strip(), answer.lstrip("\n"))
