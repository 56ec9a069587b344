"""``guided-spec serve``: its options become settings, and a missing extra is one sentence."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from guided_spec.cli.main import app
from guided_spec.cli.serve import engine_interpreter, start_lines
from guided_spec.errors import ConfigError
from guided_spec.grammar.isolation import Interpreter
from guided_spec.server.service import ServerSettings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be served: how to load the model, the settings, the host and its sockets."""
    calls: list[Any] = []
    monkeypatch.setattr("guided_spec.cli.serve._serve", lambda *given: calls.extend(given))
    monkeypatch.setattr("guided_spec.cli.serve.bound", lambda site: nullcontext([site.port]))
    monkeypatch.setattr("guided_spec.cli.serve.engine_interpreter", nullcontext)
    return calls


def serve(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, ["serve", *arguments], env=environment)


def test_defaults(started: list[Any]) -> None:
    assert serve().exit_code == 0
    arguments, settings, host, sockets = started
    assert settings == ServerSettings()
    assert (host, sockets) == ("127.0.0.1", [8000])
    assert not {"model", "max_batch_size"} & arguments.keys()


def test_options(started: list[Any]) -> None:
    given = ["--model", "a/b", "-k", "3", "--port", "0", "--max-queue", "0", "--body-seconds", "2"]
    given += ["--kv-memory-bytes", "4096", "--kv-dtype", "fp8"]
    assert serve(*given, GUIDED_SPEC_API_KEY="one two").exit_code == 0
    arguments, settings, _, sockets = started
    assert (arguments["kv_memory_bytes"], arguments["kv_dtype"]) == (4096, "fp8")
    assert (arguments["model"], arguments["num_draft_tokens"], sockets) == ("a/b", 3, [0])
    expected: dict[str, Any] = {"model_names": ("a/b",), "api_keys": ("one", "two")}
    assert settings == ServerSettings(**expected, max_queue=0, body_seconds=2.0)
    started.clear()
    assert serve("--model", "a/b", "--served-model-name", "c", "--api-key", "k").exit_code == 0
    assert (started[1].model_names, started[1].api_keys) == (("c",), ("k",))


def test_adapters(started: list[Any]) -> None:
    given = ["--lora-modules", "sql=a/b", "--lora-modules", "fr=./c=d"]
    assert serve(*given).exit_code == 0
    assert started[0]["loras"] == {"sql": "a/b", "fr": "./c=d"}
    started.clear()
    assert serve().exit_code == 0
    assert "loras" not in started[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sql"], "--lora-modules='sql': must be NAME=PATH"),
        (["=a"], "--lora-modules='=a': must be NAME=PATH"),
        (["sql="], "--lora-modules='sql=': must be NAME=PATH"),
        (["a=b", "--lora-modules", "a=c"], "--lora-modules='a=c': a is there already"),
        (["m=b", "--model", "m"], "--lora-modules='m': the model is called so"),
        (["a=b", "--engine", "vllm"], "--lora-modules=['a']: adapters of requests need"),
    ],
)
@pytest.mark.every_case
def test_adapters_that_are_refused(started: list[Any], arguments: list[str], said: str) -> None:
    result = serve("--lora-modules", *arguments)
    assert not started
    assert result.exit_code == 1
    assert said in result.stderr.replace("\n", " ")


def test_mistakes(started: list[Any]) -> None:
    for arguments, reason in (
        (("--max-samples", "0"), "--max-samples=0"),
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


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What would be run in place of this program."""
    calls: list[Any] = []
    monkeypatch.setattr("guided_spec.integrations.vllm.arguments.run", calls.append)
    monkeypatch.delenv("GUIDED_SPEC_VLLM", raising=False)
    return calls


def test_vllms_own_server(executed: list[Any]) -> None:
    given = ["--engine", "vllm", "--model", "a/b", "--draft", "a/head", "--proposer", "eagle3"]
    given += ["-k", "3", "--port", "81", "--max-batch-size", "9", "--dtype", "bfloat16"]
    given += ["--kv-memory-bytes", "4096"]
    options = '{"enforce_eager": true, "enable_lora": false, "lora_target_modules": ["a", "b"], '
    given += ["--engine-options", options + '"tensor_parallel_size": 2}']
    assert serve(*given, GUIDED_SPEC_API_KEY="secret").exit_code == 0
    (command,) = executed
    assert command.variables == {
        "GUIDED_SPEC_VLLM": "counts,drafts,endings,graphs,schemas",
        "VLLM_API_KEY": "secret",
    }
    text = " ".join(command.arguments)
    assert text.startswith("-m vllm.entrypoints.cli.main serve a/b --")
    for part in (
        "--max-num-seqs 9",
        "--dtype bfloat16",
        "--kv-cache-memory-bytes 4096",
        "--host 127.0.0.1 --port 81 --served-model-name a/b",
        "--enforce-eager",
        "--no-enable-lora",
        "--tensor-parallel-size 2",
        "--lora-target-modules a b",
        '"num_speculative_tokens": 3',
        '{"disable_any_whitespace": true, "backend": "xgrammar"}',
    ):
        assert part in text
    assert "secret" not in text


def test_vllms_server_has_options_of_its_own(executed: list[Any]) -> None:
    for arguments, reason in (
        (("--max-queue", "3"), "--max-queue=3: vLLM's server has no such option"),
        (("--tool-format", "hermes"), "--tool-format='hermes'"),
        (("--device", "cpu"), "CUDA_VISIBLE_DEVICES"),
        (("--engine-options", "["), "is not valid JSON"),
        (("--engine-options", "[]"), "must be a JSON object"),
        (("--api-key", "a", "--api-key", "b"), "vLLM takes one from the environment"),
    ):
        result = serve("--engine", "vllm", *arguments)
        assert result.exit_code != 0
        assert reason in " ".join(result.output.split())
    assert serve("--engine", "vllm", "--no-playground").exit_code == 0
    assert "serve" in executed[0].arguments
    assert "must be one of guided_spec, vllm" in " ".join(serve("--engine", "x").output.split())
    assert "leave them out" in " ".join(serve("--engine-options", "{}").output.split())


def test_vllm_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("guided_spec.integrations.vllm.plugin.installed_root", lambda: None)
    result = serve("--engine", "vllm")
    assert result.exit_code != 0
    assert "vLLM is not installed: pip install vllm" in " ".join(result.output.split())


def test_it_says_what_runs_and_where() -> None:
    settings = ServerSettings(model_names=("big", "small"))
    lines = list(start_lines("LLM('m')", settings, "127.0.0.1", 8000))
    assert lines == [
        "LLM('m') as big, small",
        "OpenAI's clients: base_url http://127.0.0.1:8000/v1; Anthropic's: http://127.0.0.1:8000",
        "playground: http://127.0.0.1:8000/",
    ]
    assert list(start_lines("LLM('m')", settings, "::1", 8)).pop() == "playground: http://[::1]:8/"
    quiet = replace(settings, playground=False)
    assert len(list(start_lines("LLM('m')", quiet, "::1", 8))) == 2
    assert len(list(start_lines("LLM('m')", settings, "::1", 0))) == 1  # the log says where


def test_the_engines_process_ends_where_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started first, so that it imports what it needs meanwhile."""
    monkeypatch.setattr("guided_spec.engine.PROGRAM", "import time; time.sleep(99)")
    kept: list[Interpreter] = []

    def fail() -> None:
        with engine_interpreter() as started:
            kept.append(started)
            assert started.process.poll() is None
            raise ConfigError("a", "b", "c")

    with pytest.raises(ConfigError):
        fail()
    assert kept[0].process.poll() is not None
    assert kept[0].connection.closed
