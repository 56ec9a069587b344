"""The tool formats by name: calls between marks, gpt-oss's channels, and a chat template's own."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
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
from guided_spec.kinds import require_one_of


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
    holds_reasoning: bool = False

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


_DEEPSEEK_OPENING, _DEEPSEEK_CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_JSON = "{name}\n```json\n{arguments}\n```"
_DSML_CALL = '<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n'
_DSML_ARGUMENT = '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n'
_MISTRAL_CALL = '{"name": "{name}", "arguments": {arguments}}'

ToolFormat = DelimitedFormat | HarmonyFormat
"""One family's way to write calls: a grammar and the reader of its texts.

name: what ``tool_format`` calls it. hints: a template that holds all of them is of the family.
literals: what it writes besides names and arguments. holds_reasoning: the reasoning is part of it,
so that it reads texts without tools as well.
"""

_FORMATS: tuple[ToolFormat, ...] = (
    HarmonyFormat(),
    DelimitedFormat(
        name="deepseek_v4_1",
        hints=("｜DSML｜", " calls>"),
        trigger="<｜DSML｜ calls>",
        opening="<｜DSML｜ calls>\n",
        call=_DSML_CALL.replace("｜DSML｜", "｜DSML｜ "),
        closing="</｜DSML｜ calls>",
        argument=ArgumentForm(_DSML_ARGUMENT.replace("｜DSML｜", "｜DSML｜ "), none="\n"),
    ),
    DelimitedFormat(
        name="deepseek_v4",
        hints=("｜DSML｜", "tool_calls>"),
        trigger="<｜DSML｜tool_calls>",
        opening="<｜DSML｜tool_calls>\n",
        call=_DSML_CALL,
        closing="</｜DSML｜tool_calls>",
        argument=ArgumentForm(_DSML_ARGUMENT),
    ),
    DelimitedFormat(
        name="deepseek_v3_2",
        hints=("｜DSML｜", "function_calls>"),
        trigger="<｜DSML｜function_calls>",
        opening="<｜DSML｜function_calls>\n",
        call=_DSML_CALL,
        closing="</｜DSML｜function_calls>",
        argument=ArgumentForm(_DSML_ARGUMENT, none="\n"),
    ),
    DelimitedFormat(
        name="deepseek_v3",  # and R1
        hints=(_DEEPSEEK_OPENING, "```json"),
        trigger=_DEEPSEEK_OPENING,
        opening=_DEEPSEEK_OPENING,
        call=f"{_DEEPSEEK_CALL}function<｜tool▁sep｜>{_DEEPSEEK_JSON}{_DEEPSEEK_END}",
        separator="\n",
        closing=_DEEPSEEK_CLOSING,
    ),
    DelimitedFormat(
        name="deepseek_v3_1",
        hints=(_DEEPSEEK_OPENING,),
        trigger=_DEEPSEEK_OPENING,
        opening=_DEEPSEEK_OPENING,
        call=f"{_DEEPSEEK_CALL}{{name}}<｜tool▁sep｜>{{arguments}}{_DEEPSEEK_END}",
        closing=_DEEPSEEK_CLOSING,
    ),
    DelimitedFormat(
        name="mistral_v11",  # Small 3.1 and 3.2
        hints=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        trigger="[TOOL_CALLS]",
        call="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}",
    ),
    DelimitedFormat(
        name="mistral_v13",  # Magistral, Ministral 3
        hints=("[TOOL_CALLS]", "[ARGS]"),
        trigger="[TOOL_CALLS]",
        call="[TOOL_CALLS]{name}[ARGS]{arguments}",
    ),
    DelimitedFormat(
        name="mistral_tekken",  # Nemo
        hints=("[TOOL_CALLS][",),
        trigger="[TOOL_CALLS]",
        opening="[TOOL_CALLS][",
        call=_MISTRAL_CALL,
        separator=", ",
        closing="]",
    ),
    DelimitedFormat(
        name="mistral",  # 7B v0.3, Mixtral 8x22B
        hints=("[TOOL_CALLS]",),
        trigger="[TOOL_CALLS]",
        opening="[TOOL_CALLS] [",
        call=_MISTRAL_CALL,
        separator=", ",
        closing="]",
    ),
    DelimitedFormat(
        name="kimi_k2",  # and K2.5
        hints=("<|tool_calls_section_begin|>",),
        trigger="<|tool_calls_section_begin|>",
        opening="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
        id_pattern="functions\\.{name}:[0-9]{1,4}",
    ),
    DelimitedFormat(
        name="minimax_m2",  # to M2.7
        hints=("<minimax:tool_call>",),
        trigger="<minimax:tool_call>",
        opening="<minimax:tool_call>\n",
        call='<invoke name="{name}">\n{arguments}</invoke>\n',
        closing="</minimax:tool_call>",
        argument=ArgumentForm('<parameter name="{key}">{value}</parameter>\n'),
    ),
    DelimitedFormat(
        name="command_a",  # and R7B
        hints=("<|START_ACTION|>",),
        trigger="<|START_ACTION|>",
        opening="<|START_ACTION|>[\n    ",
        call='{"tool_call_id": "{id}", "tool_name": "{name}", "parameters": {arguments}}',
        separator=",\n    ",
        closing="\n]<|END_ACTION|>",
        id_pattern="[0-9]{1,4}",
    ),
    DelimitedFormat(
        name="glm_4_7",
        hints=("</arg_key><arg_value>",),
        trigger="<tool_call>",
        call="<tool_call>{name}{arguments}</tool_call>",
        argument=ArgumentForm("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"),
    ),
    DelimitedFormat(
        name="glm_4_5",
        hints=("<arg_key>",),
        trigger="<tool_call>",
        call="<tool_call>{name}\n{arguments}</tool_call>",
        argument=ArgumentForm("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"),
    ),
    DelimitedFormat(
        name="mimo",  # V2
        hints=("<tool_call><function=",),
        trigger="<tool_call>",
        call="<tool_call><function={name}>{arguments}</function></tool_call>",
        argument=ArgumentForm("<parameter={key}>{value}</parameter>"),
    ),
    DelimitedFormat(
        name="qwen3_coder",  # and Qwen 3.5
        hints=("<tool_call>", "<function="),
        trigger="<tool_call>",
        call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        argument=ArgumentForm("<parameter={key}>\n{value}\n</parameter>\n"),
    ),
    DelimitedFormat(
        name="exaone4",
        hints=("<tool_call>", "[|assistant|]"),
        trigger="<tool_call>",
        call='<tool_call>{"name": "{name}", "arguments": {arguments}}</tool_call>',
    ),
    DelimitedFormat(
        name="hermes",  # Qwen 2.5 and 3, and many others
        hints=("<tool_call>",),
        trigger="<tool_call>",
        call='<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>',
    ),
    DelimitedFormat(
        name="llama3",  # Llama 3.1 to 3.3
        hints=("<|start_header_id|>", '"parameters": '),
        trigger='{"name": "',
        call='{"name": "{name}", "parameters": {arguments}}',
    ),
)

TOOL_FORMATS: dict[str, ToolFormat] = {known.name: known for known in _FORMATS}
"""By name; the first whose hints all stand in a chat template is its family's."""


def get_tool_format(name: str) -> ToolFormat:
    """The format of a name. Raises ConfigError."""
    require_one_of("tool_format", name, TOOL_FORMATS)
    return TOOL_FORMATS[name]


def find_tool_format(template: str) -> ToolFormat | None:
    """The format of a chat template's family; None where it is not known."""
    for known in _FORMATS:
        if all(hint in template for hint in known.hints):
            return known
    return None
