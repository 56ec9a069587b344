"""Each request that generates is a span, which says what was asked and what came of it."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import httpx
import pytest

import guided_spec.server
from guided_spec.server import spans
from guided_spec.server.metrics import Metrics, Tally
from tests.server.running import ASK, LONG, Contact, Running, until

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")
from opentelemetry import trace  # noqa: E402
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import (  # noqa: E402
    InMemorySpanExporter,
)
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes  # noqa: E402

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
SCHEMA = {"name": "contact", "schema": Contact.model_json_schema()}


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """The spans of this server alone: the process's provider stays unset."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter


def only(exporter: InMemorySpanExporter) -> ReadableSpan:
    """The one span, once it has ended: that is after the answer."""
    until(lambda: len(exporter.get_finished_spans()) > 0)
    (span,) = exporter.get_finished_spans()
    exporter.clear()
    return span


def told(span: ReadableSpan) -> dict[str, Any]:
    """Its attributes by their last names, for those of the conventions."""
    assert span.attributes is not None
    known = {v for k, v in vars(gen_ai_attributes).items() if k.startswith("GEN_AI_")}
    asked = {name for name in span.attributes if name.startswith("gen_ai.")}
    assert asked <= known
    return dict(span.attributes)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
def test_a_chat(served: Running, exporter: InMemorySpanExporter, *, is_streamed: bool) -> None:
    body: dict[str, Any] = {"messages": ASK, "temperature": 0.5, "seed": 7, "max_tokens": 90}
    body |= {"stop": ["\n\n"], "stream": is_streamed, "model": "bundled"}
    body["response_format"] = {"type": "json_schema", "json_schema": SCHEMA}
    before = served.metrics()
    reply = served.post(CHAT, body, headers=PARENT)
    after = served.metrics()
    span = only(exporter)
    assert (span.name, span.kind) == ("chat bundled", trace.SpanKind.SERVER)
    assert span.status.status_code is trace.StatusCode.UNSET
    parent = span.parent
    assert parent is not None
    assert (f"{parent.trace_id:032x}", f"{parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    found = told(span)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "bundled",
        "gen_ai.response.model": "bundled",
        "gen_ai.request.stream": is_streamed,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.request.max_tokens": 90,
        "gen_ai.request.stop_sequences": ("\n\n",),
        "gen_ai.output.type": "json",
        "gen_ai.response.finish_reasons": ("stop",),
        "guided_spec.grammar": "json_schema",
        "http.response.status_code": 200,
    }
    assert expected.items() <= found.items()
    for name, metric in (
        ("gen_ai.usage.input_tokens", "prompt_tokens"),
        ("gen_ai.usage.output_tokens", "output_tokens"),
        ("guided_spec.steps", "steps"),
    ):
        full = f"guided_spec_{metric}_total"
        assert found[name] == after[full] - before[full] > 0
    if not is_streamed:
        assert found["gen_ai.usage.output_tokens"] == reply.json()["usage"]["completion_tokens"]
    assert 0 < found["guided_spec.accepted_tokens"] <= found["guided_spec.drafted_tokens"]
    assert found["gen_ai.response.time_to_first_chunk"] > 0


@pytest.mark.parametrize(
    ("path", "body", "operation", "kind"),
    [
        (TEXT, {"prompt": "The name", "n": 2}, "text_completion", "text"),
        (RESPONSES, {"input": "Hello", "max_output_tokens": 4, "stream": True}, "chat", "text"),
    ],
)
def test_other_endpoints(
    served: Running, exporter: InMemorySpanExporter, path: str, body: Any, operation: str, kind: str
) -> None:
    assert served.post(path, body).status_code == 200
    span = only(exporter)
    found = told(span)
    assert span.parent is None
    assert span.name == f"{operation} bundled"
    assert found["gen_ai.output.type"] == kind
    assert found["gen_ai.request.stream"] is bool(body.get("stream"))
    assert len(found["gen_ai.response.finish_reasons"]) == body.get("n", 1)


def test_nothing_else_is_a_span(served: Running, exporter: InMemorySpanExporter) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/"):
        assert httpx.get(f"{served.url}{path}").status_code == 200
    served.post("/tokenize", {"prompt": "a"})
    assert exporter.get_finished_spans() == ()


def test_refusals(served: Running, exporter: InMemorySpanExporter) -> None:
    for body, status, name in (
        ({"prompt": "a", "model": "other"}, 404, "text_completion"),
        ({"prompt": "a", "guided_regex": "("}, 400, "text_completion bundled"),
    ):
        assert served.post(TEXT, body).status_code == status
        span = only(exporter)
        assert span.name == name
        assert told(span)["error.type"] == str(status)
        assert span.status.status_code is trace.StatusCode.UNSET, "the client's fault"


def test_a_fault_of_ours(
    served: Running, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("guided_spec.server.service.Service.max_tokens", fail)
    assert served.post(TEXT, {"prompt": "a"}).status_code == 500
    assert only(exporter).status.status_code is trace.StatusCode.ERROR


def test_a_client_that_leaves(served: Running, exporter: InMemorySpanExporter) -> None:
    body = {"prompt": "Hello", "stream": True, **LONG}
    with httpx.stream("POST", f"{served.url}{TEXT}", json=body) as reply:
        next(reply.iter_raw())
    found = told(only(exporter))
    assert found["error.type"] == "client_left"
    assert found["gen_ai.usage.output_tokens"] > 0
    assert "gen_ai.response.finish_reasons" not in found


def test_inside_of_a_frameworks_span(exporter: InMemorySpanExporter) -> None:
    framework_tracer = trace.get_tracer("a framework")
    with framework_tracer.start_as_current_span("POST") as outer, spans.open_span(TEXT, PARENT):
        pass
    inner, framework = exporter.get_finished_spans()
    assert inner.kind is trace.SpanKind.INTERNAL
    assert inner.parent == framework.get_span_context() == outer.get_span_context()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "guided_spec.server.spans")
    monkeypatch.setattr(guided_spec.server, "spans", None)  # an import sets it
    alone = importlib.import_module("guided_spec.server.spans")
    monkeypatch.undo()
    assert alone is not spans
    with alone.open_span(TEXT, PARENT) as span:
        span.record_request("bundled", is_streamed=False)
        span.record_status(500)
        span.record_outcome("bundled", Tally(Metrics(lambda: None)))  # type: ignore[arg-type, return-value]
        assert alone.current_span() is span
