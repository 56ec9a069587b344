"""What the server answers, in OpenAI's shapes."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from guided_spec.engine.outputs import Chunk, Completion
from guided_spec.server.faults import invalid_value
from guided_spec.server.metrics import Tally
from guided_spec.server.service import Service
from guided_spec.trace.page import StepMarkup, summary
from guided_spec.trace.record import StepTrace, Trace
from guided_spec.types import TokenLogprobs

FinishReason = Literal["stop", "length", "tool_calls"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


def absent() -> Any:
    """The default of a field that is left out where it is None."""
    return Field(None, exclude_if=lambda value: value is None)


class PromptDetails(BaseModel):
    """cached_tokens: of the prompts, found in the prefix cache; known at the end."""

    cached_tokens: int


def absent_if_zero() -> Any:
    """The default of a count that is left out where it is 0."""
    return Field(0, exclude_if=lambda value: value == 0)


class Usage(BaseModel):
    """Tokens of a request: those of each prompt count once.

    shortened_texts: those that were ended early to be whole within their budget.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    shortened_texts: int = absent_if_zero()

    @classmethod
    def of(cls, tally: Tally) -> Usage:
        """The tokens counted so far."""
        return cls(
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.output_tokens,
            total_tokens=tally.prompt_tokens + tally.output_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=tally.cached_tokens),
            shortened_texts=tally.num_shortened,
        )


class LikelyToken(BaseModel):
    """One of the likeliest tokens at a position."""

    token: str
    bytes: list[int]
    logprob: float


class TokenLogprob(LikelyToken):
    """One token of the text."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(BaseModel):
    """Log-probabilities of all tokens that were written, reasoning and calls among them."""

    content: list[TokenLogprob]
    refusal: None = None


class CallFunction(BaseModel):
    """A call's function. arguments: JSON text, or a piece of it."""

    name: str | None = absent()
    arguments: str


class CallReply(BaseModel):
    """One tool call of a reply."""

    id: str
    type: Literal["function"] = "function"
    function: CallFunction


class CustomCall(BaseModel):
    """What a custom tool gets. input: its text, or a piece of it."""

    name: str | None = absent()
    input: str


class CustomCallReply(BaseModel):
    """One call of a custom tool."""

    id: str
    type: Literal["custom"] = "custom"
    custom: CustomCall


class MessageReply(BaseModel):
    """The model's message. content: None where there are calls and nothing else."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = absent()
    tool_calls: list[CallReply | CustomCallReply] | None = absent()


class TraceReply(BaseModel):
    """A trace, or a piece of one: the fields of ``guided_spec.trace.record.Trace``, or as HTML.

    steps: records, or a row for each. summary: a table, at the end.
    """

    model_config = ConfigDict(extra="allow")
    steps: list[dict[str, Any]] | str
    summary: str | None = absent()


class ChatChoice(BaseModel):
    """One sample. trace: if the request asks for it."""

    index: int
    message: MessageReply
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    trace: TraceReply | None = absent()


class ChatReply(BaseModel):
    """The reply of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CallDelta(BaseModel):
    """A piece of one call; id and type come with its first."""

    index: int
    id: str | None = absent()
    type: Literal["function", "custom"] | None = absent()
    function: CallFunction | None = absent()
    custom: CustomCall | None = absent()


class Delta(BaseModel):
    """A piece of a message."""

    role: Literal["assistant"] | None = absent()
    content: str | None = absent()
    reasoning_content: str | None = absent()
    tool_calls: list[CallDelta] | None = absent()


class ChatChunkChoice(BaseModel):
    """A piece of one sample. trace: of the steps since the last piece."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    trace: TraceReply | None = absent()


class ChatChunkReply(BaseModel):
    """A piece of a stream. usage: on the last one, if the request asks for it."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = absent()


class CountedChatChunkReply(ChatChunkReply):
    """A chunk of a request that asks for usage: each chunk has the field."""

    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    """In step with the tokens. text_offset: in characters of the choice's text.

    A token of a part of a character is written as its bytes, such as ``bytes:\\xf0\\x9f``, and
    begins where the character does.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One text, or a piece of one. trace: of the text, or of the steps since the last piece."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    trace: TraceReply | None = absent()


class CompletionReply(BaseModel):
    """The reply of ``/v1/completions``, or a piece of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = absent()


class CountedCompletionReply(CompletionReply):
    """A piece of a stream where the request asks for usage: each has the field."""

    usage: Usage | None = None


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class ReasoningText(BaseModel):
    """The text of reasoning."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class MessageItem(BaseModel):
    """The message item of a response: the text of the model."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class ReasoningItem(BaseModel):
    """What it wrote before. It has no summary."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[Any] = []
    content: list[ReasoningText]


class CallItem(BaseModel):
    """One call. arguments: JSON text."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class CustomCallItem(BaseModel):
    """One call of a custom tool. input: any text."""

    id: str
    type: Literal["custom_tool_call"] = "custom_tool_call"
    status: ItemStatus
    call_id: str
    name: str
    input: str


OutputItem = MessageItem | ReasoningItem | CallItem | CustomCallItem


class InputDetails(BaseModel):
    """cached_tokens: of the prompt, found in the prefix cache; writing there is not billed."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(BaseModel):
    """reasoning_tokens: those of chunks that held reasoning."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Tokens of a request, see ``Usage``."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int
    shortened_texts: int = absent_if_zero()


class IncompleteDetails(BaseModel):
    """Why the text has no end."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseReply(BaseModel):
    """The response, whole or so far. The request's own fields are repeated."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: ItemStatus
    background: Literal[False] = False
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any] | None
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None


class ResponseEvent(BaseModel):
    """One event of a stream; each type has some of the fields."""

    type: str
    sequence_number: int
    response: ResponseReply | None = absent()
    item: OutputItem | None = absent()
    part: OutputText | ReasoningText | None = absent()
    item_id: str | None = absent()
    output_index: int | None = absent()
    content_index: int | None = absent()
    delta: str | None = absent()
    text: str | None = absent()
    arguments: str | None = absent()
    name: str | None = absent()
    input: str | None = absent()
    logprobs: list[Any] | None = absent()


class DeletedResponse(BaseModel):
    """What deleting a response gives."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class ModelCard(BaseModel):
    """A model that is served. max_model_len: prompt and output tokens at most.

    parent: of an adapter, the model that it changes.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "guided_spec"
    max_model_len: int
    parent: str | None = absent()


class ModelList(BaseModel):
    """The reply of ``/v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeReply(BaseModel):
    """The reply of ``/tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = absent()


_LEAST = -9999.0  # JSON has no -inf


def chat_logprobs(service: Service, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Log-probabilities of the tokens that are part of the text."""
    content = [
        TokenLogprob(
            **_likely(service, one.token_id, one.logprob).model_dump(),
            top_logprobs=[_likely(service, top.token_id, top.logprob) for top in one.top],
        )
        for one in tokens
        if not service.ends_text(one.token_id)
    ]
    return ChatLogprobs(content=content)


def _likely(service: Service, token_id: int, logprob: float) -> LikelyToken:
    data = service.token_bytes(token_id)
    text = data.decode("utf-8", errors="replace")
    return LikelyToken(token=text, bytes=list(data), logprob=max(logprob, _LEAST))


class TextOffsets:
    """Where the tokens of a text begin in it, in characters; takes them one after another."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def next(self, data: bytes) -> int:
        """The offset of the token that has these bytes."""
        begin = self._num_characters
        self._num_characters += len(self._decoder.decode(data))
        return begin


def completion_logprobs(
    service: Service, tokens: Sequence[TokenLogprobs], offsets: TextOffsets
) -> CompletionLogprobs:
    """Logprobs of the tokens that are part of the text. offsets: after the tokens before them."""
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    shown = service.llm.vocabulary.text_bytes
    for one in tokens:
        if service.ends_text(one.token_id):
            continue
        found.tokens.append(_text(service, one.token_id))
        found.token_logprobs.append(max(one.logprob, _LEAST))
        tops = {_text(service, top.token_id): max(top.logprob, _LEAST) for top in one.top}
        found.top_logprobs.append(tops)
        found.text_offset.append(offsets.next(shown[one.token_id]))
    return found


def _text(service: Service, token_id: int) -> str:
    data = service.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class SampleTraces:
    """The traces of the samples of one request.

    form: "json" for records, "html" for rows as the trace page shows them, None for no traces.

    Raises ApiError where this server records none.
    """

    def __init__(self, service: Service, form: Literal["json", "html"] | None) -> None:
        if form is not None and not service.settings.playground:
            message = "trace: this server records none; leave it out, or start it with --playground"
            raise invalid_value(message, "trace")
        self._form = form
        vocabulary = service.llm.vocabulary
        self._vocab_size = vocabulary.vocab_size
        self._stop_token_ids = tuple(vocabulary.stop_token_ids)
        self._num_steps: Counter[int] = Counter()

    def whole(self, sample: int, completion: Completion) -> TraceReply | None:
        """The trace of a whole text; None if the request does not ask for it."""
        trace = completion.trace
        if self._form is None or trace is None:
            return None
        return TraceReply(steps=self._steps(sample, 0, trace.steps), **self._rest(trace))

    def piece(self, sample: int, chunk: Chunk) -> TraceReply | None:
        """The steps of a chunk; with the last chunk everything else too. None if there are none."""
        if self._form is None:
            return None
        start = self._num_steps[sample]
        self._num_steps[sample] += len(chunk.steps)
        trace = None if chunk.completion is None else chunk.completion.trace
        if not chunk.steps and trace is None:
            return None
        rest = {} if trace is None else self._rest(trace)
        return TraceReply(steps=self._steps(sample, start, chunk.steps), **rest)

    def _steps(
        self, sample: int, start: int, steps: Sequence[StepTrace]
    ) -> list[dict[str, Any]] | str:
        if self._form == "json":
            return [asdict(step) for step in steps]
        markup = StepMarkup(sample, self._vocab_size, self._stop_token_ids)
        return "".join(markup.step(at, step) for at, step in enumerate(steps, start))

    def _rest(self, trace: Trace) -> dict[str, Any]:
        if self._form == "html":
            return {"summary": summary([trace])}
        fields = asdict(replace(trace, steps=()))
        del fields["steps"]
        return fields
