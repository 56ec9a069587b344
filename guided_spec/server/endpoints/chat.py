"""``/v1/chat/completions``: one conversation's answers, whole or as a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

from guided_spec.engine.chat import (
    ChatChunk,
    ChatCompletion,
    ChatOptions,
    ChatRequest,
    ChatStream,
    ToolCallDelta,
)
from guided_spec.engine.chats.messages import num_letters, read_messages
from guided_spec.engine.outputs import Chunk, Completion
from guided_spec.errors import PromptError
from guided_spec.grammar.tools.custom import INPUT, custom_names
from guided_spec.grammar.tools.format import ToolCall
from guided_spec.server.endpoints.bodies import ChatBody
from guided_spec.server.endpoints.custom_calls import CustomCalls
from guided_spec.server.endpoints.messages import style_variables, template_variables
from guided_spec.server.endpoints.replies import (
    CallDelta,
    CallFunction,
    CallReply,
    ChatChoice,
    ChatChunkChoice,
    ChatChunkReply,
    ChatReply,
    CountedChatChunkReply,
    CustomCall,
    CustomCallReply,
    Delta,
    FinishReason,
    MessageReply,
    SampleTraces,
    TraceReply,
    Usage,
    chat_logprobs,
)
from guided_spec.server.endpoints.sampling import asked_grammar, require_length, sampling_params
from guided_spec.server.faults import ApiError, api_error, named_as_sent
from guided_spec.server.metrics import Tally
from guided_spec.server.picture_room import HeldPictures
from guided_spec.server.service import Service
from guided_spec.server.spans import current_span
from guided_spec.server.streaming import event


class _Prompt(NamedTuple):
    """A request, its tokens and pictures, and the argument that errors of its grammar are about."""

    request: ChatRequest
    token_ids: list[int]
    held: HeldPictures
    param: str | None


class ChatRun:
    """One conversation in the engine, for any endpoint."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self._service = service
        self._body = body
        self._tally = Tally(service.metrics)
        self.num_samples = body.n or 1
        service.require_model(body.model)
        asked = body.model or service.model_name
        current_span().record_request(asked, is_streamed=bool(body.stream))
        service.require_samples(self.num_samples)

    async def requests(self) -> AsyncGenerator[tuple[ChatRequest, Chunk], None]:
        """What is generated. Raises ApiError."""
        is_new = self._body.max_completion_tokens is not None
        with named_as_sent({"max_tokens": "max_completion_tokens"} if is_new else {}):
            async with aclosing(self._requests()) as found:
                async for one in found:
                    yield one

    async def count_tokens(self) -> int:
        """The tokens of the prompt, which nothing is generated for. Raises ApiError."""
        with self._service.admission.hold(1):
            prompt = await self._prompt()
            prompt.held.release()
            return len(prompt.token_ids)

    async def _requests(self) -> AsyncGenerator[tuple[ChatRequest, Chunk], None]:
        service = self._service
        with service.admission.enter(self.num_samples):
            request, token_ids, held, param = await self._prompt()
            self._tally.count_prompts([token_ids])
            is_traced = self._body.trace is not None
            args = ([request.prompt], request.params, param, self._tally)
            stream = service.chunks(*args, is_traced=is_traced)
            try:
                async with aclosing(stream) as chunks:
                    async for chunk in chunks:
                        held.see(chunk)
                        yield request, chunk
            except ApiError as fault:
                fault.param = _place(fault.owner, self._body.tools or []) or fault.param
                raise
            finally:
                held.release()

    async def _prompt(self) -> _Prompt:
        service, body = self._service, self._body
        max_bytes = service.settings.max_schema_bytes
        asked = await service.workers.run(lambda: asked_grammar(body, max_bytes))
        async with service.room.turn(body.messages):
            try:
                request = await service.workers.run_out(lambda: self._prepare(asked.spec))
            except PromptError as error:
                raise api_error(error, "messages") from error
            (token_ids,) = await service.encode([request.prompt], "messages")
            held = HeldPictures(service.room, request.pictures, self.num_samples)
        # Of both the message names the one that is at fault.
        named = {asked.param, "tools" if body.tools else None} - {None}
        return _Prompt(request, token_ids, held, named.pop() if len(named) == 1 else None)

    @property
    def usage(self) -> Usage:
        """Tokens of the request so far."""
        return Usage.of(self._tally)

    def _prepare(self, grammar: Any) -> ChatRequest:
        """Render and encode the conversation; not on the event loop, for it may be long."""
        service, body = self._service, self._body
        wanted, param = body.max_completion_tokens, "max_completion_tokens"
        if wanted is None:
            wanted, param = body.max_tokens, "max_tokens"
        limit = service.max_tokens(wanted, param)
        variables = style_variables(body.reasoning_effort, body.verbosity, service.template)
        variables |= template_variables(body.chat_template_kwargs, service.template_arguments)
        options: ChatOptions = {
            "params": sampling_params(body, service.defaults(body.model), limit),
            "chat_template_kwargs": variables,
            "tool_format": service.settings.tool_format,
        }
        if grammar is not None:
            options["response_format"] = grammar
        if body.tool_choice is not None:
            options["tool_choice"] = body.tool_choice
        if body.parallel_tool_calls is not None:
            options["parallel_tool_calls"] = body.parallel_tool_calls
        if body.tools:
            require_length(json.dumps(body.tools), service.settings.max_schema_bytes, "tools")
        messages = read_messages(body.messages, service.template, service.picture_rules)
        service.require_length(num_letters(messages), "messages", unit="characters")
        return service.llm.prepare_chat(messages, body.tools or None, **options)


def _place(owner: Sequence[str], tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Where in a body the grammar is that an error is about; None where the error does not say."""
    match owner:
        case ["the response_format"]:
            return "response_format"
        case ["the tool", name, *inner]:
            for at, tool in enumerate(tools):
                kind = tool.get("type")
                described = tool.get(kind) if isinstance(kind, str) else None
                if isinstance(described, Mapping) and described.get("name") == name:
                    rest = "".join(f".properties.{key}" for key in inner[1:])
                    part = "format.grammar.definition" if kind == "custom" else f"parameters{rest}"
                    return f"tools[{at}].{kind}.{part}"
    return None


class ChatHandler:
    """One request of the endpoint. Raises ApiError for one that cannot be served."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self._service = service
        self._body = body
        self._run = ChatRun(service, body)
        self._custom_names = custom_names(body.tools)
        self._customs: dict[int, CustomCalls] = {}
        self._traces = SampleTraces(service, body.trace)
        self._piece = CountedChatChunkReply if body.includes_usage else ChatChunkReply
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.shown_name(body.model),
        }

    async def whole(self) -> ChatReply:
        """The whole reply, once it is complete."""
        found: dict[int, ChatChoice] = {}
        async with aclosing(self._run.requests()) as chunks:
            async for request, chunk in chunks:
                if chunk.completion is not None:
                    at = chunk.sample_index
                    answer = request.read_sample(chunk.completion, at)
                    found[at] = self._choice(at, answer, chunk.completion)
        choices = [found[at] for at in sorted(found)]
        return ChatReply.model_validate(
            {**self._head, "choices": choices, "usage": self._run.usage}
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events, as it is generated."""
        streams: dict[int, ChatStream] = {}
        async with aclosing(self._run.requests()) as chunks:
            async for request, chunk in chunks:
                at = chunk.sample_index
                if at not in streams:
                    streams[at] = ChatStream(request, at)
                    self._customs[at] = CustomCalls(self._body.tools)
                    yield self._event(at, Delta(role="assistant", content=""))
                trace = self._traces.piece(at, chunk)
                for piece in self._pieces(streams[at].feed(chunk), trace):
                    yield piece
        if self._body.includes_usage:
            fields = {**self._head, "choices": [], "usage": self._run.usage}
            yield event(self._piece.model_validate(fields))

    def _choice(self, index: int, answer: ChatCompletion, completion: Completion) -> ChatChoice:
        calls = [self._call(call) for call in answer.tool_calls]
        content = None if calls and not answer.text else answer.text
        message = MessageReply(
            content=content, reasoning_content=answer.reasoning, tool_calls=calls or None
        )
        logprobs = completion.logprobs
        return ChatChoice(
            index=index,
            message=message,
            logprobs=None if logprobs is None else chat_logprobs(self._service, logprobs),
            finish_reason=finish_reason(answer.finish_reason),
            trace=self._traces.whole(index, completion),
        )

    def _call(self, call: ToolCall) -> CallReply | CustomCallReply:
        if call.name in self._custom_names:
            custom = CustomCall(name=call.name, input=call.arguments[INPUT])
            return CustomCallReply(id=call.id, custom=custom)
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        return CallReply(id=call.id, function=CallFunction(name=call.name, arguments=arguments))

    def _call_delta(self, sample: int, piece: ToolCallDelta) -> CallDelta:
        text, name = self._customs[sample].feed(piece), piece.name or None
        return CallDelta(
            index=piece.call_index,
            id=piece.id or None,
            type=None if name is None else "function" if text is None else "custom",
            function=CallFunction(name=name, arguments=piece.arguments) if text is None else None,
            custom=None if text is None else CustomCall(name=name, input=text),
        )

    def _pieces(self, chunk: ChatChunk, trace: TraceReply | None) -> list[bytes]:
        calls = [
            self._call_delta(chunk.sample_index, piece)
            for piece in chunk.tool_calls
            if piece.name or piece.arguments
        ]
        delta = Delta(
            content=chunk.text or None,
            reasoning_content=chunk.reasoning or None,
            tool_calls=calls or None,
        )
        pieces = []
        if delta.model_dump() or chunk.logprobs or trace is not None:
            tokens = chunk.logprobs
            logprobs = chat_logprobs(self._service, tokens) if tokens else None
            pieces.append(self._event(chunk.sample_index, delta, logprobs=logprobs, trace=trace))
        if chunk.completion is not None:
            reason = finish_reason(chunk.completion.finish_reason)
            pieces.append(self._event(chunk.sample_index, Delta(), finish_reason=reason))
        return pieces

    def _event(self, index: int, delta: Delta, **fields: Any) -> bytes:
        choice = ChatChunkChoice(index=index, delta=delta, **fields)
        return event(self._piece.model_validate({**self._head, "choices": [choice]}))


def finish_reason(reason: str) -> FinishReason:
    """In OpenAI's words. The engine's "error" never comes here: it is raised before."""
    match reason:
        case "length":
            return "length"
        case "tool_calls":
            return "tool_calls"
    return "stop"
