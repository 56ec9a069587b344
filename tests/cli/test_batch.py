"""``guided-spec generate --input``: files, options, exit codes, and a process that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from guided_spec.batch.run import Batch
from guided_spec.engine.llm import LLM
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.loading import load_model
from guided_spec.types import SamplingParams
from tests.adapters import write_adapter
from tests.cli.test_cli import run

ROWS = [{"key": f"k{at}", "name": f"Ada {at}", "age": at} for at in range(9)]
PROMPT = "The name is {name}, the age"
DIGITS = ("--regex", "[0-9]{2}", "--max-tokens", "8")


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is not ignored, as it is in a shell's background, whose processes inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be loaded."""
    monkeypatch.setattr("guided_spec.cli.options.ModelOptions.load", load_nothing)


def load_nothing(*_: Any, **__: Any) -> None:
    raise AssertionError("it was loaded")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch(model: str, source: Path, output: Path, *arguments: str) -> Any:
    files = ("--input", str(source), "--output", str(output))
    return run("generate", *arguments, *files, "--model", model)


def written(folder: Path, suffix: str) -> Path:
    """The rows as a file."""
    path = folder / f"rows{suffix}"
    if suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    elif suffix == ".csv":
        cells = [f"{row['key']},{row['name']},{row['age']}" for row in ROWS]
        path.write_text("\n".join(["key,name,age", *cells]))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.every_case
@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_rows(model: str, tmp_path: Path, suffix: str) -> None:
    source, output = written(tmp_path, suffix), tmp_path / "out.jsonl"
    result = batch(model, source, output, PROMPT, *DIGITS, "--id-column", "key")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert "9 of 9 lines answered, 0 failed; 27 tokens in " in result.stderr
    found = {line["custom_id"]: line for line in lines(output)}
    params = SamplingParams(grammar=GrammarSpec.regex("[0-9]{2}"), max_tokens=8)
    with LLM(model) as llm:
        expected = llm.map(ROWS, params, prompt=PROMPT)
        for row, text in zip(ROWS, expected, strict=True):
            answer = found.pop(str(row["key"]))
            assert answer.pop("id").startswith("batch_req_")
            assert answer == {
                "custom_id": row["key"],
                "text": text.text,
                "finish_reason": "stop",
                "is_complete": True,
                "was_shortened": False,
                "output_tokens": 3,
                "error": None,
            }
    assert not found


def test_an_adapter_of_all_rows_and_adapters_that_requests_name(model: str, tmp_path: Path) -> None:
    base = load_model(model, device="cpu")
    folder = write_adapter(base, tmp_path / "adapter", target_modules="all-linear")
    with LLM(model, loras={"sql": folder}) as llm:
        prompts, params = ["The name", "An age"], SamplingParams(max_tokens=9)
        own = [one.text for one in llm.generate(prompts, replace(params, lora="sql"))]
        plain = [one.text for one in llm.generate(prompts, params)]
    assert not {*own} & {*plain}
    source, output = tmp_path / "rows.jsonl", tmp_path / "rows_out.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in prompts))
    rows = ("{text}", "--max-tokens", "9", "--lora")
    result = batch(model, source, output, *rows, folder)
    assert result.exit_code == 0, result.stderr
    assert {line["custom_id"]: line["text"] for line in lines(output)} == {"1": own[0], "2": own[1]}
    other = batch(model, source, output, *rows, str(tmp_path))
    assert "answers another request of '" in " ".join(other.stderr.split())

    source, output = tmp_path / "requests.jsonl", tmp_path / "requests_out.jsonl"
    bodies = [{"prompt": "The name", "max_tokens": 9, "model": name} for name in ("sql", model)]
    wanted = [
        {"custom_id": f"{at}", "url": "/v1/completions", "body": body}
        for at, body in enumerate([*bodies, {"prompt": "A", "model": "sq"}])
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in wanted))
    result = batch(model, source, output, "--lora-modules", f"sql={folder}")
    assert "2 of 3 lines answered, 1 failed" in result.stderr
    found = {line["custom_id"]: line["response"] for line in lines(output)}
    assert [found[at]["body"]["choices"][0]["text"] for at in "01"] == [own[0], plain[0]]
    assert [found[at]["body"]["model"] for at in "01"] == ["sql", model]
    assert found["2"]["status_code"] == 404
    assert found["2"]["body"]["error"]["message"].endswith("there is " + model + ", sql")
    other = batch(model, source, output, "--lora-modules", f"sql={tmp_path}")
    assert "answers another request of '" in " ".join(other.stderr.split())


def test_nothing_is_asked_twice(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = written(tmp_path, ".csv"), tmp_path / "out.jsonl"
    assert batch(model, source, output, PROMPT, *DIGITS).exit_code == 0
    monkeypatch.setattr("guided_spec.cli.options.ModelOptions.load", load_nothing)
    before = output.read_bytes()
    result = batch(model, source, output, PROMPT, *DIGITS, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == {
        "total": 9,
        "before": 9,
        "answered": 0,
        "failed": 0,
        "output_tokens": 0,
        "seconds": 0.0,
        "acceptance": 0.0,
        "tokens_per_second": 0.0,
    }
    assert output.read_bytes() == before
    for changed in (("--max-tokens", "9"), ("--chat",), ("--seed", "1"), ("--regex", "[0-9]")):
        result = batch(model, source, output, PROMPT, *DIGITS, *changed)
        assert result.exit_code == 1
        assert "answers another request of '" in " ".join(result.stderr.split())
    assert output.read_bytes() == before


def test_rows_that_fail(model: str, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"name": "Ada"}\n{"nam": 1}\n5\n{\n' + json.dumps({"name": "x" * 9999}))
    result = batch(model, source, output, PROMPT, *DIGITS)
    assert result.exit_code == 1
    assert "1 of 5 lines answered, 4 failed" in result.stderr
    found = {line["custom_id"]: line["error"] for line in lines(output)}
    assert [found[str(at)] and found[str(at)]["type"] for at in range(1, 6)] == [
        *(None, "PromptError", "PromptError", "PromptError", "PromptTooLongError"),
    ]
    assert "did you mean nam? " in found["2"]["message"]
    assert found["5"]["message"].endswith("shorten it, or raise --max-model-len")
    again = batch(model, source, output, PROMPT, *DIGITS)
    assert "0 of 5 lines answered, 1 before, 4 failed" in again.stderr
    assert len(lines(output)) == 5


@pytest.mark.usefixtures("no_model")
@pytest.mark.every_case
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("A",), "PROMPT='A': names no column in braces, so that all rows would get the same"),
        (("{nmae}",), "--input=.*: has no column 'nmae'; did you mean name? the columns"),
        (("{name",), "PROMPT='{name': expected '}' before end of string"),
        (("{name}", "--id-column", "id"), "has no column 'id'"),
        (("{name}", "--compare"), "--compare: is for one text; leave it out"),
        (("{name}", "--served-model-name", "x"), "--served-model-name=['x']: is for requests"),
        (("{name}", "--regex", "a", "--choice", "b"), "cannot go with --regex"),
        (("{name}", "--temperature", "-1"), "temperature=-1"),
        (("--schema", "s.json"), "--schema='s.json': needs a PROMPT for the columns; requests"),
        (("--max-tokens", "5"), "--max-tokens='5': needs a PROMPT for the columns"),
        (("--id-column", "key"), "--id-column='key': needs a PROMPT"),
        (("--lora", "a"), "--lora='a': needs a PROMPT for the columns; requests name adapters"),
        (("{name}", "--lora-modules", "a=b"), "--lora-modules=['a=b']: is for requests"),
        (("--lora-modules", "a"), "--lora-modules='a': must be NAME=PATH"),
        (
            ("--served-model-name", "m", "--lora-modules", "m=b"),
            "--lora-modules='m': the model is called so: rename one",
        ),
    ],
)
def test_what_is_refused_before_a_model_is_loaded(
    model: str, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    source, output = written(tmp_path, ".csv"), tmp_path / "out.jsonl"
    result = batch(model, source, output, *arguments)
    assert result.exit_code == 1
    first, _, last = message.rpartition(".*")
    assert first in " ".join(result.stderr.split())
    assert last in " ".join(result.stderr.split())
    assert not output.exists()


@pytest.mark.usefixtures("no_model")
def test_a_column_that_no_line_has(model: str, tmp_path: Path) -> None:
    source, output = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"nam": "a", "id": 1}\n5\n{\n{"other": "b"}\n')
    for arguments, said in (
        (("{name}",), "has no column 'name'; did you mean nam? the columns are nam, id, other"),
        (("{nam}", "--id-column", "key"), "has no column 'key'; the columns are nam, id, other"),
        ((), "has no column 'custom_id'; the columns are nam, id, other; rows need a prompt"),
    ):
        result = batch(model, source, output, *arguments)
        assert result.exit_code == 1
        assert said in " ".join(result.stderr.split())
        assert not output.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("A", "--output", "x"), "--output='x': needs a file to answer: give --input"),
        (("A", "--id-column", "x"), "--id-column='x': needs a file to answer: give --input"),
        (("A", "--lora-modules", "a=b"), "--lora-modules=['a=b']: needs a file to answer"),
        (("A", "--input", "rows.csv"), "--output: name the file that the answers go into"),
        (("A", "--regex", "a", "--after", ""), "--after='': must not be empty; leave it out"),
        ((), "PROMPT: give the text to continue; - is standard input"),
    ],
)
def test_options_that_go_together(arguments: tuple[str, ...], message: str) -> None:
    result = run("generate", *arguments)
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())


def test_ctrl_c(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = written(tmp_path, ".csv"), tmp_path / "out.jsonl"

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Batch, "run", stop)
    result = batch(model, source, output, PROMPT, *DIGITS)
    assert result.exit_code == 130
    assert "0 of 9 lines answered, 0 failed" in result.stderr
    assert "stopped: run the same command to resume" in result.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_a_process_that_is_killed(model: str, tmp_path: Path) -> None:
    """With requests, twice, in the middle of its work."""
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "The name", "guided_regex": "[a-z]{60}", "max_tokens": 80}
    wanted = [{"custom_id": f"{at}", "url": "/v1/completions", "body": body} for at in range(80)]
    source.write_text("".join(json.dumps(line) + "\n" for line in wanted))
    command = [sys.executable, "-m", "guided_spec.cli.main", "generate", "--model", model]
    command += ["--input", str(source), "--output", str(output), "--proposer", "none"]
    counts = [0]
    for number in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, text=True)
        while process.poll() is None and len(whole_lines(output)) < counts[-1] + 10:
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (130 if number is signal.SIGINT else -number), errors
        counts.append(len(whole_lines(output)))
        with output.open("ab") as file:
            file.write(b'{"id": "batch_req_5f')  # the middle of a line
    assert counts[0] < counts[1] < counts[2] < 80
    result = batch(model, source, output, "--proposer", "none")
    assert result.exit_code == 0, result.stderr
    assert f"{80 - counts[-1]} of 80 lines answered, {counts[-1]} before, 0" in result.stderr
    assert sorted(line["custom_id"] for line in lines(output)) == sorted(map(str, range(80)))


def whole_lines(path: Path) -> list[bytes]:
    data = path.read_bytes() if path.exists() else b""
    return data.split(b"\n")[:-1]


def test_texts_that_were_cut_short(model: str, tmp_path: Path) -> None:
    source, output = written(tmp_path, ".csv"), tmp_path / "out.jsonl"
    long = ("--regex", "[a-z]{3,}", "--max-tokens", "8", "--on-short")
    result = batch(model, source, output, PROMPT, *long, "return")
    assert result.exit_code == 0, result.stderr
    assert {line["was_shortened"] for line in lines(output)} == {True}
    other = tmp_path / "other.jsonl"
    assert batch(model, source, other, PROMPT, *long, "error").exit_code == 1
    assert {line["error"]["type"] for line in lines(other)} == {"TextCutShortError"}
    for line in lines(other):
        assert line["error"]["message"].startswith("--max-tokens=8: the text was ended early")
        assert "on_short" not in line["error"]["message"]
    single = run("generate", "A", *long, "error", "--model", model)
    assert single.exit_code == 1
    shown = " ".join(single.stderr.split())
    assert "TextCutShortError: --max-tokens=8: the text was ended early" in shown
    assert "on_short" not in shown
