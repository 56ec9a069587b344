"""``/v1/responses``: one response to a conversation, whole or as a stream."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from guided_spec.engine.chat import ChatChunk, ChatStream, ToolCallDelta
from guided_spec.server.endpoints.bodies import ResponsesBody
from guided_spec.server.endpoints.chat import ChatRun
from guided_spec.server.endpoints.custom_calls import CustomCalls
from guided_spec.server.endpoints.replies import (
    CallItem,
    CustomCallItem,
    IncompleteDetails,
    InputDetails,
    ItemStatus,
    MessageItem,
    OutputDetails,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    ResponseReply,
    ResponseUsage,
)
from guided_spec.server.endpoints.responses_bodies import as_chat, own_items
from guided_spec.server.faults import named_as_sent
from guided_spec.server.middleware import CALLER
from guided_spec.server.service import Service
from guided_spec.server.streaming import event

_NAMES = {
    "message": "output_text",
    "reasoning": "reasoning_text",
    "function_call": "function_call_arguments",
    "custom_tool_call": "custom_tool_call_input",
}
_PARAMS = {
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}
"""Arguments of a chat by their names here."""
_NESTED = re.compile(r"\.(?:function|custom|allowed_tools|grammar)\b")


def _flat(path: str) -> str:
    """Here tools and choices are not nested as in chats."""
    return _NESTED.sub("", path)


class ResponseHandler:
    """One request of the endpoint. Raises ApiError for one that cannot be served."""

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        self._body = body
        self._service = service
        self._caller = CALLER.get()
        earlier: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            param = "previous_response_id"
            found = service.responses.find(body.previous_response_id, self._caller, param)
            earlier = json.loads(found.items)
        self._conversation = [*earlier, *own_items(body)]
        chat = as_chat(body, earlier, service.picture_rules)
        self._run = ChatRun(service, chat)
        self._items = ResponseItems(CustomCalls(chat.tools))
        self._is_stored = service.responses.is_on and body.store is not False
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())

    async def whole(self) -> ResponseReply:
        """The response, once all of it is there."""
        async with aclosing(self._events()) as events:
            async for one in events:
                last = one
        assert last.response is not None  # a stream that does not raise ends with it
        return last.response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The response, as it is written."""
        async with aclosing(self._events()) as events:
            async for one in events:
                yield event(one, one.type)

    async def _events(self) -> AsyncGenerator[ResponseEvent, None]:
        with named_as_sent(_PARAMS, _flat):
            async with aclosing(self._unnamed_events()) as events:
                async for one in events:
                    yield one

    async def _unnamed_events(self) -> AsyncGenerator[ResponseEvent, None]:
        items, stream, reason = self._items, None, "stop"
        async with aclosing(self._run.requests()) as chunks:
            async for request, chunk in chunks:
                if stream is None:
                    stream = ChatStream(request, 0)
                    for kind in ("created", "in_progress"):
                        yield items.event(kind, response=self._reply("in_progress"))
                piece = stream.feed(chunk)
                for one in items.feed(piece):
                    yield one
                if piece.completion is not None:
                    reason = piece.completion.finish_reason
        status: ItemStatus = "incomplete" if reason == "length" else "completed"
        for one in items.end(status):
            yield one
        reply = self._reply(status)
        if self._is_stored:
            await self._service.workers.run(lambda: self._store(reply))
        yield items.event(status, response=reply)

    def _store(self, reply: ResponseReply) -> None:
        items = [*self._conversation, *lasting_items(reply.output)]
        self._service.responses.add(self._id, reply.model_dump(), items, self._caller)

    def _reply(self, status: ItemStatus) -> ResponseReply:
        body, defaults = self._body, self._service.llm.default_params
        given = (body.temperature, body.top_p, body.parallel_tool_calls)
        temperature, top_p, is_parallel = given
        fields = {
            "id": self._id,
            "created_at": self._created,
            "status": status,
            "incomplete_details": IncompleteDetails() if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._service.shown_name(body.model),
            "output": [item.model_copy(deep=True) for item in self._items.items],
            "previous_response_id": body.previous_response_id,
            "store": self._is_stored,
            "parallel_tool_calls": True if is_parallel is None else is_parallel,
            "reasoning": None if body.reasoning is None else body.reasoning.model_dump(),
            "temperature": defaults.temperature if temperature is None else temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": defaults.top_p if top_p is None else top_p,
            "usage": None if status == "in_progress" else self._usage(),
        }
        return ResponseReply.model_validate(fields)

    def _usage(self) -> ResponseUsage:
        usage = self._run.usage
        return ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=self._items.reasoning_tokens),
            total_tokens=usage.total_tokens,
            shortened_texts=usage.shortened_texts,
        )


def lasting_items(output: Sequence[OutputItem]) -> list[dict[str, Any]]:
    """What of a response is part of a conversation that goes on.

    A call that was cut off was never made: no result of it will follow.
    """
    calls = (CallItem, CustomCallItem)
    return [
        item.model_dump()
        for item in output
        if not (isinstance(item, calls) and item.status == "incomplete")
    ]


class ResponseItems:
    """The items of a response while they are written: takes chunks in, gives events out.

    One item is open at a time; another kind closes it.
    """

    def __init__(self, customs: CustomCalls | None = None) -> None:
        self._customs = customs or CustomCalls(())
        self.items: list[OutputItem] = []
        self.reasoning_tokens = 0
        self._num_events = 0
        self._call_index = -1

    def event(self, kind: str, **fields: Any) -> ResponseEvent:
        """The next event of the stream."""
        number, self._num_events = self._num_events, self._num_events + 1
        return ResponseEvent(type=f"response.{kind}", sequence_number=number, **fields)

    def feed(self, chunk: ChatChunk) -> Iterator[ResponseEvent]:
        """The events of one chunk."""
        if chunk.reasoning:
            self.reasoning_tokens += len(chunk.token_ids)
            yield from self._write("reasoning", chunk.reasoning)
        if chunk.text:
            yield from self._write("message", chunk.text)
        for piece in chunk.tool_calls:
            yield from self._write_call(piece)

    def end(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Close what is open. A response that holds nothing is an empty message."""
        if not self.items:
            yield from self._open(_message())
        yield from self._close(status)

    def _write(self, kind: str, text: str) -> Iterator[ResponseEvent]:
        if not self._is_open(kind):
            yield from self._close("completed")
            yield from self._open(_message() if kind == "message" else _reasoning())
        item = self.items[-1]
        assert isinstance(item, MessageItem | ReasoningItem)
        item.content[0].text += text
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "message":
            fields["logprobs"] = []
        yield self.event(f"{_NAMES[kind]}.delta", **self._indices(), **fields)

    def _write_call(self, piece: ToolCallDelta) -> Iterator[ResponseEvent]:
        text = self._customs.feed(piece)
        if piece.call_index != self._call_index:
            self._call_index = piece.call_index
            yield from self._close("completed")
            yield from self._open(_call(piece) if text is None else _custom_call(piece))
        item, more = self.items[-1], piece.arguments if text is None else text
        if isinstance(item, CallItem):
            item.arguments += more
        elif isinstance(item, CustomCallItem):
            item.input += more
        if more:
            yield self.event(f"{_NAMES[item.type]}.delta", **self._indices(), delta=more)
        if piece.is_complete:
            yield from self._close("completed")

    def _is_open(self, kind: str) -> bool:
        return bool(self.items) and self.items[-1].type == kind and self._is_unfinished()

    def _is_unfinished(self) -> bool:
        return bool(self.items) and self.items[-1].status == "in_progress"

    def _open(self, item: OutputItem) -> Iterator[ResponseEvent]:
        self.items.append(item)
        index = len(self.items) - 1
        shown = item.model_copy(deep=True)
        if isinstance(shown, MessageItem | ReasoningItem):
            shown.content = []
        yield self.event("output_item.added", output_index=index, item=shown)
        if isinstance(item, MessageItem | ReasoningItem):
            part = item.content[0].model_copy()
            yield self.event("content_part.added", **self._indices(), content_index=0, part=part)

    def _close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        if not self._is_unfinished():
            return
        item, indices = self.items[-1], self._indices()
        item.status = status
        if isinstance(item, CallItem):
            fields = {"arguments": item.arguments, "name": item.name}
            yield self.event("function_call_arguments.done", **indices, **fields)
        elif isinstance(item, CustomCallItem):
            yield self.event("custom_tool_call_input.done", **indices, input=item.input)
        else:
            part = item.content[0].model_copy()
            more: dict[str, Any] = {"logprobs": []} if isinstance(item, MessageItem) else {}
            kind = f"{_NAMES[item.type]}.done"
            yield self.event(kind, **indices, content_index=0, text=part.text, **more)
            yield self.event("content_part.done", **indices, content_index=0, part=part)
        yield self.event(
            "output_item.done",
            output_index=indices["output_index"],
            item=item.model_copy(deep=True),
        )

    def _indices(self) -> dict[str, Any]:
        return {"item_id": self.items[-1].id, "output_index": len(self.items) - 1}


def _message() -> MessageItem:
    return MessageItem(id=_id("msg"), status="in_progress", content=[OutputText(text="")])


def _reasoning() -> ReasoningItem:
    return ReasoningItem(id=_id("rs"), status="in_progress", content=[ReasoningText(text="")])


def _call(piece: ToolCallDelta) -> CallItem:
    return CallItem(
        id=_id("fc"),
        status="in_progress",
        call_id=f"call_{piece.id}",
        name=piece.name,
        arguments="",
    )


def _custom_call(piece: ToolCallDelta) -> CustomCallItem:
    return CustomCallItem(
        id=_id("ctc"),
        status="in_progress",
        call_id=f"call_{piece.id}",
        name=piece.name,
        input="",
    )


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
