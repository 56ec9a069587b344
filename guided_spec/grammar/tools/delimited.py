"""Calls in free text, each between its own marks, as most model families write them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from guided_spec.grammar.tools.arguments import (
    ArgumentForm,
    arguments_content,
    read_arguments,
)
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
    argument: how one argument is written, see ``ArgumentForm``; None for JSON.
    id_pattern: what the model writes for ``{id}``, a regex; it may hold ``{name}``.
    """

    name: str
    hints: tuple[str, ...]
    trigger: str
    call: str
    opening: str = ""
    separator: str = ""
    closing: str = ""
    argument: ArgumentForm | None = None
    id_pattern: str = "[a-zA-Z0-9]{9}"
    holds_reasoning: ClassVar[bool] = False
    frames_text: ClassVar[bool] = False
    reasoning: ClassVar[Reasoning | None] = None

    @property
    def literals(self) -> tuple[str, ...]:
        """What the format writes besides names and arguments."""
        argument = "" if self.argument is None else self.argument.text
        parts = (self.call, self.opening, self.closing, argument)
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
        is_one = bool(self.opening) or not rules.is_parallel
        if rules.choice == "required":
            return _alone(calls, is_one=is_one)
        if rules.form is not None:
            return either([_alone(calls, is_one=is_one), rules.form])
        return {
            "type": "triggered_tags",
            "triggers": [self.trigger],
            "tags": calls,
            "at_least_one": False,
            "stop_after_first": is_one,
        }

    def read(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> ReadText:
        """Take apart what the grammar has written and ``marks`` has read.

        A call that was cut off stays in the text.
        """
        trigger, calls, free, at = marks.mark(self.trigger), list[ToolCall](), "", 0
        while (found := text.find(trigger, at)) >= 0:
            block = self._read_block(text, found, tools, marks)
            free += text[at:found]
            if not block.calls:  # cut off, or written without the grammar
                at = found + len(trigger)
                free += trigger
                continue
            calls += [read.call for read in block.calls]
            at = block.calls[-1].end
        free = marks.show(free + text[at:])
        return ReadText(free.strip() if calls else free, tuple(calls))

    def read_begun(self, text: str, tools: Sequence[Tool], marks: MarkedText) -> BegunText:
        """``read`` of an unfinished text, with whitespace around it left out."""
        trigger, calls, free, at = marks.mark(self.trigger), list[BegunCall](), "", 0
        while (found := text.find(trigger, at)) >= 0:
            free += text[at:found]
            block = self._read_block(text, found, tools, marks)
            whole = [(c.call.id, c.call.name, c.arguments) for c in block.calls]
            calls += [BegunCall(*one, is_complete=True) for one in whole]
            if not block.is_whole:
                begun = self._begun_call(text, block.behind, tools, marks)
                return BegunText(free.strip(), (*calls, *begun), None, bool(begun))
            at = block.calls[-1].end
        free += text[at : len(text) - begun_length(text[at:], trigger)]
        return BegunText(free.strip(), tuple(calls))

    def _begun_call(
        self, text: str, at: int | None, tools: Sequence[Tool], marks: MarkedText
    ) -> list[BegunCall]:
        """A call whose arguments have begun; none where they are not JSON: they come as a whole."""
        if at is None or self.argument is not None:
            return []
        for tool in tools_named(tools, text, at):
            header = self._header(tool, text, at, marks)
            if header is None:
                continue
            begun = begun_call(header.id, tool.name, text, header.end)
            if begun is not None:
                return [begun]
        return []

    def _call(self, tool: Tool) -> dict[str, Any]:
        begin, end = self._around_arguments(tool)
        if self.argument is None:
            content = schema_content(tool, tool.parameters)
        else:
            content = arguments_content(tool, self.argument)
        if "{id}" in begin:
            begin, behind = begin.split("{id}")
            written = {"type": "regex", "pattern": self._id_of(tool)}
            content = in_sequence(written, literal(behind), content)
        return {"type": "tag", "begin": begin, "content": content, "end": end}

    def _id_of(self, tool: Tool) -> str:
        return self.id_pattern.replace("{name}", re.escape(tool.name))

    def _block(self, calls: list[dict[str, Any]], rules: ToolRules) -> dict[str, Any]:
        content = either(calls)
        if rules.is_parallel and rules.choice != "named":
            more = in_sequence(literal(self.separator), content) if self.separator else content
            content = in_sequence(content, {"type": "star", "content": more})
        return {"type": "tag", "begin": self.opening, "content": content, "end": self.closing}

    def _read_block(self, text: str, at: int, tools: Sequence[Tool], marks: MarkedText) -> _Block:
        """The calls of one block; without an opening there is one."""
        opening, separator, closing = map(marks.mark, (self.opening, self.separator, self.closing))
        calls: list[_CallRead] = []
        if not text.startswith(opening, at):
            return _Block(calls)
        at += len(opening)
        while (read := self._read_call(text, at, tools, marks)) is not None:
            at = read.end
            is_whole = not opening or text.startswith(closing, at)
            calls.append(read._replace(end=at + len(closing) * is_whole))
            if is_whole or not text.startswith(separator, at):
                return _Block(calls, is_whole=is_whole)
            at += len(separator)
        return _Block(calls, at)

    def _read_call(
        self, text: str, at: int, tools: Sequence[Tool], marks: MarkedText
    ) -> _CallRead | None:
        for tool in tools_named(tools, text, at):
            header = self._header(tool, text, at, marks)
            if header is None:
                continue
            if self.argument is None:
                read = read_json(text, header.end)
            else:
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
        """The text before the arguments of a call of one tool; None where it does not match."""
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


def _alone(calls: list[dict[str, Any]], *, is_one: bool) -> dict[str, Any]:
    """Calls with nothing but line breaks between them."""
    if is_one:
        return either(calls)
    between = {"type": "regex", "pattern": "\\n{0,2}"}
    more = {"type": "star", "content": in_sequence(between, either(calls))}
    return in_sequence(either(calls), more)


class _Header(NamedTuple):
    """The id in it, "" where the model writes none, and where it ends."""

    id: str
    end: int


class _Around(NamedTuple):
    """The text before the arguments of a call, with ``{id}``, and the text after them."""

    begin: str
    end: str


class _Block(NamedTuple):
    """Its whole calls, where the next one may have begun, and whether it is closed."""

    calls: list[_CallRead]
    behind: int | None = None
    is_whole: bool = False
