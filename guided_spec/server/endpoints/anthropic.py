"""``/v1/messages``: one answer in the form of Anthropic's interface, whole or as events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Any, Literal

from pydantic import BaseModel

from guided_spec.engine.chat import ChatChunk, ChatCompletion, ChatRequest, ChatStream
from guided_spec.engine.chats.messages import pictures_of
from guided_spec.server.endpoints.anthropic_bodies import (
    CALL,
    CountBody,
    MessagesBody,
    as_chat,
    counted_chat,
)
from guided_spec.server.endpoints.chat import ChatRun
from guided_spec.server.endpoints.replies import absent, absent_if_zero
from guided_spec.server.endpoints.values import chat_of
from guided_spec.server.faults import named_as_sent
from guided_spec.server.service import Service
from guided_spec.server.streaming import event

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
_PARAMS = {
    "messages": "messages",  # whose places are not those of the chat's
    "response_format": "output_config.format",
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
}


def _named(messages: Sequence[Mapping[str, Any]]) -> AbstractContextManager[None]:
    """messages: of the chat. Their pictures, which are read later, have the client's places."""
    places = {one.path: one.path for one in pictures_of(messages)}
    return named_as_sent({**_PARAMS, **places}, _flat)


def _flat(path: str) -> str:
    """Here a tool is no function that is nested in it."""
    return path.replace(".function.parameters", ".input_schema").replace(".function", "")


class TextBlock(BaseModel):
    """What the model says."""

    type: Literal["text"] = "text"
    text: str


class ThinkingBlock(BaseModel):
    """What it wrote before. There is nothing to sign."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseBlock(BaseModel):
    """A call. input: its arguments; none of them in an event that begins it."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(BaseModel):
    """input_tokens: but those found in the prefix cache. shortened_texts: see ``Usage``."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int
    shortened_texts: int = absent_if_zero()


class MessageBody(BaseModel):
    """The reply of ``/v1/messages``, whole or so far."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Block]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """One event of a stream; each type has some of the fields."""

    type: str
    message: MessageBody | None = absent()
    index: int | None = absent()
    content_block: Block | None = absent()
    delta: dict[str, Any] | None = absent()
    usage: MessageUsage | None = absent()


class TokenCount(BaseModel):
    """The reply of ``/v1/messages/count_tokens``."""

    input_tokens: int


async def count_tokens(service: Service, body: CountBody) -> TokenCount:
    """The tokens of a prompt, its tools included. Raises ApiError."""
    chat = await service.workers.run(
        lambda: counted_chat(body, service.template, service.picture_rules)
    )
    with _named(chat["messages"]):
        run = ChatRun(service, chat_of(chat))
        return TokenCount(input_tokens=await run.count_tokens())


class MessagesHandler:
    """One request of the endpoint. Raises ApiError for one that cannot be served."""

    def __init__(self, service: Service, body: MessagesBody) -> None:
        self._service = service
        self._stops = body.stop_sequences or []
        chat = as_chat(body, service.template, service.picture_rules)
        self._messages, self._model = chat.messages, service.shown_name(body.model)
        self._run = ChatRun(service, chat)
        self._id = f"msg_{uuid.uuid4().hex}"

    async def whole(self) -> MessageBody:
        """The reply, once all of it is there."""
        answer: ChatCompletion | None = None
        async with aclosing(self._requests()) as chunks:
            async for request, chunk in chunks:
                if chunk.completion is not None:
                    answer = request.read_sample(chunk.completion, 0)
        assert answer is not None  # what does not raise ends with it
        return self._reply(_blocks(answer), answer)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events, as it is written."""
        blocks, stream = MessageBlocks(), None
        async with aclosing(self._requests()) as chunks:
            async for request, chunk in chunks:
                if stream is None:
                    stream = ChatStream(request, 0)
                    yield _sent(MessageEvent(type="message_start", message=self._reply([], None)))
                piece = stream.feed(chunk)
                for one in blocks.feed(piece):
                    yield _sent(one)
                if piece.completion is not None:
                    last = self._reply([], piece.completion)
        ends = {"stop_reason": last.stop_reason, "stop_sequence": last.stop_sequence}
        yield _sent(MessageEvent(type="message_delta", delta=ends, usage=last.usage))
        yield _sent(MessageEvent(type="message_stop"))

    async def _requests(self) -> AsyncGenerator[tuple[ChatRequest, Any], None]:
        with _named(self._messages):
            async with aclosing(self._run.requests()) as chunks:
                async for one in chunks:
                    yield one

    def _reply(self, content: list[Block], answer: ChatCompletion | None) -> MessageBody:
        """answer: None while it is being written."""
        usage = self._run.usage
        cached = usage.prompt_tokens_details.cached_tokens
        stop = None if answer is None else self._stop_sequence(answer)
        return MessageBody(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=None if answer is None else _stop_reason(answer, stop),
            stop_sequence=stop,
            usage=MessageUsage(
                input_tokens=usage.prompt_tokens - cached,
                cache_read_input_tokens=cached,
                output_tokens=usage.completion_tokens,
                shortened_texts=usage.shortened_texts,
            ),
        )

    def _stop_sequence(self, answer: ChatCompletion) -> str | None:
        """The one that has ended the text."""
        completion = answer.completion
        if completion.finish_reason != "stop" or not self._stops:
            return None
        written = self._service.llm.vocabulary.decode(completion.token_ids)
        rest = written[len(completion.text) :]
        return next((stop for stop in self._stops if rest.startswith(stop)), None)


class MessageBlocks:
    """The blocks of a message while they are written: takes chunks in, gives events out."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None  # the kind of the block, with the number of the call

    def feed(self, chunk: ChatChunk) -> Iterator[MessageEvent]:
        """The events of one chunk."""
        if chunk.reasoning:
            yield from self._begin("thinking", ThinkingBlock(thinking=""))
            yield self._delta(type="thinking_delta", thinking=chunk.reasoning)
        if chunk.text:
            yield from self._begin("text", TextBlock(text=""))
            yield self._delta(type="text_delta", text=chunk.text)
        for piece in chunk.tool_calls:
            begun = ToolUseBlock(id=f"{CALL}{piece.id}", name=piece.name, input={})
            yield from self._begin(f"call {piece.call_index}", begun)
            if piece.arguments:
                yield self._delta(type="input_json_delta", partial_json=piece.arguments)
            if piece.is_complete:
                yield from self._end()
        if chunk.completion is not None:
            yield from self._end()

    def _begin(self, kind: str, block: Block) -> Iterator[MessageEvent]:
        if self._open == kind:
            return
        yield from self._end()
        self._open, self._index = kind, self._index + 1
        yield MessageEvent(type="content_block_start", index=self._index, content_block=block)

    def _delta(self, **delta: str) -> MessageEvent:
        return MessageEvent(type="content_block_delta", index=self._index, delta=delta)

    def _end(self) -> Iterator[MessageEvent]:
        if self._open is not None:
            self._open = None
            yield MessageEvent(type="content_block_stop", index=self._index)


def _blocks(answer: ChatCompletion) -> list[Block]:
    blocks: list[Block] = []
    if answer.reasoning:
        blocks.append(ThinkingBlock(thinking=answer.reasoning))
    if answer.text:
        blocks.append(TextBlock(text=answer.text))
    for call in answer.tool_calls:
        blocks.append(ToolUseBlock(id=f"{CALL}{call.id}", name=call.name, input=call.arguments))
    return blocks


def _stop_reason(answer: ChatCompletion, stop: str | None) -> StopReason:
    match answer.finish_reason:
        case "tool_calls":
            return "tool_use"
        case "length":
            return "max_tokens"
    return "end_turn" if stop is None else "stop_sequence"


def _sent(one: MessageEvent) -> bytes:
    return event(one, one.type)
