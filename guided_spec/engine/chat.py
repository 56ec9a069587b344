"""Chats with tools and reasoning: what a conversation asks for, and what the reply holds.

A reply can be read while it is generated.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any, Literal, NamedTuple, TypedDict, get_type_hints

from guided_spec.engine.chats.messages import read_messages, require_variables
from guided_spec.engine.chats.pictures import FetchImage
from guided_spec.engine.chats.template import render_arguments, template_text
from guided_spec.engine.outputs import Chunk, Completion, RequestOutput
from guided_spec.engine.prompt import Message, Prompt, PromptEncoder
from guided_spec.errors import ConfigError, PromptError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tools.custom import as_function_call
from guided_spec.grammar.tools.form import FormedFormat
from guided_spec.grammar.tools.format import (
    BegunText,
    MarkedText,
    ReadText,
    Tool,
    ToolCall,
    ToolRules,
    read_choice,
    read_tools,
    tool_dicts,
)
from guided_spec.grammar.tools.formats import (
    TOOL_FORMATS,
    ToolFormat,
    find_tool_format,
    get_tool_format,
)
from guided_spec.grammar.tools.reasoning import (
    BEGINNINGS,
    FINAL_CHANNEL,
    Reasoning,
    ReasoningState,
)
from guided_spec.grammar.value import parse_value
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.kinds import require_kinds, require_known
from guided_spec.models.pictures.picture import PicturePrompt
from guided_spec.types import SamplingParams, TokenLogprobs, require_no_sampling

ChatFinishReason = Literal["stop", "length", "error", "tool_calls"]

_ID_LETTERS = string.ascii_letters + string.digits


class ChatOptions(TypedDict, total=False):
    """The options of ``LLM.chat``, see there."""

    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    tool_format: str | None
    response_format: Any
    chat_template_kwargs: Mapping[str, Any] | None
    params: SamplingParams | None
    fetch_image: FetchImage | None


class ChatCompletion(NamedTuple):
    """One reply.

    text: what the model says, without reasoning and calls.
    reasoning: what it wrote before, without the marks around it; None where there was none.
    tool_calls: in the order of the text. A call that was cut off stays in ``text``.
    finish_reason: as a ``Completion`` has it, and "tool_calls" instead of "stop" where there are.
    message: the reply as a message, ready to be appended to the conversation.
    completion: all of the text and its tokens, as ``generate`` returns them.
    form: of a text without calls, where the request has tools and a form; else None.
    """

    text: str
    reasoning: str | None
    tool_calls: tuple[ToolCall, ...]
    finish_reason: ChatFinishReason
    message: dict[str, Any]
    completion: Completion
    form: GrammarSpec | None = None

    @property
    def was_shortened(self) -> bool:
        """Whether the budget changed the text, see ``Completion.was_shortened``."""
        return self.completion.was_shortened

    @property
    def parsed(self) -> Any:
        """The value of an answer under a JSON grammar, see ``Completion.parsed``.

        None for calls.
        """
        form = self.form
        if form is None:
            return self.completion.parsed
        if self.tool_calls or not self.completion.is_complete or not form.is_json:
            return None
        return parse_value(self.text, form.value_type)


class ChatOutput(NamedTuple):
    """What a conversation gave. The properties are those of the first completion.

    completions: ``n`` answers.
    """

    completions: tuple[ChatCompletion, ...]

    @property
    def text(self) -> str:
        """What the model says, without reasoning and calls."""
        return self.completions[0].text

    @property
    def reasoning(self) -> str | None:
        """What it wrote before; None where there was none."""
        return self.completions[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, in the order of the text."""
        return self.completions[0].tool_calls

    @property
    def finish_reason(self) -> ChatFinishReason:
        """Why the text ended; "tool_calls" where it holds calls."""
        return self.completions[0].finish_reason

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, ready to be appended to the conversation."""
        return self.completions[0].message

    @property
    def was_shortened(self) -> bool:
        """Whether the budget changed the text, see ``Completion.was_shortened``."""
        return self.completions[0].was_shortened

    @property
    def parsed(self) -> Any:
        """The value of an answer under a JSON grammar, see ``Completion.parsed``."""
        return self.completions[0].parsed

    @property
    def completion(self) -> Completion:
        """All of the text, its tokens and statistics."""
        return self.completions[0].completion


class _Reader(NamedTuple):
    """Splits the texts generated for one prompt; the counterpart of its grammar."""

    tool_format: ToolFormat | FormedFormat | None
    tools: Sequence[Tool]
    reasoning: Reasoning | None
    state: ReasoningState
    marks: MarkedText

    def read(self, text: str) -> ReadText:
        reasoning = None
        if self.reasoning is not None:
            reasoning, text = self.reasoning.split(text, self.state, self.marks)
        if self.tool_format is None:
            return ReadText(self.marks.show(text), (), self._shown(reasoning))
        read = self.tool_format.read(text, self.tools, self.marks)
        return read if self.reasoning is None else read._replace(reasoning=self._shown(reasoning))

    def read_begun(self, text: str) -> BegunText:
        """What is certain of a text that goes on; not yet as it is shown."""
        reasoning = None
        if self.reasoning is not None:
            reasoning, text = self.reasoning.split_begun(text, self.state, self.marks)
        if self.tool_format is None:
            return BegunText(text, (), reasoning)
        begun = self.tool_format.read_begun(text, self.tools, self.marks)
        return begun if self.reasoning is None else begun._replace(reasoning=reasoning)

    def with_form(self, form: GrammarSpec | None) -> _Reader:
        """The reader of texts that are calls, or else of this form; None for any text."""
        if form is None or isinstance(self.tool_format, FormedFormat | None):
            return self
        return self._replace(tool_format=FormedFormat(self.tool_format, form))

    @property
    def form(self) -> GrammarSpec | None:
        """What a text without calls is of, beside tools."""
        return self.tool_format.form if isinstance(self.tool_format, FormedFormat) else None

    def _shown(self, reasoning: str | None) -> str | None:
        return None if reasoning is None else self.marks.show(reasoning)


class ChatRequest(NamedTuple):
    """One conversation, ready for the engine, and what reads the reply.

    prompt_ids: its tokens; of a picture one that stands for each of its rows.
    pictures: the same with its pictures; None without any.
    """

    prompt_ids: list[int]
    params: SamplingParams
    reader: _Reader
    pictures: PicturePrompt | None = None

    @property
    def prompt(self) -> Prompt:
        """What ``generate`` takes."""
        return self.prompt_ids if self.pictures is None else self.pictures

    def read(self, output: RequestOutput) -> ChatOutput:
        """The answers. Raises the error of a request that failed."""
        for completion in output.completions:
            if completion.error is not None:
                raise completion.error
        return ChatOutput(tuple(map(self.read_sample, output.completions, count())))

    def read_sample(self, completion: Completion, sample_index: int) -> ChatCompletion:
        """The reply of one sample, whether it has failed or not."""
        marked = self.reader.marks.read(completion.token_ids, self.params.stop_token_ids)
        marked = self.before_stop(marked, len(completion.text))
        text, calls, reasoning = self.reader.read(marked)
        calls = tuple(
            call._replace(id=call.id or self.call_id(sample_index, at, call.name))
            for at, call in enumerate(calls)
        )
        reason: ChatFinishReason = completion.finish_reason
        if calls and reason == "stop":
            reason = "tool_calls"
        message = self._message(text, calls, reasoning)
        form = self.reader.form
        return ChatCompletion(text, reasoning, calls, reason, message, completion, form)

    def before_stop(self, marked: str, visible: int) -> str:
        """A text that the marks have read, of which ``visible`` characters are shown.

        The part of a token from the beginning of a stop string on is not shown.
        """
        return self.reader.marks.cut(marked, visible) if self.params.stop else marked

    def call_id(self, sample_index: int, index: int, name: str) -> str:
        """The id of a call for which the model writes none: known as soon as the call begins."""
        source = f"{self.prompt_ids} {self.params.seed} {sample_index} {index} {name}".encode()
        number = int.from_bytes(hashlib.blake2b(source, digest_size=8).digest(), "big")
        letters = [_ID_LETTERS[number // 62**at % 62] for at in range(9)]
        return "".join(letters)

    def _message(
        self, text: str, calls: Sequence[ToolCall], reasoning: str | None
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        if reasoning:
            is_harmony = self.reader.reasoning is None
            message["thinking" if is_harmony else "reasoning_content"] = reasoning
            if is_harmony and calls:
                message["content"] = ""  # gpt-oss's template takes only one of the two with a call
        return message


class Chat:
    """Makes requests of conversations with one model; thread-safe."""

    def __init__(self, tokenizer: Any, vocabulary: Vocabulary, encoder: PromptEncoder) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._encoder = encoder
        self._marks = lru_cache(maxsize=16)(lambda literals: MarkedText(vocabulary, literals))

    def request(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, options: ChatOptions
    ) -> ChatRequest:
        """Render, constrain and encode a conversation. Raises ConfigError and PromptError."""
        kinds = get_type_hints(ChatOptions)
        for name, value in options.items():
            if name not in kinds:
                require_no_sampling(name, value)
                require_known(name, value, {*kinds, "messages", "tools"})
        require_kinds(options, kinds)
        asked = _asked(options)
        variables = dict(options.get("chat_template_kwargs") or {})
        listed = tool_dicts(tools) if tools else None
        parsed = read_tools(tools or [])
        template = template_text(self._tokenizer, {**variables, "tools": listed})
        require_variables(variables, template, render_arguments(self._tokenizer))
        rules = self._encoder.picture_rules._replace(fetch=options.get("fetch_image"))
        read = read_messages(messages, template, rules)
        prompt = self._render(read, {**variables, "tools": listed})
        _require_rendered(parsed, template, prompt)
        choice, left = read_choice(options.get("tool_choice", "auto"), parsed)
        reader = self._reader(template, prompt, left, options)
        is_parallel = options.get("parallel_tool_calls", True)
        tool_rules = ToolRules(left, choice, is_parallel, self._stop_names())
        if choice == "auto":
            reader = reader.with_form(asked.form)
        params = replace(asked.params, grammar=_grammar(asked, tool_rules, reader))
        reader = _after_own_marker(reader, params.grammar)
        if choice == "none":
            reader = reader._replace(tools=())
        token_ids, pictures = self._encoder.encode_chat(prompt, read)
        return ChatRequest(token_ids, params, reader, pictures)

    def _reader(
        self, template: str, prompt: str, tools: Sequence[Tool], options: ChatOptions
    ) -> _Reader:
        name = options.get("tool_format")
        tool_format = find_tool_format(template) if name is None else get_tool_format(name)
        if tool_format is None and tools:
            known = ", ".join(TOOL_FORMATS)
            fix = f"the chat template is of no family that is known; name one of {known}"
            raise ConfigError("tool_format", None, fix)
        if tool_format is not None and not tools and not tool_format.frames_text:
            tool_format = None
        reasoning: Reasoning | None = None
        state: ReasoningState = "unopened"
        literals: tuple[str, ...] = () if tool_format is None else tool_format.literals
        if tool_format is None or not tool_format.holds_reasoning:
            own = None if tool_format is None else tool_format.reasoning
            reasoning = own or Reasoning.of_template(template)
        if reasoning is not None:
            state = reasoning.state_after(prompt)
            literals += reasoning
        return _Reader(tool_format, tools, reasoning, state, self._marks(literals))

    def _render(self, messages: Sequence[Message], variables: dict[str, Any]) -> str:
        try:
            return self._encoder.render(_with_arguments(messages, _as_dict), **variables)
        except PromptError as error:
            try:  # DeepSeek's templates join the arguments to other text
                return self._encoder.render(_with_arguments(messages, _as_text), **variables)
            except PromptError:
                raise error from None

    def _stop_names(self) -> frozenset[str]:
        stops = self._vocabulary.stop_token_ids
        return frozenset(name for name, token in self._vocabulary.added_tokens if token in stops)


class _Asked(NamedTuple):
    """What the options ask for.

    form: of the answer, None for free text. is_format: whether it is a ``response_format``.
    """

    params: SamplingParams
    form: GrammarSpec | None
    is_format: bool


def _asked(options: ChatOptions) -> _Asked:
    params = options.get("params") or SamplingParams()
    if not isinstance(params, SamplingParams):
        raise ConfigError("params", params, "must be a SamplingParams")
    if params.echo:
        raise ConfigError("params.echo", params.echo, "a chat returns the answer; leave it out")
    response_format = options.get("response_format")
    if response_format is None:
        return _Asked(params, params.grammar, is_format=False)
    if params.grammar is not None:
        fix = "params have a grammar already; leave one of the two out"
        raise ConfigError("response_format", response_format, fix)
    return _Asked(params, GrammarSpec.from_response_format(response_format), is_format=True)


def _grammar(asked: _Asked, rules: ToolRules, reader: _Reader) -> GrammarSpec | None:
    """What tools and form make of the text; None for free text."""
    form = asked.form
    if not rules.tools or reader.tool_format is None or (rules.choice == "none" and form):
        if form is not None and asked.is_format and _marker(reader) is not None:
            return form.after(_marker(reader))
        return form
    return _tool_grammar(rules, reader, reader.tool_format)


def _marker(reader: _Reader) -> str | None:
    """What ends the reasoning that the prompt has opened, or the channel before the reply."""
    if reader.tool_format is not None and reader.tool_format.holds_reasoning:
        return FINAL_CHANNEL
    return reader.reasoning.end if reader.reasoning and reader.state == "open" else None


def _tool_grammar(
    rules: ToolRules, reader: _Reader, tool_format: ToolFormat | FormedFormat
) -> GrammarSpec:
    content = tool_format.content(rules)
    reasoning = reader.reasoning
    if reasoning is not None and reader.state == "unopened":
        content = reasoning.before(content)
    if reasoning is not None and reader.state == "open":
        content = reasoning.after(content)
    spec = GrammarSpec.structural_tag({"type": "structural_tag", "format": content})
    marker = reasoning.end if reasoning is not None and reader.state == "open" else None
    return spec if marker is None else spec.after(marker)


def _after_own_marker(reader: _Reader, grammar: GrammarSpec | None) -> _Reader:
    """The reader of texts whose grammar waits for a marker: what stands before it is reasoning."""
    if grammar is None or grammar.start is None or reader.state == "closed":
        return reader
    marker, reasoning = grammar.start.marker, reader.reasoning
    if isinstance(marker, str) and reader.tool_format is None:
        begin = BEGINNINGS.get(marker.strip(), "")
        reasoning = Reasoning(begin, marker)
    return reader._replace(reasoning=reasoning, state="open")


def _require_rendered(tools: Sequence[Tool], template: str, prompt: str) -> None:
    missing = [tool.name for tool in tools if tool.name not in prompt]
    if tools and (missing or not re.search(r"\btools\b", template)):
        fix = (
            "the chat template does not render tools, so the model would not see them; use a model "
            'whose template does, or pass chat_template_kwargs={"chat_template": ...}'
        )
        raise ConfigError("tools", missing or [tool.name for tool in tools], fix)


def _with_arguments(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Any]:
    """The messages with the arguments of their calls changed; the caller's own stay as they are."""
    return [_with_changed(message, change) for message in messages]


def _with_changed(message: Any, change: Callable[[Any], Any]) -> Any:
    written = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not written or not isinstance(written, list | tuple):
        return message  # the template's to judge
    calls = []
    for call in written:
        call = as_function_call(call)
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and "arguments" in function:
            changed = {**function, "arguments": change(function["arguments"])}
            call = {**call, "function": changed}
        calls.append(call)
    return {**message, "tool_calls": calls}


def _as_dict(arguments: Any) -> Any:
    """Arguments as most chat templates want them; OpenAI's client has them as JSON text."""
    try:
        return json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments  # the template's to judge


def _as_text(arguments: Any) -> Any:
    is_text = isinstance(arguments, str)
    return arguments if is_text else json.dumps(arguments, ensure_ascii=False)


class ToolCallDelta(NamedTuple):
    """A piece of one call.

    call_index: of the call in the reply. id, name: on the call's first piece, "" on the others.
    arguments: what follows, as JSON text. A form of calls that is not JSON gives it in one piece.
    is_complete: whether it is the last piece, which is known as soon as it is written. A call that
        was cut off has no last piece.
    """

    call_index: int
    id: str
    name: str
    arguments: str
    is_complete: bool = False


class ChatChunk(NamedTuple):
    """A piece of a streamed reply; the pieces, joined, are what ``chat`` returns.

    Only whitespace around the text may differ. A call that was cut off shows as its pieces up to
    there, and stays in the text of ``completion``.

    text, reasoning, tool_calls: what is certain since the last chunk.
    completion: on a sample's last chunk, the whole reply.
    token_ids, logprobs: of the tokens that were committed since the last chunk, see ``Chunk``.
    """

    sample_index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    completion: ChatCompletion | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()


class ChatStream:
    """Takes the chunks of one sample apart, in their order."""

    def __init__(self, request: ChatRequest, sample_index: int) -> None:
        self._request = request
        self._sample_index = sample_index
        self._tokens = request.reader.marks.reader(request.params.stop_token_ids)
        self._written = ""  # as the marks have read it
        self._sent_text = 0
        self._sent_reasoning = 0
        self._shown = self._shown_reasoning = ""
        self._sent_arguments: list[int] = []  # of each call that has begun
        self._num_complete = 0  # calls whose last piece has been sent
        self._visible = 0

    def feed(self, chunk: Chunk) -> ChatChunk:
        """The part of the reply that a chunk holds."""
        begun = self._request.reader.read_begun(self._read(chunk))
        text = self._show(begun.text[self._sent_text :])
        reasoning = self._show((begun.reasoning or "")[self._sent_reasoning :])
        self._sent_text = max(self._sent_text, len(begun.text))
        self._sent_reasoning = max(self._sent_reasoning, len(begun.reasoning or ""))
        self._shown += text
        self._shown_reasoning += reasoning
        piece = ChatChunk(self._sample_index, text, reasoning, self._calls(begun))
        piece = piece._replace(token_ids=chunk.token_ids, logprobs=chunk.logprobs)
        return piece if chunk.completion is None else self._end(piece, chunk.completion, begun)

    def _read(self, chunk: Chunk) -> str:
        """All of the text so far that nothing can change any more."""
        self._written += self._tokens.feed(chunk.token_ids)
        self._visible += len(chunk.text)
        return self._request.before_stop(self._written, self._visible)

    def _show(self, text: str) -> str:
        return self._request.reader.marks.show(text)

    def _calls(self, begun: BegunText) -> tuple[ToolCallDelta, ...]:
        pieces = []
        for index, call in enumerate(begun.calls):
            name = call_id = ""
            if index == len(self._sent_arguments):
                name = call.name
                call_id = call.id or self._request.call_id(self._sample_index, index, name)
                self._sent_arguments.append(0)
            arguments = self._show(call.arguments[self._sent_arguments[index] :])
            self._sent_arguments[index] = len(call.arguments)
            is_last = call.is_complete and index >= self._num_complete
            self._num_complete += is_last
            if name or arguments or is_last:
                pieces.append(ToolCallDelta(index, call_id, name, arguments, is_last))
        return tuple(pieces)

    def _end(self, piece: ChatChunk, completion: Completion, begun: BegunText) -> ChatChunk:
        """The last piece: with what was held back, because something else might have followed."""
        answer = self._request.read_sample(completion, self._sample_index)
        rest = _rest(answer.reasoning or "", self._shown_reasoning)
        piece = piece._replace(reasoning=piece.reasoning + rest)
        if not begun.is_cut:
            rest = _rest(answer.text, self._shown) or _rest(answer.text.lstrip(), self._shown)
            piece = piece._replace(text=piece.text + rest)
        sent = len(self._sent_arguments)
        written = [json.dumps(call.arguments, ensure_ascii=False) for call in answer.tool_calls]
        calls = [
            ToolCallDelta(at, call.id, call.name, written[at], is_complete=True)
            for at, call in enumerate(answer.tool_calls)
            if at >= sent
        ]
        return piece._replace(tool_calls=(*piece.tool_calls, *calls), completion=answer)


def _rest(text: str, shown: str) -> str:
    return text[len(shown) :] if text.startswith(shown) else ""
