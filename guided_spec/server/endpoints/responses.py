"""``/v1/responses``: one response to a conversation, whole or as a stream. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from guided_spec.engine.chat import ChatChunk, ChatStream, ToolCallDelta
from guided_spec.kinds import require_known_fields
from guided_spec.server.endpoints.bodies import ChatBody, ResponsesBody
from guided_spec.server.endpoints.chat import ChatRun
from guided_spec.server.endpoints.messages import plain_text
from guided_spec.server.endpoints.replies import (
    CallItem,
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
from guided_spec.server.faults import ApiError, invalid_value, named_as_sent
from guided_spec.server.service import Service
from guided_spec.server.streaming import event

_LOGPROBS = "message.output_text.logprobs"
_NAMES = {"message": "output_text", "reasoning": "reasoning_text"}
_PARAMS = {"response_format": "text.format", "max_tokens": "max_output_tokens", "messages": "input"}
"""Arguments of a chat by their names here."""


class ResponseHandler:
    """One request of the endpoint. Raises ApiError for one that cannot be served."""

    def __init__(self, service: Service, body: ResponsesBody) -> None:
        self._body = body
        self._service = service
        self._run = ChatRun(service, as_chat(body))
        self._items = ResponseItems()
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
        with named_as_sent(_PARAMS):
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
        yield items.event(status, response=self._reply(status))

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
            "model": self._service.model_name,
            "output": [item.model_copy(deep=True) for item in self._items.items],
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


class ResponseItems:
    """The items of a response while they are written: takes chunks in, gives events out.

    One item is open at a time; another kind closes it.
    """

    def __init__(self) -> None:
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
        assert not isinstance(item, CallItem)
        item.content[0].text += text
        fields: dict[str, Any] = {"content_index": 0, "delta": text}
        if kind == "message":
            fields["logprobs"] = []
        yield self.event(f"{_NAMES[kind]}.delta", **self._indices(), **fields)

    def _write_call(self, piece: ToolCallDelta) -> Iterator[ResponseEvent]:
        if piece.call_index != self._call_index:
            self._call_index = piece.call_index
            yield from self._close("completed")
            yield from self._open(_call(piece))
        item = self.items[-1]
        assert isinstance(item, CallItem)
        item.arguments += piece.arguments
        if piece.arguments:
            kind = "function_call_arguments.delta"
            yield self.event(kind, **self._indices(), delta=piece.arguments)

    def _is_open(self, kind: str) -> bool:
        return bool(self.items) and self.items[-1].type == kind and self._is_unfinished()

    def _is_unfinished(self) -> bool:
        return bool(self.items) and self.items[-1].status == "in_progress"

    def _open(self, item: OutputItem) -> Iterator[ResponseEvent]:
        self.items.append(item)
        index = len(self.items) - 1
        shown = item.model_copy(deep=True)
        if not isinstance(shown, CallItem):
            shown.content = []
        yield self.event("output_item.added", output_index=index, item=shown)
        if not isinstance(item, CallItem):
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


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def as_chat(body: ResponsesBody) -> ChatBody:
    """The chat that a body asks for. Raises ApiError for what a chat has not."""
    if body.include and _LOGPROBS in body.include:
        raise _fault("include", f"{_LOGPROBS}: ask /v1/chat/completions for these")
    tools = None if body.tools is None else [_tool(at, t) for at, t in enumerate(body.tools)]
    fields = {
        "model": body.model,
        "messages": _messages(body),
        "tools": tools,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "max_tokens": body.max_output_tokens,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "on_short": body.on_short,
        "response_format": _response_format(body.text or {}),
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
    }
    return ChatBody.model_validate(fields)


_ITEM = frozenset({"type", "id", "status"})
_OF_ITEM = {
    "message": _ITEM | {"role", "content"},
    "reasoning": _ITEM | {"content", "summary"},
    "function_call": _ITEM | {"call_id", "name", "arguments", "parsed_arguments"},
    "function_call_output": _ITEM | {"call_id", "output"},
}
_OF_TOOL = ("name", "description", "parameters", "strict")


def _kind_of(item: Mapping[str, Any], where: str) -> Any:
    """The type of an item, whose fields are looked at."""
    kind = item.get("type", "message")
    if isinstance(kind, str) and kind in _OF_ITEM:
        require_known_fields(where, item, _OF_ITEM[kind])
    if kind == "reasoning" and item.get("summary"):
        raise _fault(f"{where}.summary", "is not read here; send content instead")
    return kind


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    reasoning = ""
    for index, item in enumerate(body.input):
        where = f"input[{index}]"
        match _kind_of(item, where):
            case "message":
                text = plain_text(item.get("content"), f"{where}.content")
                messages.append({"role": item.get("role"), "content": text})
            case "reasoning":
                reasoning = plain_text(item.get("content"), f"{where}.content")
                continue
            case "function_call":
                _add_call(messages, item, where)
            case "function_call_output":
                known = {"role": "tool", "tool_call_id": _call_id(item.get("call_id"))}
                text = plain_text(item.get("output"), f"{where}.output")
                messages.append({**known, "content": text})
            case other:
                raise _fault(where, f"type {other!r:.40} is not known here; leave it out")
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    if not messages:
        raise _fault("input", "must hold at least one item")
    return messages


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Add a call to the last message if that is the assistant's, else to a new message."""
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    if not all(isinstance(value, str) for value in function.values()):
        raise _fault(where, "must have a name and arguments, both str")
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call = {"id": _call_id(item.get("call_id")), "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _call_id(value: object) -> object:
    """The call's id as the chat template knows it, without this endpoint's prefix."""
    return value.removeprefix("call_") if isinstance(value, str) else value


def _tool(index: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = tool.get("type")
        raise _fault(f"tools[{index}].type", f"{kind!r:.40}: only function tools run here")
    require_known_fields(f"tools[{index}]", tool, ("type", *_OF_TOOL))
    return {"type": "function", "function": {n: tool[n] for n in _OF_TOOL if n in tool}}


def _tool_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function":
        require_known_fields("tool_choice", choice, ("type", "name"))
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: Mapping[str, Any]) -> dict[str, Any] | None:
    require_known_fields("text", text, ("format",))
    wanted = text.get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise _fault("text.format", 'must be an object such as {"type": "json_object"}')
    if wanted.get("type") == "json_schema" and wanted.get("schema") is None:
        raise _fault("text.format.schema", "must be a JSON schema")
    return dict(wanted)


def _fault(param: str, reason: str) -> ApiError:
    return invalid_value(f"{param}: {reason}", param)
