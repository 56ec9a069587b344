"""What a command says of a mistake is in its own words: options, not arguments of Python."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from guided_spec.cli.main import app
from guided_spec.cli.options import ModelOptions
from guided_spec.cli.words import (
    grammar_option,
    log_as_spoken,
    option_names,
    running,
    spoken,
    told,
)
from guided_spec.errors import (
    BudgetTooSmallError,
    ConfigError,
    GrammarCompileError,
    TextCutShortError,
)
from guided_spec.server.listening import bind, close, listen

GROUP: Any = typer.main.get_command(app)
GENERATE = option_names(GROUP.commands["generate"])


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("draft=None: eagle3 drafts with a model", "--draft=None: eagle3 drafts with a model"),
        ("x: y; pass draft= the head's folder", "x: y; pass --draft the head's folder"),
        (
            "it is long: shorten it, or raise max_model_len",
            "it is long: shorten it, or raise --max-m",
        ),
        ("prompt='': it has no tokens", "PROMPT='': it has no tokens"),
        ("a: b, or pass complete=False", "a: b"),
        ('no: use another, or pass chat_template_kwargs={"chat_template": ...}', "no: use another"),
        ("no: it is another's; pass tokenizer= the model's own", "no: it is another's"),
        ("no: pass text, or pass chat_template_kwargs={...} to chat", "no: pass text"),
        ("code; pass trust_remote_code=True if so", "code; pass --trust-remote-code if so"),
        ("max_tokens=3: allow more", "--max-tokens=3: allow more"),
        ("loras['a[0]']='a[0]': it has none", "--lora='a[0]': it has none"),
        ("loras['a']='a/b': it has none", "--lora-modules='a/b': it has none"),
        ("/a/draft=b and 'model=c' stay", "/a/draft=b and 'model=c' stay"),
    ],
)
def test_arguments_become_options(message: str, expected: str) -> None:
    assert spoken(message, GENERATE).startswith(expected)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "A", "--choice", ""], "--choice='': each option"),
        (["generate", "A", "--proposer", "eagl3"], "--proposer='eagl3': must be one of"),
        (["generate", "A", "--proposer", "eagl3"], "did you mean eagle3?"),
        (
            ["generate", "A", "--device", "cpu", "--device-map", "auto"],
            "--device-map='auto': cannot",
        ),
        (["bench", "--proposers", "ngrm"], "--proposers='ngrm'"),
        (["serve", "--allowed-host", ""], "--allowed-host=''"),
        (["serve", "--max-queue", "-1"], "--max-queue=-1"),
        (["train", "--algorithm", "eagl"], "--algorithm='eagl': must be one of"),
        (["train", "--algorithm", "eagl"], "did you mean eagle?"),
        (["generate", "A", "--regex", "("], "--regex='(': missing )"),
        (["generate", "--image", "no.png", "--model", "./none"], "--image='no.png': cannot be rea"),
        (
            ["trace", "--image", ".", "--model", "./none"],
            "--image='.': cannot be read: it is no file",
        ),
        (["serve", "--lora-modules", "a=./none"], "--lora-modules='./none': there is no such"),
        (["check", "-", "--grammar-backend", "xgramar"], "did you mean xgrammar?"),
    ],
)
def test_mistakes_before_a_model_is_loaded(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert said in " ".join(result.output.split())


@pytest.mark.every_case
@pytest.mark.parametrize("command", ["generate", "trace"])
@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.json", '{"type": "strnig"}', "not a JSON schema: at '/type': 'strnig' is no type"),
        ("a.json", '{"type": 5}', "not a JSON schema: at '/type': 5 is no type"),
        ("a.json", "{", "the json_schema is not JSON"),
        ("a.ebnf", 'root ::= "a', "the grammar does not compile: "),
        ("a.gbnf", "root ::= b", "the grammar does not compile: "),
        ("a.lark", 'start: "a', "the lark does not compile: "),
    ],
)
def test_a_broken_grammar_is_named_before_a_model_is_loaded(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    name: str,
    text: str,
    reason: str,
) -> None:
    monkeypatch.setattr(ModelOptions, "load", lambda *_, **__: pytest.fail("loaded"))
    path = tmp_path / name
    path.write_text(text)
    option = "--schema" if name == "a.json" else "--grammar"
    result = CliRunner().invoke(app, [command, "A", option, str(path), "--json"])
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "GrammarCompileError"
    assert error["message"].startswith(f"{option}='{path}': {reason}")


@pytest.fixture
def generating() -> Iterator[None]:
    token = running.set(GENERATE)
    yield
    running.reset(token)


@pytest.mark.usefixtures("generating")
def test_a_value_is_shown_as_it_is() -> None:
    error = ConfigError("regex", "max_tokens=(draft= )", "is broken, or raise max_tokens")
    assert told(error) == "--regex='max_tokens=(draft= )': is broken, or raise --max-tokens"
    assert told(ConfigError("other", 5, "pass max_tokens=3")) == "other=5: pass --max-tokens=3"


@pytest.mark.usefixtures("generating")
def test_a_picture_is_known_by_its_option() -> None:
    missing = ConfigError("messages[0].content[1].image", "a.png", "cannot be read")
    assert told(missing) == "--image='a.png': cannot be read"
    unread = ConfigError("messages[0].content[0].type", "image", "this model reads text")
    assert told(unread) == "--image: this model reads text"


@pytest.mark.usefixtures("generating")
def test_a_grammar_is_known_by_its_option() -> None:
    token = grammar_option.set("--regex='('")
    assert told(GrammarCompileError("regex '(': missing )")) == "--regex='(': missing )"
    assert told(GrammarCompileError("too large")) == "--regex='(': too large"
    grammar_option.reset(token)
    assert told(GrammarCompileError("too large")) == "too large"


@pytest.mark.usefixtures("generating")
@pytest.mark.every_case
@pytest.mark.parametrize("error", [BudgetTooSmallError(3, 9), TextCutShortError(3, 9)], ids=str)
def test_errors_of_a_text(error: Exception) -> None:
    said = told(error)
    assert said.startswith("--max-tokens=3: ")
    assert "complete=" not in said
    assert "on_short" not in said


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--text", "No such option: --text"),
        ("--modle", "No such option: --modle (Possible options: --model)"),
        ("--max-new-tokens", "No such option: --max-new-tokens (Possible options: --max-tokens)"),
        ("--json-schema", "No such option: --json-schema (Possible options: --schema)"),
        ("--guided-regex", "No such option: --guided-regex (Possible options: --regex)"),
        ("--model-path", "No such option: --model-path (Possible options: --model)"),
    ],
)
def test_options_that_are_near_enough(option: str, said: str) -> None:
    shown = CliRunner().invoke(app, ["generate", "--json", "A", option, "3"]).stdout
    assert json.loads(shown)["error"]["message"] == said


def test_the_log_is_in_these_words_too(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("guided_spec.engine.setup")
    with log_as_spoken(caplog.handler, GENERATE):
        logger.warning("Pass max_model_len for longer ones: %d", 3)
        logging.getLogger("other").warning("max_model_len")
    logger.warning("max_model_len")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["Pass --max-model-len for longer ones: 3", "max_model_len", "max_model_len"]


@pytest.fixture
def port() -> Iterator[int]:
    """One that somebody listens on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What has been loaded."""
    calls: list[Any] = []
    monkeypatch.setattr("guided_spec.engine.process.EngineProcess", lambda **o: calls.append(o))
    return calls


def test_a_port_in_use_shows_before_the_model_is_loaded(port: int, loaded: list[Any]) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", str(port)])
    said = " ".join(result.output.split())
    assert f"--port={port}: is in use on 127.0.0.1: end what listens there" in said
    assert (result.exit_code, loaded) == (1, [])


def test_a_host_that_is_not_here(loaded: list[Any]) -> None:
    for host in ("192.0.2.1", "no host", "a..b"):
        result = CliRunner().invoke(app, ["serve", "--host", host, "--port", "0"])
        said = " ".join(result.output.split())
        assert f"--host={host!r}: is no address of this machine" in said
        assert "0.0.0.0 for all networks" in said
        assert (result.exit_code, loaded) == (1, [])


def test_a_port_is_taken_from_the_beginning() -> None:
    (one,) = bind("127.0.0.1", 0)
    number = one.getsockname()[1]
    with pytest.raises(ConfigError, match=f"^port={number}: is in use"):
        bind("127.0.0.1", number)
    listen([one])
    with socket.create_connection(("127.0.0.1", number), timeout=9):
        close([one])
    close(bind("127.0.0.1", number))  # at once, although a connection was open


@pytest.mark.parametrize("arguments", [["--draft", "x"], []], ids=["unused", "missing"])
def test_a_command_names_its_options(arguments: list[str]) -> None:
    """Of a draft that nothing takes, and of one that is missing."""
    proposer = "ngram" if arguments else "eagle3"
    given = ["generate", "A", "--model", "/none", "--proposer", proposer, *arguments]
    said = " ".join(CliRunner().invoke(app, given).stderr.split())
    assert "--draft=" in said or "--model=" in said
    assert " draft=" not in said
    assert " model=" not in said
