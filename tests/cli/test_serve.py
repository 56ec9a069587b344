"""``guided-spec serve``: its options become settings, and a missing extra is one sentence."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from guided_spec.cli.main import app
from guided_spec.server.settings import ServerSettings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be served: how to load the model, the settings, host and port."""
    calls: list[Any] = []
    monkeypatch.setattr("guided_spec.cli.serve._serve", lambda *given: calls.extend(given))
    return calls


def serve(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments], env=environment)


def test_defaults(started: list[Any]) -> None:
    assert serve().exit_code == 0
    load, others, settings, host, port = started
    assert settings == ServerSettings()
    assert (host, port) == ("127.0.0.1", 8000)
    assert load.model is None
    assert others["max_batch_size"] == 16


def test_options(started: list[Any]) -> None:
    given = ["--model", "a/b", "-k", "3", "--port", "0", "--max-queue", "0", "--body-seconds", "2"]
    assert serve(*given, GUIDED_SPEC_API_KEY="one two").exit_code == 0
    load, _, settings, _, port = started
    assert (load.model, load.num_draft_tokens, port) == ("a/b", 3, 0)
    expected: dict[str, Any] = {"model_names": ("a/b",), "api_keys": ("one", "two")}
    assert settings == ServerSettings(**expected, max_queue=0, body_seconds=2.0)
    started.clear()
    assert serve("--model", "a/b", "--served-model-name", "c", "--api-key", "k").exit_code == 0
    assert (started[2].model_names, started[2].api_keys) == (("c",), ("k",))


def test_mistakes(started: list[Any]) -> None:
    for arguments, reason in (
        (("--max-samples", "0"), "max_samples=0"),
        (("--port", "-1"), "--port"),
    ):
        result = serve(*arguments)
        assert result.exit_code != 0
        assert reason in result.output
    assert started == []


@pytest.mark.parametrize("package", ["fastapi", "prometheus_client", "uvicorn"])
def test_without_the_extra(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.startswith("guided_spec.server.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    result = serve()
    assert result.exit_code == 1
    assert f"it needs {package}: pip install 'guided-spec[serve]'" in result.output
    assert started == []
