"""gpt-oss's channels: analysis and commentary, then a call or the final text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from guided_spec.grammar.tools.format import (
    BegunCall,
    BegunText,
    MarkedText,
    ReadText,
    Tool,
    ToolCall,
    ToolRules,
    begun_call,
    begun_length,
    either,
    in_sequence,
    literal,
    read_json,
    schema_content,
    tools_named,
)
from guided_spec.grammar.tools.reasoning import Reasoning

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
    """After ``<|start|>assistant``: analysis and commentary, then a call or the final text.

    A call ends the model's turn, so there is one at most.
    """

    name: ClassVar[str] = "harmony"
    hints: ClassVar[tuple[str, ...]] = ("<|channel|>", "<|constrain|>")
    literals: ClassVar[tuple[str, ...]] = (_ANALYSIS, _END, _NEXT, _CALL, *_HEADERS)
    holds_reasoning: ClassVar[bool] = True
    frames_text: ClassVar[bool] = True
    reasoning: ClassVar[Reasoning | None] = None

    def content(self, rules: ToolRules) -> dict[str, Any]:
        """The format of a structural tag. Raises ConfigError naming the tool."""
        last = [_call(tool, rules) for tool in rules.tools if rules.choice != "none"]
        if rules.choice in ("auto", "none"):
            last.append(in_sequence(literal(_FINAL), rules.form or {"type": "any_text"}))
        # Commentary is shown, and nothing may stand beside a call that is required, or a form.
        is_free = rules.choice in ("auto", "none") and rules.form is None
        begins = (_ANALYSIS, _COMMENTARY) if is_free else (_ANALYSIS,)
        first = [
            {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": _END}
            for begin in begins
        ]
        message = in_sequence(either(first), literal(_NEXT))
        return in_sequence({"type": "star", "content": message}, either(last))

    def read(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> ReadText:
        """Take apart what the grammar has written and ``marks`` has read."""
        found = _read_messages(text, marks)
        rest = text[found.end :]
        call = _read_call(rest, tools, marks)
        shown = [*found.shown, rest] if call is None and rest else found.shown
        reasoning = marks.show("\n".join(found.reasoning)) or None
        return ReadText(marks.show("\n".join(shown)), () if call is None else (call,), reasoning)

    def read_begun(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> BegunText:
        """``read`` of an unfinished text, with whitespace around it left out."""
        found = _read_messages(text[: len(text) - begun_length(text, marks.mark(_END))], marks)
        rest = "" if found.is_open else text[found.end :]
        begun = _begun_call(rest, tools, marks)
        is_cut = begun is not None and _read_call(rest, tools, marks) is None
        calls = () if begun is None else (begun,)
        return BegunText("\n".join(found.shown), calls, "\n".join(found.reasoning) or None, is_cut)


class _Messages(NamedTuple):
    """Messages of a text, where the last of them ends, and whether it may go on."""

    reasoning: list[str]
    shown: list[str]
    end: int
    is_open: bool


def _read_messages(text: str, marks: MarkedText) -> _Messages:
    found, at = _Messages([], [], 0, is_open=False), 0
    sinks = ((_ANALYSIS, found.reasoning), (_COMMENTARY, found.shown), (_FINAL, found.shown))
    end, next_message = marks.mark(_END), marks.mark(_NEXT)
    while True:
        for begin, sink in sinks:
            if text.startswith(marks.mark(begin), at):
                at += len(marks.mark(begin))
                stop = -1 if begin == _FINAL else text.find(end, at)
                sink.append((text[at:] if stop < 0 else text[at:stop]).strip())
                if stop < 0:
                    return found._replace(end=len(text), is_open=True)
                at = stop + len(end)
                break
        else:
            return found._replace(end=at)
        if text.startswith(next_message, at):
            at += len(next_message)


def _call(tool: Tool, rules: ToolRules) -> dict[str, Any]:
    headers = [literal(header.replace("{name}", tool.name)) for header in _HEADERS]
    arguments = schema_content(tool, tool.parameters)
    # As a rule <|call|> ends the text by itself, and then no tag can hold it.
    end = [] if _CALL in rules.stop_names else [literal(_CALL)]
    return in_sequence(either(headers), arguments, *end)


def _headers_of(text: str, tools: Sequence[Tool], marks: MarkedText) -> Iterator[tuple[Tool, int]]:
    """The tools by whose headers a text begins, and where these end."""
    for tool, header in itertools.product(tools_named(tools, text, 0), _HEADERS):
        begin = marks.mark(header.replace("{name}", tool.name))
        if text.startswith(begin):
            yield tool, len(begin)


def _read_call(text: str, tools: Sequence[Tool], marks: MarkedText) -> ToolCall | None:
    for tool, end in _headers_of(text, tools, marks):
        if (read := read_json(text, end)) is not None:
            return ToolCall("", tool.name, read.values, marks.show(text))
    return None


def _begun_call(text: str, tools: Sequence[Tool], marks: MarkedText) -> BegunCall | None:
    for tool, end in _headers_of(text, tools, marks):
        if (begun := begun_call("", tool.name, text, end)) is not None:
            return begun
    return None
