"""``python -m benchmarks.blocks`` on a CPU, at tiny sizes: parts, limits and records."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.blocks.__main__ import app
from benchmarks.blocks.clock import Clock
from benchmarks.blocks.documents import DocumentPlan, RunKey, _drive
from benchmarks.blocks.heads import HeadPlan, head_folders, train_heads, widen
from benchmarks.blocks.run import BlocksPlan, Records, merge, run_blocks, table_of
from benchmarks.widening.models import write_wide, write_wide_head
from benchmarks.widening.shape import Shape
from guided_spec.bundled import bundled_asset
from guided_spec.engine.request import State
from guided_spec.errors import ConfigError
from guided_spec.models.loading import load_model
from tests.benchmarks.small_llama import write_small, write_small_block
from tests.tiny_llm import VOCAB_SIZE

WIDE = Shape(48, 3, 6, 3, 20, 60, VOCAB_SIZE + 8, 1024, 204)
CHOSEN = ("none", "eagle3@2", "dflash", "p_eagle:validate", "dspark:mask")
DOCUMENTS = DocumentPlan(CHOSEN, {2: 2, 1: 1}, num_draft_tokens=3, max_tokens=4)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random heads of all kinds, widened with their target."""
    folder = tmp_path_factory.mktemp("blocks")
    small = write_small(folder / "small")
    where: dict[str, Any] = {"target": small.target, "shape": WIDE, "dtype": torch.float32}
    write_wide(folder, **where)
    target = load_model(small.target, device="cpu")
    sources = {"eagle3": small.eagle3}
    for method in ("p_eagle", "dflash", "dspark"):
        sources[method] = write_small_block(folder / method, method, target)
    for method, source in sources.items():
        write_wide_head(folder / "wide" / method, source, **where)
    return folder


def plan_of(work: Path, *parts: str, **changes: Any) -> BlocksPlan:
    plan = BlocksPlan(work, parts, documents=DOCUMENTS)
    return plan._replace(device="cpu", dtype="float32", **changes)


def run(plan: BlocksPlan, records: Records, seconds: float = 500.0) -> list[str]:
    """Merges what is found into ``records``; returns what was told."""
    told: list[str] = []
    for found in run_blocks(plan, records, Clock(seconds), told.append):
        merge(records, found)
    return told


@pytest.fixture(scope="module")
def records(work: Path) -> Records:
    """Of documents."""
    found: Records = {}
    run(plan_of(work, "documents"), found)
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


@pytest.mark.slow
def test_every_engine_on_every_workload(records: Records) -> None:
    rows = records["documents"]
    keys = [RunKey(*(row[name] for name in RunKey._fields)) for row in rows]
    assert {key.engine for key in keys} == set(CHOSEN)
    expected = {"json", "free"}
    assert {key.workload for key in keys if ":" not in key.engine} == expected
    assert {key.workload for key in keys if ":" in key.engine} == {"json"}
    assert len(set(keys)) == len(keys) == 2 * 2 * (3 * 2 + 2)
    for row in rows:
        assert (row["problem"], row["failed"], row["valid"]) == (None, 0, 1.0)
        assert 0 < row["steps"] <= row["tokens"]
        assert (row["drafted"] > 0) == (row["engine"] != "none")


@pytest.mark.slow
def test_greedy_texts_are_those_of_plain_decoding(records: Records) -> None:
    greedy = [row for row in records["documents"] if row["temperature"] == 0]
    assert {row["same_text"] for row in greedy} == {1.0}


@pytest.mark.slow
def test_what_is_known_is_not_run_again(work: Path, records: Records) -> None:
    kept: Records = json.loads(json.dumps(records))
    lost = kept["documents"].pop()
    lost_key = RunKey(*(lost[name] for name in RunKey._fields))
    told = run(plan_of(work, "documents"), kept)
    assert [line for line in told if line.startswith("documents")] == [
        f"documents: {lost_key.engine}"
    ]
    assert len(kept["documents"]) == len(records["documents"])


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_so_many_run_at_a_time(batch: int) -> None:
    """The next one comes when one has ended, and not before."""
    lengths, seen = [3, 1, 2, 4], list[int]()
    running = dict[int, int]()

    class Engine:
        def add(self, request: Any) -> None:
            running[request.number] = lengths[request.number]

        def step(self) -> None:
            seen.append(len(running))
            for number in [*running]:
                running[number] -= 1
                if not running[number]:
                    del running[number]
                    requests[number].state = State.FINISHED

    requests: list[Any] = [SimpleNamespace(number=at, state=None) for at in range(len(lengths))]
    assert _drive(cast("Any", Engine()), requests, batch) == len(seen)
    assert seen == {1: [1] * 10, 2: [2, 2, 2, 1, 1, 1, 1], 5: [4, 3, 2, 1]}[batch]


def test_nothing_begins_once_the_time_is_over(work: Path, tmp_path: Path) -> None:
    found: Records = {}
    assert run(plan_of(work, "widen", "documents"), found, seconds=0.0) == []
    assert found == {}
    heads = HeadPlan(methods=("dflash",), data=tmp_path / "none.jsonl", device="cpu")
    (tmp_path / "none.jsonl").touch()
    trained = train_heads(tmp_path, heads, Clock(0.0), lambda _: None)
    assert trained[0].problem is not None
    assert head_folders(tmp_path, heads.methods) == {}


def test_a_head_that_is_missing_is_told(work: Path) -> None:
    heads = HeadPlan(methods=("eagle3",))
    documents = DOCUMENTS._replace(engines=("dflash:mask",))
    found: Records = {}
    run(plan_of(work, "documents", heads=heads, documents=documents), found)
    row = found["documents"][0]
    assert row["problem"] == "there is no dflash head"
    assert "no dflash head" in str(table_of("documents", [row]).caption)


@pytest.mark.slow
def test_the_command(work: Path, tmp_path: Path) -> None:
    output = tmp_path / "found.json"
    where = ["--work", str(work), "--device", "cpu", "--dtype", "float32", "--output", str(output)]
    sizes = ["--documents", "1=1", "--temperatures", "0", "--max-tokens", "4", "-k", "3"]
    asked = [*where, *sizes, "--parts", "documents", "--engines", "none,dspark,dspark@2"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    rows = json.loads(output.read_text())["documents"]
    assert [(row["engine"], row["workload"]) for row in rows] == [
        (engine, workload)
        for engine in ("none", "dspark", "dspark@2")
        for workload in ("json", "free")
    ]
    assert "dspark" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--parts", "all"], "parts='all'"),
        (["--documents", "1"], "documents='1'"),
        (["--engine-option", "nothing=1"], "engine_option='nothing=1'"),
        (["--temperatures", "hot"], "temperatures='hot'"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["--work", str(tmp_path), "--device", "cpu", *options])
    assert result.exit_code == 1
    assert message in result.output


@pytest.mark.slow
def test_heads_are_trained_and_widened(tmp_path: Path) -> None:
    """By the command line, in a process; the bundled target, two steps."""
    small = {"tokens": 1024, "batch_tokens": 512, "documents": 200, "workers": 0, "device": "cpu"}
    shape = Shape(288, 7, 8, 2, 128, 704, 4096 + 8, 2048, 2056)
    plan = HeadPlan(methods=("dspark",), shape=shape, **small)  # type: ignore[arg-type]
    trained = train_heads(tmp_path, plan, Clock(300.0), lambda _: None)
    assert trained[0].problem is None, (tmp_path / "dspark.log").read_text()
    assert trained[0].steps == 2
    assert trained[0].acceptance_length is not None
    folders = widen(tmp_path, plan, Clock(100.0), lambda _: None)
    assert set(folders) == {"dspark"}
    assert (tmp_path / "target" / "config.json").is_file()
    assert bundled_asset("target") not in (folders["dspark"] / "config.json").read_text()


def test_clocks() -> None:
    now = 0.0
    clock = Clock(10.0, lambda: now)
    part = clock.part(4.0)
    assert (clock.left, part.left, clock.part(60.0).left) == (10.0, 4.0, 10.0)
    now = 5.0
    assert (clock.left, part.left) == (5.0, -1.0)


def test_an_unknown_part_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="parts='plots'"):
        list(run_blocks(BlocksPlan(tmp_path, ("plots",)), {}, Clock(1.0), lambda _: None))
