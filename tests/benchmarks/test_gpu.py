"""``python -m benchmarks.gpu`` on a CPU, at tiny sizes: every section and what it reports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks.gpu import documents, steps, vllm_peer
from benchmarks.gpu.__main__ import app
from benchmarks.gpu.documents import DocumentPlan, num_documents
from benchmarks.gpu.kernels import measure_kernels
from benchmarks.gpu.peers import VLLM_METHODS, VllmEnvironment, measure_vllm
from benchmarks.gpu.run import SECTIONS, GpuPlan, run_gpu
from benchmarks.gpu.steps import StepPlan, endless_schema, measure_steps
from benchmarks.gpu.subject import (
    Subject,
    json_documents,
    load_subject,
    with_draft,
    without_weights,
)
from guided_spec import LLM
from guided_spec.errors import ConfigError
from guided_spec.evaluate.measurement import Timed, time_items
from tests.benchmarks.small_llama import Folders, write_small
from tests.benchmarks.vllm_stand_in import write_stand_in

STEPS = StepPlan(("none", "eagle3:mask"), (1, 2), (0.0,), 3, 40, 4, 2)
DOCUMENTS = DocumentPlan(("none", "eagle3"), (2,), (0.0, 0.7), 3, 200, 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return write_small(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def subject(folders: Folders) -> Subject:
    return load_subject(*folders, device="cpu", dtype="float32")


def nobody(message: str) -> None:
    assert message


@pytest.fixture(scope="module")
def report(folders: Folders) -> tuple[dict[str, Any], list[str]]:
    """All sections but the kernels, as JSON reads them back, and what was told meanwhile."""
    told: list[str] = []
    plan = GpuPlan(
        sections=("peers", "end-to-end", "steps"),
        model=str(folders.target),
        eagle3=str(folders.eagle3),
        device="cpu",
        dtype="float32",
        steps=STEPS,
        documents=DOCUMENTS,
    )
    sections = {section.name: section.records for section in run_gpu(plan, told.append)}
    return json.loads(json.dumps(sections)), told


@pytest.mark.slow
def test_sections_in_their_order(report: tuple[dict[str, Any], list[str]]) -> None:
    sections, told = report
    assert list(sections) == ["machine", "steps", "end-to-end", "peers"]
    assert sections["machine"]["versions"]["torch"]
    assert told[0] == "steps: none, 1 requests, grammar off"
    assert told[-1].startswith("peers: transformers")


@pytest.mark.slow
def test_steps(report: tuple[dict[str, Any], list[str]]) -> None:
    rows = report[0]["steps"]["rows"]
    keys = [(row["proposer"], row["batch"], row["grammar"]) for row in rows]
    assert keys == [(p, b, g) for p in STEPS.proposers for b in (1, 2) for g in (False, True)]
    for row in rows:
        assert (row["problem"], row["steps"]) == (None, STEPS.steps)
        assert 0 < row["median_ms"] <= row["p90_ms"]
        assert row["mean_ms"] > 0
        assert 1 <= row["tokens"] <= 1 + row["num_draft_tokens"]
        assert row["drafted"] >= row["tokens"] - 1
    by_name = {row["proposer"]: row for row in rows}
    assert by_name["none"]["num_draft_tokens"] == by_name["none"]["drafted"] == 0
    assert 0 < by_name["eagle3:mask"]["drafted"] <= 3


@pytest.mark.slow
def test_documents(report: tuple[dict[str, Any], list[str]]) -> None:
    rows = report[0]["end-to-end"]["rows"]
    assert [(row["engine"], row["temperature"]) for row in rows] == [
        ("none", 0.0),
        ("eagle3", 0.0),
        ("none", 0.7),
        ("eagle3", 0.7),
    ]
    for row in rows:
        assert (row["problem"], row["requests"], row["failed"], row["valid"]) == (None, 3, 0, 1.0)
        assert row["tokens_per_second"] > 0
    assert rows[1]["same_text"] == 1.0
    assert rows[1]["drafted"] > rows[0]["drafted"] == 0
    assert rows[1]["acceptance_length"] >= rows[0]["acceptance_length"] == 1.0


@pytest.mark.slow
def test_engines_take_turns(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a rehearsal each; one that cannot be made leaves the others their turns."""
    ran: list[str] = []

    def run(llm: LLM, *arguments: Any) -> Timed:
        ran.append(llm.proposer)
        return time_items(llm, *arguments)

    monkeypatch.setattr(documents, "time_items", run)
    plan = DOCUMENTS._replace(
        proposers=("eagle3", "none", "ngram:x"), temperatures=(0.0,), repeats=3
    )
    ((head, plain, wrong),) = documents.measure_documents(subject, plan, nobody)
    assert ran == ["eagle3", "none"] * 3
    assert head.measurement is not None
    assert head.measurement.seconds == sorted(head.seconds)[1]
    assert (len(head.seconds), len(plain.seconds)) == (3, 3)
    assert head.as_dict()["seconds_of_runs"] == head.seconds
    assert wrong.problem is not None
    assert "ngram:x" in wrong.problem


def test_transformers_beside_it(report: tuple[dict[str, Any], list[str]]) -> None:
    plain, lookup, *others = report[0]["peers"]["rows"]
    assert (plain["engine"], plain["requests"], plain["valid"]) == ("transformers", 3, 1.0)
    assert plain["acceptance_length"] == 1.0
    assert "takes them back" in lookup["problem"]
    assert all("tokens" not in row and row["problem"] for row in others)


@pytest.mark.slow
def test_what_cannot_be_timed(subject: Subject) -> None:
    """A prompt that leaves no room, and a batch that the memory does not hold."""
    plan = StepPlan(("none",), (1,), context=1016, steps=20, warm_up=1)
    times = sum(measure_steps(subject, plan, nobody), [])
    assert [time.problem for time in times] == ["ended early", "ended early"]
    assert [time.steps for time in times] == [5, 5]
    tight = plan._replace(batches=(2,), context=40, options={"kv_memory_bytes": 40_000})
    assert [time.problem for found in measure_steps(subject, tight, nobody) for time in found] == [
        "memory for 1 requests",
        "memory for 1 requests",
    ]
    tighter = tight._replace(options={"kv_memory_bytes": 4_000})
    times = sum(measure_steps(subject, tighter, nobody), [])
    assert all("raise kv_memory_bytes" in (time.problem or "") for time in times)


@pytest.mark.slow
def test_requests_that_join_one_after_another(subject: Subject) -> None:
    """The first ones write on meanwhile, and have to last until all of them have been timed."""
    plan = StepPlan(("none",), (8,), context=40, steps=3, warm_up=1, options={"prefill_tokens": 40})
    for time in sum(measure_steps(subject, plan, nobody), []):
        assert (time.problem, time.steps) == (None, 3)


@pytest.mark.slow
def test_texts_of_one_length(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar that has more drafts accepted is not charged with the longer texts."""
    plan = StepPlan(("eagle3:mask",), (1,), context=40, steps=12, warm_up=4)
    found = []
    for alike in (1000, 0):
        monkeypatch.setattr(steps, "ALIKE", alike)
        free, guided = sum(measure_steps(subject, plan, nobody), [])
        assert free.context is not None
        assert guided.context is not None
        found.append(abs(guided.context - free.context))
    assert found[1] < found[0]


@pytest.mark.slow
def test_tables_of_either_side(subject: Subject) -> None:
    plan = StepPlan(("eagle3:mask",), (1,), context=40, steps=4, warm_up=1)
    times = sum(measure_steps(subject, plan._replace(tables=("host", "device")), nobody), [])
    assert [(time.tables, time.grammar, time.problem, time.tabled) for time in times] == [
        ("host", False, None, 0.0),
        ("host", True, None, 0.0),
        ("device", False, None, 0.0),
        ("device", True, None, 1.0),
    ]
    assert times[1].tokens == times[3].tokens
    drafts = {"draft_model": subject.folder}
    plan = plan._replace(proposers=("draft_model:mask",), drafts=drafts, tables=("device",))
    assert [time.tabled for time in sum(measure_steps(subject, plan, nobody), [])] == [0.0, 1.0]
    with pytest.raises(ConfigError, match="tables='gpu': must be of off, host, device"):
        list(measure_steps(subject, plan._replace(tables=("gpu",)), nobody))


@pytest.mark.slow
def test_what_was_measured_so_far_is_kept(folders: Folders) -> None:
    plan = GpuPlan(("steps",), str(folders.target), device="cpu", dtype="float32")
    plan = plan._replace(steps=StepPlan(("none",), (1, 2), context=40, steps=2, warm_up=1))
    found = [section for section in run_gpu(plan, nobody) if section.name == "steps"]
    assert [len(section.records["rows"]) for section in found] == [2, 4, 4]
    assert [bool(section.tables) for section in found] == [False, False, True]


def test_the_endless_schema() -> None:
    schema = endless_schema()
    assert schema["minItems"] == 100
    assert schema["items"]["required"] == ["name", "age", "status", "tags", "address"]


def test_documents_over_again() -> None:
    items = json_documents(300)
    assert len(items) == 300
    assert all(item.grammar is not None for item in items)
    assert items[0] == items[254]
    assert [num_documents(DocumentPlan(), batch) for batch in (1, 64)] == [32, 128]


def test_without_a_head(subject: Subject) -> None:
    names = ["none", "eagle3", "chain:grammar_forced+eagle3", "ngram"]
    assert with_draft(subject, names) == names
    assert with_draft(subject._replace(eagle3=None), names) == ["none", "ngram"]


def test_the_script_for_vllm(subject: Subject, tmp_path: Path) -> None:
    """It keeps the batch, counts, and reports what it refuses and what does not start."""
    write_stand_in(tmp_path)
    place = VllmEnvironment(site=str(tmp_path), logs=tmp_path)
    subject = without_weights(subject)  # which it is not to need
    plan = DOCUMENTS._replace(temperatures=(0.0,), requests=4)
    runs = {run.engine: run for run in measure_vllm(subject, plan, place, nobody)}
    assert list(runs) == [f"vllm {method}" for method in VLLM_METHODS]
    plain, eagle3 = runs["vllm none"].measurement, runs["vllm eagle3"].measurement
    assert plain is not None
    assert eagle3 is not None
    assert plain.failed == 1
    assert runs["vllm none"].problem == "1 refused"
    assert plain.tokens == 3 * DOCUMENTS.max_tokens
    assert (plain.acceptance_length, eagle3.acceptance_length) == (1.0, 4.0)
    assert plain.valid < 1.0
    assert "no such thing as ngram" in (runs["vllm ngram"].problem or "")
    assert "no such thing" in (tmp_path / "vllm_ngram.log").read_text()


def test_arguments_for_vllm() -> None:
    cells = [{"batch": batch} for batch in (1, 64)]
    plan = {"model": "m", "eagle3": "e", "num_draft_tokens": 5, "max_model_len": 2048}
    plan |= {"memory_share": 0.75, "cells": cells}
    found = {name: vllm_peer.engine_arguments({**plan, "method": name}) for name in VLLM_METHODS}
    assert found["none"]["speculative_config"] is None
    assert found["ngram"]["speculative_config"]["method"] == "ngram"
    assert found["eagle3"]["speculative_config"]["model"] == "e"
    assert {one["max_num_seqs"] for one in found.values()} == {64}
    assert 64 * 6 in found["eagle3"]["compilation_config"]["cudagraph_capture_sizes"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


@pytest.mark.slow
def test_the_command(folders: Folders, tmp_path: Path) -> None:
    output = tmp_path / "gpu.json"
    models = ("--model", str(folders.target), "--eagle3", str(folders.eagle3))
    sizes = ("--batches", "1", "--steps", "2", "--warm-up", "1", "--prompt-length", "20")
    place = ("--device", "cpu", "--dtype", "float32", "--output", str(output))
    chosen = ("--sections", "steps", "--proposers", "none", "--engine-option", "prefill_tokens=16")
    result = run(*models, *sizes, *place, *chosen)
    assert result.exit_code == 0, result.stderr
    assert "Engine steps" in result.stdout
    report = json.loads(output.read_text())
    assert report["machine"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(report["steps"]["rows"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sections", "speed"), "sections='speed': must be of kernels"),
        (("--batches", "1,many"), "batches='1,many': must be numbers"),
        (("--draft", "mtp"), "draft='mtp': must be PROPOSER=FOLDER"),
        (("--engine-option", "speed=9"), "engine_option='speed=9': must be NAME=VALUE"),
    ],
)
def test_a_wrong_option(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments, "--device", "cpu")
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())


def test_every_section_has_a_name() -> None:
    assert SECTIONS == ("kernels", "steps", "end-to-end", "peers", "plugins")
    with pytest.raises(ConfigError, match="sections"):
        next(iter(run_gpu(GpuPlan(sections=()), nobody)))


def test_kernels() -> None:
    """A benchmark's table is kept as text, and one that cannot run does not end the others."""
    told: list[str] = []
    small = {"max_batch": 1, "context": 16, "heads": 2, "kv_heads": 1, "head_dim": 16}
    arguments: dict[str, dict[str, Any]] = {"drafting": {"speed": 9}, "attention": small}
    found = measure_kernels("cpu", told.append, arguments)
    assert told == ["kernels: drafting", "kernels: attention"]
    assert found["drafting"].startswith("TypeError: ")
    assert "us a layer" in found["attention"]
    forwards = measure_kernels("cpu", nobody, {"forwards": {}})["forwards"]
    assert forwards.startswith("ConfigError: device='cpu': must be a CUDA device")
    plan = GpuPlan(sections=("kernels",), device="cpu", kernels={})
    assert [section.name for section in run_gpu(plan, nobody)] == ["machine", "kernels"]
