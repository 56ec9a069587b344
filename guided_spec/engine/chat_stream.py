"""An answer that is read while it is written."""

from __future__ import annotations

import json
from typing import NamedTuple

from guided_spec.engine.chat import ChatCompletion, ChatRequest
from guided_spec.engine.outputs import Chunk, Completion
from guided_spec.grammar.tools.format import BegunText
from guided_spec.types import TokenLogprobs

__all__ = ["ChatChunk", "ChatStream", "ToolCallDelta"]


class ToolCallDelta(NamedTuple):
    """A piece of one call.

    call_index: of the call in the answer. id, name: on the call's first piece, "" on the others.
    arguments: what follows, as JSON text. A form of calls that is not JSON gives it in one piece.
    """

    call_index: int
    id: str
    name: str
    arguments: str


class ChatChunk(NamedTuple):
    """A piece of a streamed answer; the pieces, joined, are what ``chat`` returns.

    Only whitespace around the text may differ. A call that was cut off shows as its pieces up to
    there, and stays in the text of ``completion``.

    text, reasoning, tool_calls: what is certain since the last chunk.
    completion: on a sample's last chunk, the whole answer.
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
        self._tokens = request.reader.marks.reader()
        self._written = ""  # as the marks have read it
        self._sent_text = 0
        self._sent_reasoning = 0
        self._shown = self._shown_reasoning = ""
        self._sent_arguments: list[int] = []  # of each call that has begun
        self._token_ids: list[int] = []
        self._visible = 0

    def feed(self, chunk: Chunk) -> ChatChunk:
        """The answer's part of a chunk."""
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
        if not self._request.params.stop:
            self._written += self._tokens.feed(chunk.token_ids)
            return self._written
        # What a token holds behind the beginning of a stop string may not be shown.
        self._token_ids.extend(chunk.token_ids)
        self._visible += len(chunk.text)
        return self._request.reader.marks.read(self._token_ids, self._visible)

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
            if name or arguments:
                pieces.append(ToolCallDelta(index, call_id, name, arguments))
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
        calls = [
            ToolCallDelta(at, call.id, call.name, json.dumps(call.arguments, ensure_ascii=False))
            for at, call in enumerate(answer.tool_calls)
            if at >= sent
        ]
        return piece._replace(tool_calls=(*piece.tool_calls, *calls), completion=answer)


def _rest(text: str, shown: str) -> str:
    return text[len(shown) :] if text.startswith(shown) else ""
