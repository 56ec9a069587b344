"""``/v1/completions``: texts that continue prompts, whole or as a stream."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, NamedTuple

from guided_spec.engine.outputs import Chunk, Completion
from guided_spec.server.endpoints.bodies import CompletionBody
from guided_spec.server.endpoints.chat import finish_reason
from guided_spec.server.endpoints.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    CountedCompletionReply,
    SampleTraces,
    TextOffsets,
    Usage,
    completion_logprobs,
)
from guided_spec.server.endpoints.sampling import AskedGrammar, asked_grammar, sampling_params
from guided_spec.server.faults import invalid_value
from guided_spec.server.metrics import Tally
from guided_spec.server.service import Service
from guided_spec.server.spans import current_span
from guided_spec.server.streaming import event
from guided_spec.types import SamplingParams, TokenLogprobs

_OPENAIS_MAX_TOKENS = 16  # of free text where the request does not say


class _Asked(NamedTuple):
    """A grammar, and the parameters that hold it."""

    grammar: AskedGrammar
    params: SamplingParams


class CompletionHandler:
    """One request of the endpoint. Raises ApiError for one that cannot be served."""

    def __init__(self, service: Service, body: CompletionBody) -> None:
        self._service = service
        self._body = body
        self._tally = Tally(service.metrics)
        self._traces = SampleTraces(service, body.trace)
        self._prompts = _listed(body.prompt)
        self._n = body.n or 1
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)  # of each choice
        self._piece = CountedCompletionReply if body.includes_usage else CompletionReply
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": service.shown_name(body.model),
        }
        service.require_model(body.model)
        asked = body.model or service.model_name
        current_span().record_request(asked, is_streamed=bool(body.stream))
        service.require_samples(self._n * len(self._prompts))
        if body.best_of not in (None, self._n):
            _refuse("best_of", body.best_of, "this server takes none but n")
        if body.echo and body.logprobs is not None:
            _refuse("logprobs", body.logprobs, "a prompt has none here; leave echo out")

    async def whole(self) -> CompletionReply:
        """The whole reply, once it is complete."""
        found: dict[int, CompletionChoice] = {}
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                if chunk.completion is not None:
                    at = self._index(chunk)
                    found[at] = self._choice(at, chunk.completion)
        choices = [found[at] for at in sorted(found)]
        return CompletionReply.model_validate(
            {**self._head, "choices": choices, "usage": self._usage}
        )

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The reply as server-sent events, as it is generated."""
        async with aclosing(self._chunks()) as chunks:
            async for chunk in chunks:
                yield self._event(chunk)
        if self._body.includes_usage:
            fields = {**self._head, "choices": [], "usage": self._usage}
            yield event(self._piece.model_validate(fields))

    @property
    def _usage(self) -> Usage:
        return Usage.of(self._tally)

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        service, body = self._service, self._body
        with service.admission.enter(self._n * len(self._prompts)):
            asked, params = await service.workers.run(self._prepare)
            encoded = await service.encode(self._prompts, "prompt")
            self._tally.count_prompts(encoded)
            # Only the text itself can be echoed as it was.
            prompts: Sequence[Any] = self._prompts if body.echo else encoded
            is_traced = body.trace is not None
            args = (prompts, params, asked.param, self._tally)
            stream = service.chunks(*args, is_traced=is_traced)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    yield chunk

    def _prepare(self) -> _Asked:
        """What is asked for; not on the event loop, for a schema may be long."""
        service, body = self._service, self._body
        asked = asked_grammar(body, service.settings.max_schema_bytes)
        wanted = body.max_tokens
        if wanted is None and asked.spec is None:
            wanted = _OPENAIS_MAX_TOKENS
        limit = service.max_tokens(wanted, "max_tokens")
        params = sampling_params(body, service.defaults(body.model), limit)
        return _Asked(asked, replace(params, grammar=asked.spec))

    def _index(self, chunk: Chunk) -> int:
        return chunk.prompt_index * self._n + chunk.sample_index

    def _choice(self, index: int, completion: Completion) -> CompletionChoice:
        tokens = completion.logprobs
        return CompletionChoice(
            index=index,
            text=completion.text,
            logprobs=None if tokens is None else self._logprobs(index, tokens),
            finish_reason=finish_reason(completion.finish_reason),
            trace=self._traces.whole(index, completion),
        )

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> CompletionLogprobs:
        return completion_logprobs(self._service, tokens, self._offsets[index])

    def _event(self, chunk: Chunk) -> bytes:
        index, last = self._index(chunk), chunk.completion
        choice = CompletionChoice(
            index=index,
            text=chunk.text,
            logprobs=self._logprobs(index, chunk.logprobs) if chunk.logprobs else None,
            finish_reason=None if last is None else finish_reason(last.finish_reason),
            trace=self._traces.piece(index, chunk),
        )
        return event(self._piece.model_validate({**self._head, "choices": [choice]}))


def _listed(prompt: str | list[str] | list[int] | list[list[int]]) -> Sequence[Any]:
    """The prompts of a request, one or more."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        _refuse("prompt", prompt, "must hold at least one prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


def _refuse(param: str, value: object, fix: str) -> None:
    message = f"{param}={value!r:.80}: {fix}"
    raise invalid_value(message, param)
