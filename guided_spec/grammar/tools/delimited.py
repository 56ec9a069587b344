"""Calls in free text, each between its own marks, as most model families write them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from guided_spec.grammar.markers.marker import MarkedText, begun_length
from guided_spec.grammar.tools.format import (
    BegunCall,
    BegunText,
    ReadText,
    Tool,
    ToolCall,
    ToolRules,
    arguments_content,
    begun_object,
    read_arguments,
)

__all__ = ["DelimitedFormat"]


class _CallRead(NamedTuple):
    """A whole call, its arguments as JSON text, and where it ends."""

    call: ToolCall
    arguments: str
    end: int


@dataclass(frozen=True)
class DelimitedFormat:
    """Calls in free text, each between its own marks.

    call: a call, with ``{name}``, ``{arguments}`` and perhaps ``{id}``.
    trigger: the beginning of a call, or of ``opening``, which free text never holds.
    opening, separator, closing: around and between the calls where they stand in one block, at the
        end of the text; "" for calls anywhere in it.
    argument: how one argument is written, see ``arguments_content``; None for JSON.
    id_pattern: what the model writes for ``{id}``, a regex; it may hold ``{name}``.
    """

    name: str
    hints: tuple[str, ...]
    trigger: str
    call: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    argument: str | None = None
    id_pattern: str = "[a-zA-Z0-9]{9}"
    holds_reasoning: bool = False

    @property
    def literals(self) -> tuple[str, ...]:
        """What the format writes besides names and arguments."""
        parts = (self.call, self.opening, self.closing, self.argument or "")
        return tuple(piece for part in parts for piece in re.split(r"\{\w+\}", part))

    def content(self, rules: ToolRules) -> dict[str, Any]:
        """The format of a structural tag. Raises ConfigError naming the tool."""
        if rules.choice == "none":
            return {"type": "any_text", "excludes": [self.trigger]}
        calls = [self._call(tool) for tool in rules.tools]
        if self.opening:
            calls = [self._block(calls, rules)]
        if rules.choice == "named":
            return calls[0]
        return {
            "type": "triggered_tags",
            "triggers": [self.trigger],
            "tags": calls,
            "at_least_one": rules.choice == "required",
            "stop_after_first": bool(self.opening) or not rules.is_parallel,
        }

    def read(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> ReadText:
        """Take apart what the grammar has written and ``marks`` has read."""
        trigger, calls, free, at = marks.mark(self.trigger), list[ToolCall](), "", 0
        while (found := text.find(trigger, at)) >= 0:
            block = list(self._read_block(text, found, tools, marks))
            free += text[at:found]
            if not block:  # cut off, or written without the grammar
                at = found + len(trigger)
                free += trigger
                continue
            calls += [call for call, _ in block]
            at = block[-1][1]
        free = marks.show(free + text[at:])
        return ReadText(free.strip() if calls else free, tuple(calls))

    def read_begun(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> BegunText:
        """``read`` of a text that goes on, with whitespace around it left out."""
        trigger, calls, free, at = marks.mark(self.trigger), list[BegunCall](), "", 0
        while (found := text.find(trigger, at)) >= 0:
            free += text[at:found]
            block = self._begun_block(text, found, tools, marks)
            calls += block.calls
            if block.end is None:
                return BegunText(free.strip(), tuple(calls), None, block.is_cut)
            at = block.end
        free += text[at : len(text) - begun_length(text[at:], trigger)]
        return BegunText(free.strip(), tuple(calls))

    def _begun_block(
        self, text: str, at: int, tools: Sequence[Tool], marks: MarkedText
    ) -> _BegunBlock:
        opening, separator, closing = map(marks.mark, (self.opening, self.separator, self.closing))
        calls: list[BegunCall] = []
        if not text.startswith(opening, at):
            return _BegunBlock(calls)
        at += len(opening)
        while (read := self._read_call(text, at, tools, marks)) is not None:
            calls.append(BegunCall(read.call.id, read.call.name, read.arguments))
            at = read.end
            if not opening or text.startswith(closing, at):
                return _BegunBlock(calls, at + len(closing))
            if not text.startswith(separator, at):
                return _BegunBlock(calls)
            at += len(separator)
        begun = self._begun_call(text, at, tools, marks)
        return _BegunBlock(calls if begun is None else [*calls, begun], None, begun is not None)

    def _begun_call(
        self, text: str, at: int, tools: Sequence[Tool], marks: MarkedText
    ) -> BegunCall | None:
        """A call whose arguments have begun. None where they are not JSON: they come as a whole."""
        for tool in tools if self.argument is None else ():
            header = self._header(tool, text, at, marks)
            arguments = None if header is None else begun_object(text, header.end)
            if header is not None and arguments is not None:
                return BegunCall(header.id, tool.name, arguments)
        return None

    def _call(self, tool: Tool) -> dict[str, Any]:
        begin, end = self._around_arguments(tool)
        content = arguments_content(tool, self.argument)
        if "{id}" in begin:
            begin, behind = begin.split("{id}")
            parts = [
                {"type": "regex", "pattern": self._id_of(tool)},
                {"type": "const_string", "value": behind},
            ]
            content = {"type": "sequence", "elements": [*parts, content]}
        return {"type": "tag", "begin": begin, "content": content, "end": end}

    def _id_of(self, tool: Tool) -> str:
        return self.id_pattern.replace("{name}", re.escape(tool.name))

    def _block(self, calls: list[dict[str, Any]], rules: ToolRules) -> dict[str, Any]:
        content = {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": self.separator,
            "at_least_one": True,
            "stop_after_first": not rules.is_parallel or rules.choice == "named",
        }
        return {"type": "tag", "begin": self.opening, "content": content, "end": self.closing}

    def _read_block(
        self, text: str, at: int, tools: Sequence[Tool], marks: MarkedText
    ) -> Iterator[tuple[ToolCall, int]]:
        """The calls of one block and where each ends; without an opening there is one."""
        opening, separator, closing = map(marks.mark, (self.opening, self.separator, self.closing))
        if not text.startswith(opening, at):
            return
        at += len(opening)
        while (read := self._read_call(text, at, tools, marks)) is not None:
            at = read.end
            is_last = not opening or text.startswith(closing, at)
            yield read.call, at + len(closing) * is_last
            if is_last or not text.startswith(separator, at):
                return
            at += len(separator)

    def _read_call(
        self, text: str, at: int, tools: Sequence[Tool], marks: MarkedText
    ) -> _CallRead | None:
        for tool in tools:
            header = self._header(tool, text, at, marks)
            if header is None:
                continue
            read = read_arguments(tool, self.argument, text, header.end, marks)
            end = marks.mark(self._around_arguments(tool).end)
            if read is None or not text.startswith(end, read.end):
                continue  # another tool's name may begin like this one's
            stop = read.end + len(end)
            call = ToolCall(header.id, tool.name, read.values, marks.show(text[at:stop]))
            written = text[header.end : read.end]
            if self.argument is not None:
                written = json.dumps(read.values, ensure_ascii=False)
            return _CallRead(call, written, stop)
        return None

    def _header(self, tool: Tool, text: str, at: int, marks: MarkedText) -> _Header | None:
        """What stands before the arguments of a call of one tool; None where it is not there."""
        before, _, behind = map(marks.mark, self._around_arguments(tool).begin.partition("{id}"))
        if not text.startswith(before, at):
            return None
        at += len(before)
        if not behind:
            return _Header("", at)
        found = re.compile(self._id_of(tool)).match(text, at)
        if found is None or not text.startswith(behind, found.end()):
            return None
        return _Header(found[0], found.end() + len(behind))

    def _around_arguments(self, tool: Tool) -> _Around:
        return _Around(*self.call.replace("{name}", tool.name).split("{arguments}"))


class _Header(NamedTuple):
    """The id in it, "" where the model writes none, and where it ends."""

    id: str
    end: int


class _Around(NamedTuple):
    """What stands before the arguments of a call, with ``{id}``, and behind them."""

    begin: str
    end: str


class _BegunBlock(NamedTuple):
    """Its calls, where it ends (None: not yet), and whether the last call is not whole."""

    calls: list[BegunCall]
    end: int | None = None
    is_cut: bool = False
