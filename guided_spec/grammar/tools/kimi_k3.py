"""Kimi K3's messages: reasoning, a response, then calls, each between tags of special tokens.

A tag is ``<|open|>name key="value"<|sep|>``, and ends with ``<|close|>name<|sep|>``. The prompt
opens the first part, so a text begins inside of it. The source is the template in the checkpoint of
moonshotai/Kimi-K3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from guided_spec.grammar.tools.arguments import ArgumentForm
from guided_spec.grammar.tools.delimited import DelimitedFormat
from guided_spec.grammar.tools.format import (
    BegunText,
    MarkedText,
    ReadText,
    Tool,
    ToolRules,
    begun_length,
    either,
    in_sequence,
    literal,
)
from guided_spec.grammar.tools.reasoning import Reasoning


def _opening(name: str) -> str:
    return f"<|open|>{name}<|sep|>"


def _closing(name: str) -> str:
    return f"<|close|>{name}<|sep|>"


_RESPONSE_END, _MESSAGE_END = _closing("response"), _closing("message")
CALLS = DelimitedFormat(
    name="kimi_k3",
    hints=("<|open|>", "<|close|>", "<|end_of_msg|>"),
    trigger=_opening("tools"),
    opening=_opening("tools"),
    call=_opening('call tool="{name}" index="{id}"') + "{arguments}" + _closing("call"),
    closing=_closing("tools"),
    argument=ArgumentForm(
        _opening('argument key="{key}" type="{type}"') + "{value}" + _closing("argument"),
        escapes=(("&", "&amp;"), ('"', "&quot;")),
    ),
    id_pattern="[0-9]{1,4}",
)
"""The calls alone, without the response before them and the end of the message."""


@dataclass(frozen=True)
class KimiK3Format:
    """After the reasoning: the response, which is empty beside a call that is required or stands
    in place of a form, the calls in one block, and the end of the message."""

    name: ClassVar[str] = CALLS.name
    hints: ClassVar[tuple[str, ...]] = CALLS.hints
    literals: ClassVar[tuple[str, ...]] = (*CALLS.literals, _RESPONSE_END, _MESSAGE_END)
    holds_reasoning: ClassVar[bool] = False
    frames_text: ClassVar[bool] = True
    reasoning: ClassVar[Reasoning | None] = Reasoning(
        _opening("think"), _closing("think") + _opening("response"), _opening("response")
    )

    def content(self, rules: ToolRules) -> dict[str, Any]:
        """The format of a structural tag. Raises ConfigError naming the tool."""
        response = _response(rules.form or {"type": "any_text"})
        end = literal(_MESSAGE_END)
        if rules.choice == "none":
            return in_sequence(response, end)
        is_auto = rules.choice == "auto"
        only_calls = rules._replace(choice="required" if is_auto else rules.choice, form=None)
        calls = CALLS.content(only_calls)
        if is_auto and rules.form is None:
            return in_sequence(response, {"type": "optional", "content": calls}, end)
        called = in_sequence(literal(_RESPONSE_END), calls)
        return in_sequence(either([called, response]) if is_auto else called, end)

    def read(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> ReadText:
        """Take apart what the grammar has written and ``marks`` has read.

        Calls that were cut off stay in the text.
        """
        response, _, rest = text.partition(marks.mark(_RESPONSE_END))
        read = CALLS.read(_before(rest, marks.mark(_MESSAGE_END)), tools, marks)
        return ReadText(marks.show(response) + read.text, read.calls)

    def read_begun(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> BegunText:
        """``read`` of an unfinished text, with whitespace around it left out."""
        end = marks.mark(_RESPONSE_END)
        response, is_over, rest = text.partition(end)
        if not is_over:
            return BegunText(text[: len(text) - begun_length(text, end)].strip())
        begun = CALLS.read_begun(_before(rest, marks.mark(_MESSAGE_END)), tools, marks)
        return begun._replace(text=response.strip())


def _response(content: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tag", "begin": "", "content": content, "end": _RESPONSE_END}


def _before(text: str, end: str) -> str:
    """A text without the end that it has, or has begun."""
    length = len(end) if text.endswith(end) else begun_length(text, end)
    return text[: len(text) - length]
