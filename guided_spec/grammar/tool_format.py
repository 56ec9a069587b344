"""How model families write tool calls: the grammar of their texts, and the calls read from them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from guided_spec.grammar.marked_text import MarkedText
from guided_spec.grammar.tool import Tool, ToolCall, ToolChoice
from guided_spec.grammar.tool_arguments import arguments_content, read_arguments

__all__ = ["DelimitedFormat", "ReadText", "ToolFormat", "ToolRules"]


class ReadText(NamedTuple):
    """A finished text, taken apart. reasoning: only of formats that hold it themselves."""

    text: str
    calls: tuple[ToolCall, ...]
    reasoning: str | None = None


class ToolRules(NamedTuple):
    """What a text may hold.

    tools: those that may be called; with the choice "named" there is one.
    is_parallel: whether several calls may follow each other.
    stop_names: added tokens that end the text, by name.
    """

    tools: Sequence[Tool]
    choice: ToolChoice = "auto"
    is_parallel: bool = True
    stop_names: frozenset[str] = frozenset()


class ToolFormat(Protocol):
    """One family's way to write calls: a grammar and the reader of its texts.

    A template that holds all ``hints`` is of the family. A format that ``holds_reasoning`` reads
    texts without tools as well.
    """

    @property
    def name(self) -> str:
        """What ``tool_format`` calls it."""

    @property
    def hints(self) -> tuple[str, ...]:
        """What the family's chat templates hold."""

    @property
    def literals(self) -> tuple[str, ...]:
        """What the format writes besides names and arguments."""

    @property
    def holds_reasoning(self) -> bool:
        """Whether the reasoning is part of the format."""

    def content(self, rules: ToolRules) -> dict[str, Any]:
        """The format of a structural tag. Raises ConfigError naming the tool."""

    def read(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> ReadText:
        """Take apart what the grammar has written and ``marks`` has read.

        A call that was cut off stays in the text.
        """


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

    def _call(self, tool: Tool) -> dict[str, Any]:
        begin, end = self.call.replace("{name}", tool.name).split("{arguments}")
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
            call, at = read
            is_last = not opening or text.startswith(closing, at)
            yield call, at + len(closing) * is_last
            if is_last or not text.startswith(separator, at):
                return
            at += len(separator)

    def _read_call(
        self, text: str, at: int, tools: Sequence[Tool], marks: MarkedText
    ) -> tuple[ToolCall, int] | None:
        for tool in tools:
            begin, end = self.call.replace("{name}", tool.name).split("{arguments}")
            before, _, behind = map(marks.mark, begin.partition("{id}"))
            place = at + len(before)
            if not text.startswith(before, at):
                continue
            call_id = ""
            if behind:
                found = re.compile(self._id_of(tool)).match(text, place)
                if found is None or not text.startswith(behind, found.end()):
                    continue
                call_id, place = found[0], found.end() + len(behind)
            read = read_arguments(tool, self.argument, text, place, marks)
            if read is None or not text.startswith(marks.mark(end), read.end):
                continue
            stop = read.end + len(marks.mark(end))
            return ToolCall(call_id, tool.name, read.values, marks.show(text[at:stop])), stop
        return None
