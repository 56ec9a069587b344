"""The description of the interface: it is whole, and what is drawn from it does no harm."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from tests.server.running import Running
from tests.tiers import examples

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize")


def test_it_names_every_path(served: Running) -> None:
    described = httpx.get(f"{served.url}/openapi.json").json()
    assert {*PATHS, "/health", "/metrics", "/v1/models"} <= described["paths"].keys()
    for path in PATHS:
        body = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert "$ref" in body["schema"]


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_drawn_requests(served: Running, path: str) -> None:
    """An answer as described, or an error of the client's: never one of the server's."""
    schemathesis: Any = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operation = schema[path]["POST"]
    lengths = ("max_tokens", "max_completion_tokens", "max_output_tokens")

    @settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        if isinstance(case.body, dict) and path != "/tokenize":
            # Texts of thousands of tokens test nothing more.
            name = lengths[2] if path == "/v1/responses" else lengths[0]
            case.body = {**case.body, name: 4}
            case.body |= dict.fromkeys(case.body.keys() & {*lengths}, 4)
        reply = case.call(timeout=60)
        assert reply.status_code < 500, reply.text
        case.validate_response(reply, checks=[schemathesis.checks.not_a_server_error])

    run()
    served.require_service()
