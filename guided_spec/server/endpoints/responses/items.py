"""The items of a response while they are written, and the events that tell of them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from guided_spec.engine.chat_stream import ChatChunk, ToolCallDelta
from guided_spec.server.endpoints.responses.replies import (
    CallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
)

__all__ = ["ResponseItems"]

_NAMES = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseItems:
    """Takes chunks in, gives events out. One item is open at a time; another kind closes it."""

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
        """What a chunk brings."""
        if chunk.reasoning:
            self.reasoning_tokens += len(chunk.token_ids)
            yield from self._write("reasoning", chunk.reasoning)
        if chunk.text:
            yield from self._write("message", chunk.text)
        for piece in chunk.tool_calls:
            yield from self._write_call(piece)

    def end(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        """Close what is open. An answer that holds nothing is an empty message."""
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
        yield self.event(f"{_NAMES[kind]}.delta", **self._place(), **fields)

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
            yield self.event(kind, **self._place(), delta=piece.arguments)

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
            yield self.event("content_part.added", **self._place(), content_index=0, part=part)

    def _close(self, status: ItemStatus) -> Iterator[ResponseEvent]:
        if not self._is_unfinished():
            return
        item, place = self.items[-1], self._place()
        item.status = status
        if isinstance(item, CallItem):
            fields = {"arguments": item.arguments, "name": item.name}
            yield self.event("function_call_arguments.done", **place, **fields)
        else:
            part = item.content[0].model_copy()
            more: dict[str, Any] = {"logprobs": []} if isinstance(item, MessageItem) else {}
            kind = f"{_NAMES[item.type]}.done"
            yield self.event(kind, **place, content_index=0, text=part.text, **more)
            yield self.event("content_part.done", **place, content_index=0, part=part)
        yield self.event(
            "output_item.done", output_index=place["output_index"], item=item.model_copy(deep=True)
        )

    def _place(self) -> dict[str, Any]:
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
