"""gpt-oss's messages in channels (the "harmony" format): reasoning, text and at most one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from guided_spec.grammar.marked_text import MarkedText
from guided_spec.grammar.tool import Tool, ToolCall
from guided_spec.grammar.tool_arguments import read_json
from guided_spec.grammar.tool_format import ReadText, ToolRules

__all__ = ["HarmonyFormat"]

_ANALYSIS = "<|channel|>analysis<|message|>"
_COMMENTARY = "<|channel|>commentary<|message|>"
_FINAL = "<|channel|>final<|message|>"
_END, _NEXT, _CALL = "<|end|>", "<|start|>assistant", "<|call|>"
_HEADERS = (
    "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.{name}<|constrain|>json<|message|>",
    " to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>",
    " to=functions.{name}<|channel|>commentary json<|message|>",
)
"""How the header of a call is written, by the model and by its chat template."""


@dataclass(frozen=True)
class HarmonyFormat:
    """Behind ``<|start|>assistant``: analysis and commentary, then a call or the answer.

    A call ends the model's turn, so there is one at most.
    """

    name: ClassVar[str] = "harmony"
    hints: ClassVar[tuple[str, ...]] = ("<|channel|>", "<|constrain|>")
    literals: ClassVar[tuple[str, ...]] = (_ANALYSIS, _END, _NEXT, _CALL, *_HEADERS)
    holds_reasoning: ClassVar[bool] = True

    def content(self, rules: ToolRules) -> dict[str, Any]:
        """The format of a structural tag. Raises ConfigError naming the tool."""
        last = [_call(tool, rules) for tool in rules.tools if rules.choice != "none"]
        if rules.choice in ("auto", "none"):
            last.append(_sequence(_const(_FINAL), {"type": "any_text"}))
        first = [
            {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": _END}
            for begin in (_ANALYSIS, _COMMENTARY)
        ]
        message = _sequence(_or(first), _const(_NEXT))
        return _sequence({"type": "star", "content": message}, _or(last))

    def read(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> ReadText:
        """Take apart what the grammar has written and ``marks`` has read."""
        reasoning, shown, at = list[str](), list[str](), 0
        sinks = ((_ANALYSIS, reasoning), (_COMMENTARY, shown), (_FINAL, shown))
        next_message = marks.mark(_NEXT)
        while at < len(text):
            for begin, sink in sinks:
                if text.startswith(marks.mark(begin), at):
                    at += len(marks.mark(begin))
                    end = -1 if begin == _FINAL else text.find(marks.mark(_END), at)
                    sink.append(marks.show(text[at:] if end < 0 else text[at:end]).strip())
                    at = len(text) if end < 0 else end + len(marks.mark(_END))
                    break
            else:
                return self._read_last(text[at:], tools, marks, reasoning, shown)
            if text.startswith(next_message, at):
                at += len(next_message)
        return ReadText("\n".join(shown), (), "\n".join(reasoning) or None)

    @staticmethod
    def _read_last(
        text: str, tools: Sequence[Tool], marks: MarkedText, reasoning: list[str], shown: list[str]
    ) -> ReadText:
        """What is neither reasoning nor an answer: a call, or what was cut off."""
        call = _read_call(text, tools, marks)
        if call is None and text:
            shown = [*shown, marks.show(text)]
        calls = () if call is None else (call,)
        return ReadText("\n".join(shown), calls, "\n".join(reasoning) or None)


def _call(tool: Tool, rules: ToolRules) -> dict[str, Any]:
    headers = [_const(header.replace("{name}", tool.name)) for header in _HEADERS]
    arguments = {"type": "json_schema", "json_schema": tool.parameters}
    # As a rule <|call|> ends the text by itself, and then no tag can hold it.
    end = [] if _CALL in rules.stop_names else [_const(_CALL)]
    return _sequence(_or(headers), arguments, *end)


def _read_call(text: str, tools: Sequence[Tool], marks: MarkedText) -> ToolCall | None:
    for tool in tools:
        for header in _HEADERS:
            begin = marks.mark(header.replace("{name}", tool.name))
            read = read_json(text, len(begin)) if text.startswith(begin) else None
            if read is not None:
                return ToolCall("", tool.name, read.values, marks.show(text))
    return None


def _const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _or(options: list[dict[str, Any]]) -> dict[str, Any]:
    return options[0] if len(options) == 1 else {"type": "or", "elements": options}
