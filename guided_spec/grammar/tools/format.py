"""A model family's form of calls: the tools it may call, and how their arguments are spelled."""

from __future__ import annotations

import codecs
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.grammar.schema.misspelt import require_spelled
from guided_spec.grammar.tools.custom import (
    INPUT,
    PARAMETERS,
    as_function,
    custom_of,
    input_content,
    is_custom,
)
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.kinds import (
    did_you_mean,
    require_kind,
    require_known_fields,
    require_one_of,
)

ToolChoice = Literal["auto", "required", "none", "named"]

_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
# The last one is transformers', and for chat templates.
_OF_FUNCTION = ("name", "description", "parameters", "strict", "return")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(NamedTuple):
    """A tool, or a custom one, whose only argument is the text ``input``.

    parameters: the JSON schema of its arguments. input: the grammar of a custom tool's text, as a
    part of a structural tag; None where there is none. kind: as OpenAI's dicts have it.
    """

    name: str
    parameters: Mapping[str, Any]
    input: Mapping[str, Any] | None = None
    kind: Literal["function", "custom"] = "function"


class ToolCall(NamedTuple):
    """One call of a text.

    name: of the tool.
    id: as the model has written it, or nine letters and digits, as Mistral's templates demand; the
        same call at the same position after the same prompt gets the same id.
    arguments: valid under the tool's schema. raw: the call as it stands in the text.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    raw: str


def tool_dicts(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The tools as OpenAI writes them, for a chat template.

    A dict stays, but a custom tool becomes a function of one text, as templates know no others.
    A function becomes what transformers' ``get_json_schema`` reads in its types and
    its docstring, a pydantic model class a tool of its name, docstring and schema. Raises
    ConfigError naming the tool.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        fix = 'must be a list of {"type": "function", "function": {...}}, functions or models'
        raise ConfigError("tools", tools, fix)
    return [_tool_dict(f"tools[{index}]", tool) for index, tool in enumerate(tools)]


def read_tools(tools: Sequence[Any]) -> list[Tool]:
    """The tools' names and schemas. Raises ConfigError naming the tool."""
    shown = tool_dicts(tools)
    read = [_read_one(f"tools[{at}]", tool, shown[at]) for at, tool in enumerate(tools)]
    names = [tool.name for tool in read]
    for index, name in enumerate(names):
        if name in names[:index]:
            kind = "custom" if is_custom(tools[index]) else "function"
            raise ConfigError(f"tools[{index}].{kind}.name", name, "is taken; rename one tool")
    return read


def read_choice(tool_choice: object, tools: Sequence[Tool]) -> tuple[ToolChoice, Sequence[Tool]]:
    """The kind of choice, and the tools that are left by it.

    tool_choice: "auto", "required", "none", a tool's name, or
        ``{"type": "function", "function": {"name": ...}}``, with "custom" for "function" of a
        custom tool, or ``{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": ...}}``.

    Raises ConfigError.
    """
    match tool_choice:
        case "auto" | "none":
            return ("auto" if tool_choice == "auto" and tools else "none"), tools
        case "required":
            if not tools:
                raise ConfigError("tool_choice", tool_choice, "needs a tool; pass tools")
            return "required", tools
        case {"type": "allowed_tools"} if isinstance(tool_choice, Mapping):
            return _read_allowed(tool_choice, tools)
    if isinstance(tool_choice, str):
        return "named", [_tool_of_name(tool_choice, tools)]
    if isinstance(tool_choice, Mapping):
        require_one_of("tool_choice.type", tool_choice.get("type"), _CHOICES)
    chosen = _named("tool_choice", tool_choice, tools)
    if chosen is None:
        fix = (
            'must be "auto", "required", "none", a tool\'s name, '
            '{"type": "function", "function": {"name": ...}} or '
            '{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}'
        )
        raise ConfigError("tool_choice", tool_choice, fix)
    return "named", [chosen]


_WORDS = ("auto", "none", "required")
_CHOICES = ("function", "custom", "allowed_tools")


def _tool_of_name(choice: str, tools: Sequence[Tool]) -> Tool:
    """The tool that a choice is the name of."""
    for tool in tools:
        if tool.name == choice:
            return tool
    names = [tool.name for tool in tools]
    meant = did_you_mean(choice, [*_WORDS, *names])
    fix = f"is not one of the tools: {_some(names)}; nor is it {', '.join(_WORDS)}{meant}"
    raise ConfigError("tool_choice", choice, fix)


_SHOWN = 16


def _some(names: Sequence[str]) -> str:
    """The names, or the first of many."""
    more = len(names) - _SHOWN
    return ", ".join([*names[:_SHOWN], *([f"{more} more"] if more > 0 else [])]) or "none"


def _named(path: str, choice: object, tools: Sequence[Tool]) -> Tool | None:
    """The tool that OpenAI's dict names; None where it names none."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if not isinstance(choice, Mapping) or kind not in ("function", "custom"):
        return None
    if choice.get(kind) is None and "name" in choice:  # as OpenAI's other interface writes it
        choice = {"type": kind, kind: {**choice, "type": None}}
    require_known_fields(path, choice, ("type", kind))
    inner = choice.get(kind)
    if not isinstance(inner, Mapping):
        return None
    require_known_fields(f"{path}.{kind}", inner, ("name",))
    name = inner.get("name")
    return _chosen(path, kind, name, tools) if isinstance(name, str) else None


def _chosen(path: str, kind: str, name: str, tools: Sequence[Tool]) -> Tool:
    """The tool of a kind and name."""
    names = [tool.name for tool in tools]
    if name not in names:
        fix = f"is not one of the tools: {_some(names)}{did_you_mean(name, names)}"
        raise ConfigError(f"{path}.{kind}.name", name, fix)
    tool = tools[names.index(name)]
    if tool.kind != kind:
        fix = f'the tool {name!r} is a {tool.kind} one: write {{"type": "{tool.kind}", ...}}'
        raise ConfigError(f"{path}.type", kind, fix)
    return tool


def _read_allowed(
    choice: Mapping[str, Any], tools: Sequence[Tool]
) -> tuple[ToolChoice, Sequence[Tool]]:
    """OpenAI's ``allowed_tools``: all tools are shown to the model, and some may be called."""
    require_known_fields("tool_choice", choice, ("type", "allowed_tools"))
    path, allowed = "tool_choice.allowed_tools", choice.get("allowed_tools")
    if not isinstance(allowed, Mapping):
        raise ConfigError(path, allowed, 'must be {"mode": "auto" or "required", "tools": [...]}')
    require_known_fields(path, allowed, ("mode", "tools"))
    mode, listed = allowed.get("mode"), allowed.get("tools")
    require_one_of(f"{path}.mode", mode, ("auto", "required"))
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise ConfigError(f"{path}.tools", listed, "must be a list of at least one tool")
    names = set[str]()
    for index, one in enumerate(listed):
        place = f"{path}.tools[{index}]"
        chosen = _named(place, one, tools)
        if chosen is None:
            fix = 'must be {"type": "function", "function": {"name": ...}}, or "custom" twice'
            raise ConfigError(place, one, fix)
        names.add(chosen.name)
    left = [tool for tool in tools if tool.name in names]
    return "auto" if mode == "auto" else "required", left


def _tool_dict(place: str, tool: Any) -> dict[str, Any]:
    if is_custom(tool):
        return as_function(place, tool)
    if isinstance(tool, Mapping):
        hint = tool.get("cache_control")  # to a cache, and nothing to tell the model
        require_kind(f"{place}.cache_control", hint, dict | None)
        return {name: value for name, value in tool.items() if name != "cache_control"}
    to_schema = getattr(tool, "model_json_schema", None)  # pydantic, not imported
    if callable(to_schema):
        schema: dict[str, Any] = to_schema()
        described = {"name": tool.__name__, "description": inspect.getdoc(tool) or ""}
        return {"type": "function", "function": {**described, "parameters": schema}}
    if callable(tool):
        return _of_function(place, tool)
    fix = 'must be {"type": "function", "function": {...}}, a typed function or a pydantic model'
    raise ConfigError(place, tool, fix)


def _of_function(place: str, function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        described: dict[str, Any] = get_json_schema(function)
    except Exception as error:  # DocstringParsingException, TypeHintParsingException, others
        fix = f"give it type hints and a Google-style docstring: {error}"
        raise ConfigError(place, function, fix) from error
    return described


def _read_one(place: str, given: Any, tool: Mapping[str, Any]) -> Tool:
    if is_custom(given):
        custom = custom_of(place, given)
        name = _name(f"{place}.custom", custom)
        return Tool(name, PARAMETERS, input_content(place, custom), "custom")
    function = tool.get("function")
    if isinstance(function, Mapping):
        require_one_of(f"{place}.type", tool.get("type"), ("function", "custom"))
    if function is None or tool.get("type") != "function":
        fix = 'must be {"type": "function", "function": {"name": ..., "parameters": {...}}}'
        raise ConfigError(place, tool, fix)
    require_known_fields(place, tool, ("type", "function"))
    place = f"{place}.function"
    if not isinstance(function, Mapping):
        raise ConfigError(place, function, 'must be a dict with "name" and "parameters"')
    require_known_fields(place, function, _OF_FUNCTION)
    name = _name(place, function)
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_ARGUMENTS  # OpenAI: a tool without parameters takes none
    if not isinstance(parameters, Mapping):
        fix = f"of the tool {name!r}: must be a JSON schema, a dict"
        raise ConfigError(f"{place}.parameters", parameters, fix)
    parameters = _of_objects(f"{place}.parameters", name, parameters)
    strict = function.get("strict")
    require_kind(f"{place}.strict", strict, bool | None)
    require_kind(f"{place}.description", function.get("description"), str | None)
    require_spelled(f"{place}.parameters", parameters, strict=strict is True)
    return Tool(name, parameters)


_OF_OBJECTS = ("additionalProperties", "description", "properties", "required", "title")
_OTHERS = ("array", "boolean", "integer", "null", "number", "string")


def _of_objects(place: str, name: str, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments have names: a schema that takes other values too, takes objects here."""
    kind = parameters.get("type")
    listed = kind if isinstance(kind, list) else [kind]
    if "object" not in listed and any(one in _OTHERS for one in listed):
        fix = f"of the tool {name!r}: arguments are an object, and it is none"
        raise ConfigError(f"{place}.type", kind, fix)
    is_meant = "object" in listed or parameters.keys() <= {*_OF_OBJECTS}
    return {**parameters, "type": "object"} if is_meant else parameters


def _name(place: str, function: Mapping[str, Any]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{place}.name", name, "must be 1 to 64 letters, digits, _, . or -")
    return name


_HEADER = 256  # letters in which the name of a call stands


def tools_named(tools: Sequence[Tool], text: str, at: int) -> list[Tool]:
    """Those whose names stand soon after an index: a client may bring hundreds of them."""
    near = text[at : at + _HEADER]
    return [tool for tool in tools if tool.name in near]


def begun_length(text: str, literal: str) -> int:
    """How many characters at the end of a text may be the beginning of a literal."""
    for length in range(min(len(literal) - 1, len(text)), 0, -1):
        if text.endswith(literal[:length]):
            return length
    return 0


_FIRST = 0xD800  # surrogates: no decoded text holds one, and no JSON string but as an escape
_MOST = 2048


class MarkedText:
    """Reads tokens as text, each added token that some literals name as one character.

    literals: what a format writes. Where ``<tool_call>`` is a token, the grammar takes that token
        as the beginning of a call and the letters as text, and so does who reads the text.

    Immutable; shared by requests.
    """

    def __init__(self, vocabulary: Vocabulary, literals: Iterable[str]) -> None:
        self._vocabulary = vocabulary
        self._ids = {name: token for name, token in vocabulary.added_tokens if name}
        for token_id in vocabulary.stop_token_ids:  # they end the text and are no part of it
            self._ids = {name: token for name, token in self._ids.items() if token != token_id}
        names = sorted(self._ids, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        found = {name for text in literals for name in self._find(text)}
        self._marks = {name: chr(_FIRST + at) for at, name in enumerate(sorted(found)[:_MOST])}
        self._by_id = {self._ids[name]: mark for name, mark in self._marks.items()}
        self._shown = {mark: name for name, mark in self._marks.items()}
        texts = {mark: vocabulary.text_bytes[token] for token, mark in self._by_id.items()}
        self._widths = {mark: len(text.decode()) for mark, text in texts.items()}  # as text

    def mark(self, literal: str) -> str:
        """A literal as it occurs in a text that is read: with a character for each token."""
        if self._names is None:
            return literal
        return self._names.sub(lambda found: self._marks.get(found[0], found[0]), literal)

    def read(self, token_ids: Sequence[int], ends: Collection[int] = ()) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD. ends: see ``reader``."""
        return self.reader(ends).feed(token_ids, is_last=True)

    def reader(self, ends: Collection[int] = ()) -> MarkedReader:
        """Reads one text as its tokens come. ends: tokens that end it, as ``stop_token_ids``."""
        return MarkedReader(self._vocabulary.text_bytes, self._by_id, frozenset(ends))

    def show(self, text: str) -> str:
        """A text that was read, with the tokens' names."""
        return "".join(self._shown.get(character, character) for character in text)

    def cut(self, text: str, visible: int) -> str:
        """As much of a text that was read as is ``visible`` characters of ``Vocabulary.decode``."""
        # From the end, of which little is hidden: a stream asks for every piece of a long text.
        surplus = len(text) - visible
        surplus += sum(text.count(mark) * (width - 1) for mark, width in self._widths.items())
        end = len(text)
        while surplus > 0 and end > 0:
            end -= 1
            surplus -= self._widths.get(text[end], 1)
        return text[:end]

    def _find(self, literal: str) -> list[str]:
        return [] if self._names is None else self._names.findall(literal)


class MarkedReader:
    """``MarkedText.read`` of tokens that come one after another.

    A character is held back until all its bytes are in. text_bytes: of each token. marks: the
    characters of the tokens that are marks. ends: tokens that show nothing, unless they are marks.
    """

    def __init__(
        self, text_bytes: Sequence[bytes], marks: Mapping[int, str], ends: frozenset[int]
    ) -> None:
        self._text_bytes = text_bytes
        self._marks = marks
        self._ends = ends
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int], *, is_last: bool = False) -> str:
        """Append tokens, and return the text that they complete; the last ones show all of it."""
        pieces: list[str] = []
        for token_id in token_ids:
            mark = self._marks.get(token_id)
            if mark is None:
                shown = b"" if token_id in self._ends else self._text_bytes[token_id]
                pieces.append(self._decoder.decode(shown))
            else:
                pieces += [self._decoder.decode(b"", final=True), mark]
        return "".join([*pieces, self._decoder.decode(b"", final=is_last)])


OWNER = "guided_spec.owner"
"""A field that our tags add to a schema: whose it is, as the words and names of an error."""


class Arguments(NamedTuple):
    """Arguments that were read. end: where in the text they end."""

    values: dict[str, Any]
    end: int


def literal(text: str) -> dict[str, Any]:
    """A part of a structural tag: this text."""
    return {"type": "const_string", "value": text}


def in_sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    """Parts of a structural tag one after another."""
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": [*parts]}


def either(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One of some parts of a structural tag."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": parts}


def schema_content(tool: Tool, schema: Any, key: str | None = None) -> dict[str, Any]:
    """A part of a structural tag: JSON under a tool's schema, or that of its argument ``key``."""
    owner = ["the tool", tool.name, *([] if key is None else ["argument", key])]
    if tool.input is not None:
        text = in_sequence(literal('"'), {**tool.input, OWNER: owner}, literal('"'))
        return text if key else in_sequence(literal(f'{{"{INPUT}": '), text, literal("}"))
    return {"type": "json_schema", "json_schema": schema, OWNER: owner}


def read_json(text: str, at: int) -> Arguments | None:
    """The JSON object at an index of a text."""
    end, value = read_value(text, at)
    return Arguments(value, end) if isinstance(value, dict) else None


def begun_call(call_id: str, name: str, text: str, at: int) -> BegunCall | None:
    """A call whose JSON object begins at an index, as far as it is written; None if none does."""
    if not text.startswith("{", at):
        return None
    end = read_value(text, at)[0]
    return BegunCall(call_id, name, text[at:] if end < 0 else text[at:end], end >= 0)


def read_value(text: str, at: int) -> tuple[int, Any]:
    """Where the JSON value at an index ends, and what it is; -1 where there is none."""
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return -1, None
    return end, value


class ReadText(NamedTuple):
    """A finished text, taken apart. reasoning: only of formats that hold it themselves."""

    text: str
    calls: tuple[ToolCall, ...]
    reasoning: str | None = None


class BegunCall(NamedTuple):
    """A call of an unfinished text.

    id: "" where the model writes none.
    arguments: as JSON, as far as it is written; "" of a call in another form, until that is whole.
    is_complete: whether nothing can follow in them.
    """

    id: str
    name: str
    arguments: str
    is_complete: bool


class BegunText(NamedTuple):
    """What is certain of an unfinished text: as it grows, so does each of its strings.

    They are as ``MarkedText`` has read them. reasoning: None where there is none so far.
    is_cut: whether the last call is not whole yet.
    """

    text: str
    calls: tuple[BegunCall, ...] = ()
    reasoning: str | None = None
    is_cut: bool = False


class ToolRules(NamedTuple):
    """What a text may hold.

    tools: those that may be called; with the choice "named" there is one.
    is_parallel: whether several calls may be made in one text.
    stop_names: added tokens that end the text, by name.
    form: of a text without calls, as a part of a structural tag; None for free text.
    """

    tools: Sequence[Tool]
    choice: ToolChoice = "auto"
    is_parallel: bool = True
    stop_names: frozenset[str] = frozenset()
    form: dict[str, Any] | None = None
