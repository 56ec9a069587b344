"""The commands, run in this process on a tiny model folder."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import typer
from rich.console import Console
from rich.status import Status
from typer.testing import CliRunner, Result

import guided_spec
from guided_spec.bundled import bundled_asset
from guided_spec.cli.bench import DEFAULT_PROPOSERS
from guided_spec.cli.bench import _table as measurement_table
from guided_spec.cli.main import app
from guided_spec.errors import ModelError
from guided_spec.evaluate.measurement import Measurement
from guided_spec.models.loading import load_model
from tests.adapters import merged, write_adapter
from tests.tiny_llm import tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


# The module: in its package, the name is the command's.
GENERATE = sys.modules["guided_spec.cli.generate"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("grammars")
    texts = {
        "schema.json": json.dumps(SCHEMA),
        "broken.json": "{",
        "unsupported.json": json.dumps({"not": {"multipleOf": 2}}),
        "narrowed.json": json.dumps({"contains": {"type": "null"}}),
        "grammar.ebnf": 'root ::= "yes" | "no"',
        "grammar.lark": 'start: "left" | "right"',
        "latin1.json": "",
        "workload.jsonl": '{"prompt": "A", "regex": "a+"}\n{"prompt": "B", "choice": ["x"]}\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "latin1.json").write_bytes(b"\xff\xfe{")
    return {name: str(folder / name) for name in texts}


def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
    result = CliRunner().invoke(app, list(arguments), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def generate(model: str, *arguments: str) -> Result:
    return run("generate", "The name", "--model", model, "--max-tokens", "40", *arguments)


def json_lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_schema(model: str, files: dict[str, str]) -> None:
    result = generate(model, "--schema", files["schema.json"])
    assert result.exit_code == 0, result.stderr
    jsonschema.validate(json.loads(result.stdout), SCHEMA)
    assert result.stdout.count("\n") == 1  # the text and nothing else
    for row in ("finish reason", "target forwards", "tokens per forward", "mask time"):
        assert row in result.stderr
    assert "chain:grammar_forced+ngram" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        (("--regex", "[0-9]{3}-[a-z]{2}"), r"[0-9]{3}-[a-z]{2}\n"),
        (("--choice", "left", "--choice", "right"), r"(left|right)\n"),
        (("--grammar", "grammar.ebnf"), r"(yes|no)\n"),
        (("--grammar", "grammar.lark"), r"(left|right)\n"),
        (("--regex", "[a-c]{20}", "--stop", "b", "--temperature", "1", "--seed", "3"), r"[ac]*\n"),
        (("--regex", "a{9}", "--proposer", "none", "-k", "2"), r"a{9}\n"),
    ],
)
def test_grammars(
    model: str, files: dict[str, str], arguments: tuple[str, ...], pattern: str
) -> None:
    result = generate(model, *(files.get(argument, argument) for argument in arguments))
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch(pattern, result.stdout)


def test_an_adapter(model: str, tmp_path: Path) -> None:
    base = load_model(model, device="cpu")
    folder = write_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    merged(base, folder).save_pretrained(str(tmp_path / "merged"))
    tiny_tokenizer().save_pretrained(str(tmp_path / "merged"))
    short = ["--max-model-len", "64", "--proposer", "none", "--max-tokens", "9"]
    own = generate(model, "--lora", folder, *short)
    assert own.exit_code == 0, own.stderr
    assert own.stdout == generate(str(tmp_path / "merged"), *short).stdout
    assert own.stdout != generate(model, *short).stdout


def test_free_text(model: str) -> None:
    result = generate(model, "--json", "--proposer", "ngram")
    (record,) = json_lines(result)
    assert (record["proposer"], record["finish_reason"]) == ("ngram", "length")
    assert len(record["token_ids"]) == 40 == record["stats"]["output_tokens"]


def test_compare(model: str, files: dict[str, str]) -> None:
    arguments = ("--schema", files["schema.json"], "--draft", model, "--compare")
    result = generate(model, *arguments)
    assert result.exit_code == 0, result.stderr
    jsonschema.validate(json.loads(result.stdout), SCHEMA)
    assert "the same text; " in result.stderr
    assert int(re.findall(r"; (-?\d+) forwards", result.stderr)[0]) > 0


def test_json(model: str, files: dict[str, str]) -> None:
    arguments = ("--schema", files["schema.json"], "--compare", "--json", "--seed", "5")
    ours, plain = json_lines(generate(model, *arguments))
    assert (ours["proposer"], plain["proposer"]) == ("chain:grammar_forced+ngram", "none")
    assert ours["text"] == plain["text"]
    assert ours["token_ids"] == plain["token_ids"]
    assert ours["stats"]["steps"] < plain["stats"]["steps"]
    assert ours["stats"]["seed"] == 5
    assert plain["stats"]["acceptance_length"] == 1.0


def test_sampling_repeats_with_its_seed(model: str) -> None:
    arguments = ("--temperature", "1.5", "--regex", "[a-z]{20}", "--top-k", "30", "--min-p", "0.01")
    texts = [generate(model, *arguments, "--seed", seed).stdout for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--regex", "(ab"), "GrammarCompileError: "),
        (("--schema", "broken.json"), "broken.json': the json_schema is not JSON"),
        (("--schema", "unsupported.json"), "UnsupportedSchemaError: "),
        (("--schema", "absent.json"), "ConfigError: --schema='absent.json': cannot be read"),
        (("--schema", "latin1.json"), "cannot be read"),
        (("--regex", "a", "--choice", "b"), "--choice=['b']: cannot go with --regex: choose one"),
        (("--regex", "", "--choice", "b"), "--choice=['b']: cannot go with --regex: choose one"),
        (("--proposer", "medusa"), "UnknownProposerError: --proposer='medusa'"),
        (("--proposer", "draft_model"), "ConfigError: --draft: "),
        (("-k", "99"), "--num-draft-tokens=99"),
        (("--proposer", "ngram", "--draft", "x"), "draft='x': ngram drafts without a model"),
        (("--temperature", "-1"), "temperature=-1"),
        (("--seed", "-1"), "seed=-1"),
        (("--dtype", "float3"), "ModelError: --dtype='float3'"),
        (("--device", "gpu"), "ModelError: --device='gpu'"),
        (("--chat",), "PromptError: prompt is a chat"),
    ],
)
def test_errors(
    model: str, files: dict[str, str], arguments: tuple[str, ...], message: str
) -> None:
    result = generate(model, *(files.get(argument, argument) for argument in arguments))
    assert result.exit_code == 1
    assert result.stdout == ""
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


def test_no_option_is_advised_that_is_none(model: str) -> None:
    """The library's error names an argument of Python's; a command has none for it."""
    result = generate(model, "--regex", "[a-z]{60}")
    assert result.exit_code == 1
    shown = " ".join(result.stderr.split())
    assert "BudgetTooSmallError: --max-tokens=40: the grammar's shortest text" in shown
    assert "complete" not in shown


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "message"),
    [
        (("--regex", "(ab"), 1, "GrammarCompileError", "unterminated"),
        (("--schema", "-", "--grammar", "-"), 1, "ConfigError", "--grammar='-': is standard input"),
        (("--proposer", "draft_model"), 1, "ConfigError", "--draft: draft_model drafts"),
        (("--max-tokens", "many"), 2, "BadParameter", "Invalid value for '--max-tokens'"),
        (("--nonsense",), 2, "NoSuchOption", "--nonsense"),
    ],
)
def test_errors_as_json(
    model: str, arguments: tuple[str, ...], code: int, kind: str, message: str
) -> None:
    result = generate(model, "--json", *arguments)
    assert (result.exit_code, result.stderr) == (code, "")
    (record,) = json_lines(result)
    assert record["error"]["type"] == kind
    assert message in record["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "absent.json"),
        ("bench", "--workload", "absent.jsonl"),
        ("train", "--algorithm", "none"),
    ],
)
def test_every_command_has_json_errors(arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (1, "")
    (record,) = json_lines(result)
    assert record["error"]["type"] == "ConfigError"


def test_standard_input(model: str, files: dict[str, str]) -> None:
    arguments = ("--model", model, "--max-tokens", "40", "--json", "--schema")
    given = run("generate", "The name", *arguments, files["schema.json"])
    prompt = run("generate", "-", *arguments, files["schema.json"], stdin="The name\n")
    schema = run("generate", "The name", *arguments, "-", stdin=json.dumps(SCHEMA))
    texts = [json_lines(result)[0]["text"] for result in (given, prompt, schema)]
    assert texts == [texts[0]] * 3
    both = run("generate", "-", *arguments, "-", stdin="{}")
    assert "--schema='-': is standard input, which PROMPT reads" in both.stdout
    checked = run("check", "-", "--tokenizer", model, stdin=json.dumps(SCHEMA))
    assert "every output will validate" in checked.stdout
    assert "SCHEMA='-': cannot be read" in run("check", "-", stdin=b"\xff").stderr


def test_text_is_written_as_it_comes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the spinner's words, which stand on a terminal where stdout may be a pipe."""
    said: list[str] = []

    class Told(Status):
        """A spinner draws at its own pace, so that words may pass unseen."""

        def update(self, status: Any = None, **how: Any) -> None:
            said.append(status)
            super().update(status, **how)

    def working(words: str) -> Status:
        said.append(words)
        return Told(words, console=Console(file=io.StringIO(), force_terminal=True, width=80))

    monkeypatch.setattr(GENERATE, "working", working)
    pieces: list[str] = []
    write = typer.echo

    def echo(text: str = "", **how: Any) -> None:
        pieces.append(text)
        write(text, **how)

    monkeypatch.setattr(typer, "echo", echo)
    result = generate(model, "--regex", "[a-c]{30}", "--proposer", "none")
    assert re.fullmatch(r"[a-c]{30}\n", result.stdout)
    assert "".join(pieces) == result.stdout.rstrip()
    assert len(pieces) > 10
    for words in ("loading the model", "reading the prompt", "compiling the grammar"):
        assert words in " ".join(said)


def test_verbose_shows_the_log(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("guided_spec.anything")
    monkeypatch.setattr(GENERATE, "_report", lambda runs: logger.info("%d run", len(runs)))
    arguments = ("--max-tokens", "2", "--proposer", "none")
    assert "INFO guided_spec.anything: 1 run" in generate(model, *arguments, "-v").stderr
    assert "1 run" not in generate(model, *arguments).stderr
    assert logging.getLogger("guided_spec").handlers == []


def test_a_missing_model() -> None:
    result = run("generate", "A", "--model", "./absent")
    assert result.exit_code == 1
    assert "there is no such folder" in " ".join(result.stderr.split())


def test_check(model: str, files: dict[str, str]) -> None:
    result = run("check", files["schema.json"], "--tokenizer", model)
    assert result.exit_code == 0, result.stderr
    assert "every output will validate" in result.stdout
    result = run("check", files["unsupported.json"], "--tokenizer", model)
    assert result.exit_code == 1
    assert "not" in result.stdout
    assert "UnsupportedSchemaError" in result.stdout


@pytest.mark.parametrize(
    ("name", "error", "level"),
    [
        ("schema.json", None, None),
        ("narrowed.json", None, "note"),
        ("unsupported.json", "UnsupportedSchemaError", "error"),
        ("broken.json", "GrammarCompileError", None),
    ],
)
def test_check_json(
    model: str, files: dict[str, str], name: str, error: str | None, level: str | None
) -> None:
    result = run("check", files[name], "--tokenizer", model, "--json")
    report = json.loads(result.stdout)
    assert report["compiles"] is (error is None)
    assert result.exit_code == (0 if error is None else 1)
    assert (report["error"] or {"type": None})["type"] == error
    levels = {finding["level"] for finding in report["findings"]}
    assert levels == (set() if level is None else {level})


@pytest.mark.slow
def test_bench(model: str, files: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "report.json"
    arguments = ("--model", model, "--proposers", "ngram", "--max-tokens", "8", "--output")
    result = run("bench", "--workload", files["workload.jsonl"], *arguments, str(output), "--json")
    assert result.exit_code == 0, result.stderr
    report = json_lines(result)
    assert report == json.loads(output.read_text())
    assert [row["name"] for row in report] == ["none", "transformers", "ngram"]
    workload = ("--workload", files["workload.jsonl"])
    table = run("bench", *workload, *arguments, str(output), "--batch-size", "2")
    assert "/forward" in table.stdout
    assert "transformers" not in table.stdout  # measured at batch size 1 only


@pytest.mark.slow
def test_bench_with_a_draft_of_its_own() -> None:
    proposers = f"none,auto={bundled_asset('mtp')}"
    arguments = ("--limit", "1", "--max-tokens", "24", "--temperature", "0.5")
    result = run("bench", *arguments, "--proposers", proposers, "--json")
    assert result.exit_code == 0, result.stderr
    report = json_lines(result)
    assert [row["name"] for row in report] == ["none", "auto"]
    assert report[1]["accepted"] > 0


@pytest.mark.slow
def test_bench_of_tasks(tmp_path: Path) -> None:
    table = tmp_path / "gains.md"
    arguments = ("--limit", "1", "--max-tokens", "12", "--temperatures", "0,0.5", "--by-kind")
    more = ("--tasks", "classification,chat", "--proposers", "ngram")
    result = run("bench", *arguments, *more, "--markdown", str(table), "--json")
    assert result.exit_code == 0, result.stderr
    rows = [(row["name"], row["temperature"], row["task"]) for row in json_lines(result)]
    each = [(heat, task) for heat in (0.0, 0.5) for task in ("classification", "chat")]
    assert rows == [(name, *rest) for name in ("none", "ngram") for rest in each]
    assert "| `ngram` | 0.5 | 1 |" in table.read_text()


def test_bench_of_a_missing_workload(model: str) -> None:
    result = run("bench", "--workload", "absent.jsonl", "--model", model)
    assert result.exit_code == 1
    assert "cannot be read" in " ".join(result.stderr.split())


def test_tables_fit_80_columns() -> None:
    names = [*DEFAULT_PROPOSERS.split(","), "transformers"]
    row = Measurement("", 100, 0, 25_600, 100.0, 12_800, 99_999, 99_999, mask_microseconds=12_345.6)
    console = Console(file=io.StringIO(), width=80)
    console.print(measurement_table([replace(row, name=name) for name in names]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(any(line.strip().startswith(name) for line in lines) for name in names)
    assert any("12346" in line for line in lines)
    sizes = [replace(row, name=name, batch_size=8) for name in names]
    console.print(measurement_table([replace(row, name="none"), *sizes]))
    assert max(map(len, console.file.getvalue().splitlines())) <= 80  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "absent/report.json"), "is in no folder that exists"),
        (("--output", "."), "must be a file that can be written"),
        (("--proposers", "ngram,nobody"), "--proposers='nobody': must be one of auto"),
        (("--tasks", "chat,poetry"), "tasks='poetry': must be one of extraction"),
        (("--tasks", "chat", "--workload", "a.jsonl"), "--workload='a.jsonl': excludes --tasks"),
        (("--tasks", "chat", "--plot", "plots"), "--plot='plots': draws one workload"),
        (("--temperatures", "0,warm"), "--temperatures='0,warm': must be numbers of at least 0"),
        (("--markdown", "absent/a.md"), "--markdown='absent/a.md': is in no folder that exists"),
        (("--proposers", "ngram,"), "--proposers='': must be one of auto"),
        (("--proposers", "chain:grammar_forced+nobody=draft"), "--proposers='nobody'"),
    ],
)
def test_what_bench_could_not_finish_is_not_begun(arguments: tuple[str, ...], message: str) -> None:
    result = run("bench", "--limit", "1", "--max-tokens", "2", *arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())
    assert "running" not in result.stderr


@pytest.mark.slow
def test_bench_of_names_with_spaces(model: str, files: dict[str, str]) -> None:
    arguments = ("--model", model, "--max-tokens", "4", "--proposers", "ngram, suffix", "--json")
    result = run("bench", "--workload", files["workload.jsonl"], *arguments)
    assert [row["name"] for row in json_lines(result)[2:]] == ["ngram", "suffix"]


def test_requests_that_fail_are_told_apart(model: str, tmp_path: Path) -> None:
    long = json.dumps({"prompt": "A" * 5000, "regex": "a+"})
    only, some = tmp_path / "only.jsonl", tmp_path / "some.jsonl"
    only.write_text(f"{long}\n")
    some.write_text(f'{long}\n{{"prompt": "B", "choice": ["x"]}}\n')
    arguments = ("--model", model, "--max-tokens", "4", "--proposers", "none")
    sampled = ("--temperature", "1")  # transformers has no part in it
    result = run("bench", "--workload", str(only), *arguments, *sampled)
    assert result.exit_code == 1
    assert "failed" in result.stdout
    assert "%" not in result.stdout.replace("100%", "", 1)  # the share of equal texts alone
    assert "none: 1 of 1 requests failed: " in result.stderr
    result = run("bench", "--workload", str(some), *arguments, *sampled, "--json")
    (row,) = json_lines(result)
    assert (result.exit_code, row["requests"], row["failed"], row["valid"]) == (1, 2, 1, 1.0)
    assert row["error"].replace("max_model_len", "--max-model-len") in result.stderr


def test_bench_of_no_batch() -> None:
    result = run("bench", "--batch-size", "1,x")
    assert result.exit_code == 1
    assert "--batch-size='1,x': must be numbers" in " ".join(result.stderr.split())


def test_a_long_pointer_is_not_broken(tmp_path: Path) -> None:
    keys = [f"a-key-of-many-letters-{depth}" for depth in range(6)]
    schema: dict[str, Any] = {"not": {"multipleOf": 2}}
    for key in keys:
        schema = {"properties": {key: schema}}
    (tmp_path / "s.json").write_text(json.dumps(schema))
    result = run("check", str(tmp_path / "s.json"))
    pointer = "".join(f"/properties/{key}" for key in reversed(keys))
    assert f"error: {pointer}: not\n" in result.stdout
    sentences = re.findall(r"^  (?:reason|fix): .*", result.stdout, re.MULTILINE)
    assert sentences
    assert all(len(sentence) <= 100 for sentence in sentences)


def test_help() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for command in ("generate", "check", "bench", "train"):
        assert command in result.stdout


def test_version() -> None:
    assert run("--version").stdout == f"guided-spec {guided_spec.__version__}\n"


def test_after(model: str) -> None:
    result = generate(model, "--regex", "[a-z]{2}-[0-9]", "--after", "name")
    assert re.fullmatch(r"[a-z]{2}-[0-9]\n", result.stdout)  # the prompt ends with the marker
    result = generate(model, "--after", "name")
    assert result.exit_code != 0
    assert "--after='name': needs a grammar" in result.stderr


@pytest.mark.parametrize("command", ["generate", "trace", "bench", "serve", "eval"])
def test_how_the_model_is_loaded(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that loads one has the same two options, and hands them on."""
    seen: list[dict[str, Any]] = []

    def load(*_: object, **options: Any) -> None:
        seen.append(options)
        raise ModelError("seen")

    for name in ("guided_spec.engine.llm.LLM", "guided_spec.engine.process.EngineProcess"):
        monkeypatch.setattr(name, load)
    monkeypatch.setattr("guided_spec.cli.serve.engine_interpreter", nullcontext)
    given = {"generate": ["a"], "trace": ["a"], "eval": ["--data", "ultrachat"]}.get(command, [])
    assert run(command, *given).exit_code == 1
    assert run(command, *given, "--device-map", "auto", "--trust-remote-code").exit_code == 1
    assert not {"device_map", "trust_remote_code"} & seen[0].keys()
    assert (seen[1]["device_map"], seen[1]["trust_remote_code"]) == ("auto", True)
    assert run(command, *given, "--device-map", '{"": "cpu"}').exit_code == 1
    assert seen[2]["device_map"] == {"": "cpu"}
    refused = run(command, *given, "--device-map", "all")
    assert "--device-map='all': must be one of auto," in " ".join(refused.stderr.split())
    assert len(seen) == 3


@pytest.mark.parametrize(("command", "threads"), [("generate", 1), ("bench", 2)])
def test_the_bundled_model_writes_in_one_thread(
    command: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is measured, and nobody says how many."""
    seen: list[int] = []

    def load(**_: object) -> None:
        seen.append(torch.get_num_threads())
        raise ModelError("seen")

    before = torch.get_num_threads()
    monkeypatch.setattr("guided_spec.engine.llm.LLM", load)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    given = {"generate": ["a"]}.get(command, [])
    try:
        for other in ([], ["--model", "a/b"]):
            torch.set_num_threads(2)
            run(command, *given, *other)
        torch.set_num_threads(2)
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        run(command, *given)
    finally:
        torch.set_num_threads(before)
    assert seen == [threads, 2, 2]
