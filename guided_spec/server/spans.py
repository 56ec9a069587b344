"""A span of OpenTelemetry for each request that generates, where that package is installed.

Attributes have the names of the semantic conventions for generative AI, and ours where these have
none. Nothing is computed unless a tracer records: the tracer provider is the process's to set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from guided_spec.server.metrics import Tally
from guided_spec.types import SamplingParams

if TYPE_CHECKING:
    from opentelemetry.trace import Span

try:
    from opentelemetry import propagate, trace
except ModuleNotFoundError:
    _IS_INSTALLED = False
else:
    _IS_INSTALLED = True

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
}
_OWN_FAULT = 500  # the first status of those that are the server's fault


class RequestSpan:
    """Records attributes of one request; nothing without a span, or if it is not recording.

    operation: by the semantic conventions.
    """

    def __init__(self, operation: str = "", span: Span | None = None) -> None:
        self._operation = operation
        self._span = span if span is not None and span.is_recording() else None

    def record_request(self, model: str, *, is_streamed: bool) -> None:
        """Record what was asked for. model: as the request calls it."""
        if self._span is not None:
            self._span.update_name(f"{self._operation} {model}")
            self._record({"gen_ai.request.model": model, "gen_ai.request.stream": is_streamed})

    def record_params(self, params: SamplingParams) -> None:
        """Record the sampling parameters, including defaults of the model."""
        if self._span is None:
            return
        sampled = {
            "choice.count": params.n,
            "frequency_penalty": params.frequency_penalty,
            "max_tokens": params.max_tokens,
            "presence_penalty": params.presence_penalty,
            "seed": params.seed,
            "stop_sequences": tuple(params.stop),
            "temperature": params.temperature,
            "top_k": params.top_k,
            "top_p": params.top_p,
        }
        grammar = params.grammar
        is_json = grammar is not None and grammar.is_json
        self._record({f"gen_ai.request.{name}": value for name, value in sampled.items()})
        self._record({"gen_ai.output.type": "json" if is_json else "text"})
        self._record({"guided_spec.grammar": None if grammar is None else grammar.kind})

    def record_outcome(self, model: str, tally: Tally) -> None:
        """Record what it got so far. model: as replies call it."""
        if self._span is None:
            return
        usage = {
            "input_tokens": tally.prompt_tokens,
            "output_tokens": tally.output_tokens,
            "cache_read.input_tokens": tally.cached_tokens,
        }
        self._record({f"gen_ai.usage.{name}": value for name, value in usage.items()})
        response = {
            "model": model,
            "finish_reasons": tuple(tally.finish_reasons),
            "time_to_first_chunk": tally.first_seconds,
        }
        self._record({f"gen_ai.response.{name}": value for name, value in response.items()})
        own = {
            "steps": tally.steps,
            "drafted_tokens": tally.drafted_tokens,
            "accepted_tokens": tally.accepted_tokens,
        }
        self._record({f"guided_spec.{name}": value for name, value in own.items()})

    def record_status(self, status: int, code: str | None = None) -> None:
        """Record how it ended; 499: the client left. code: of an error that ends a stream."""
        if self._span is None:
            return
        if code is None:
            self._record({"http.response.status_code": status})
        if status >= 400:
            self._record({"error.type": code or str(status)})
        if status >= _OWN_FAULT:
            self._span.set_status(trace.StatusCode.ERROR)

    def _record(self, values: Mapping[str, Any]) -> None:
        assert self._span is not None
        self._span.set_attributes({name: v for name, v in values.items() if v not in (None, ())})


_SILENT = RequestSpan()
_CURRENT: ContextVar[RequestSpan] = ContextVar("request_span", default=_SILENT)


def current_span() -> RequestSpan:
    """The span of the request that is being served."""
    return _CURRENT.get()


@contextmanager
def open_span(path: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
    """The span of a request to ``path``, current inside; a silent one if it generates nothing.

    Its parent is the span that a framework has opened for the request, else the one that the
    header ``traceparent`` names.
    """
    operation = _OPERATIONS.get(path)
    if operation is None or not _IS_INSTALLED:
        yield _SILENT
        return
    is_inner = trace.get_current_span().get_span_context().is_valid
    tracer = trace.get_tracer("guided_spec.server")
    with tracer.start_as_current_span(
        operation,
        context=None if is_inner else propagate.extract(headers),
        kind=trace.SpanKind.INTERNAL if is_inner else trace.SpanKind.SERVER,
        attributes={"gen_ai.operation.name": operation, "gen_ai.provider.name": "guided_spec"},
    ) as span:
        opened = RequestSpan(operation, span)
        token = _CURRENT.set(opened)
        try:
            yield opened
        finally:
            _CURRENT.reset(token)
