"""Prompts for heads of a published model: what the tasks ask is in none of them."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.head_prompts import held_out, main, make_prompts
from guided_spec.bundled import bundled_asset
from guided_spec.evaluate.measurement import TASKS, load_tasks

TASKS_FOLDER = Path(bundled_asset("tasks"))
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def call_of(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": CITY},
        "required": ["name", "arguments"],
    }


def bfcl_row(name: str, function: str) -> dict[str, Any]:
    return {
        "id": name,
        "messages": [{"role": "user", "content": f"Call {function} for Oslo."}],
        "tools": [{"name": function, "parameters": CITY}],
        "output_schema": call_of(function),
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    function = sorted(held_out(TASKS_FOLDER).functions)[0]
    first = json.loads((TASKS_FOLDER / "arithmetic.jsonl").read_text().splitlines()[0])
    (tmp_path / "prompts").mkdir()
    (tmp_path / "jsonschemabench").mkdir()
    bfcl = [bfcl_row("new_1", "find_a_city"), bfcl_row("new_2", function)]
    with gzip.open(tmp_path / "prompts/bfcl.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in bfcl)
    sums = [{"id": first["id"], "question": "Held out?"}, {"id": "own", "question": "One and one?"}]
    (tmp_path / "prompts/gsm8k.jsonl").write_text("\n".join(map(json.dumps, sums)))
    turns = [
        {"question_id": 81, "category": "writing", "turns": ["Of the task chat."]},
        {"question_id": 7, "category": "qa", "turns": ["Who wrote it?"]},
    ]
    (tmp_path / "prompts/spec_bench.jsonl").write_text("\n".join(map(json.dumps, turns)))
    drawn = {"id": "a---1", "schema": CITY, "tests": [{"valid": True, "data": {"city": "Bergen"}}]}
    with gzip.open(tmp_path / "jsonschemabench/dev.jsonl.gz", "wt") as file:
        file.write(json.dumps(drawn) + "\n")
    return tmp_path


def test_held_out_prompts_and_functions_stay_out(data: Path) -> None:
    prompts = make_prompts(data, held_out(TASKS_FOLDER), 0)
    assert {prompt["id"] for prompt in prompts} == {
        *("new_1", "own", "spec_bench-7", "spec_bench-7-0", "spec_bench-7-1", "a---1"),
        "a---1-values",
    }
    texts = {prompt["id"]: prompt["messages"][0]["content"] for prompt in prompts}
    assert '"Bergen"' in texts["a---1-values"]
    assert {prompt["id"] for prompt in prompts if "schema" not in prompt} == {"spec_bench-7"}


def test_the_order_is_drawn_by_the_seed(data: Path) -> None:
    orders = [make_prompts(data, held_out(TASKS_FOLDER), seed) for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_all_tasks_are_held_out() -> None:
    found = held_out(TASKS_FOLDER)
    assert len(found.ids) == len(load_tasks(list(TASKS)))
    assert len(found.functions) > 50


def test_the_command_writes_lines(data: Path, tmp_path: Path) -> None:
    output = tmp_path / "prompts.jsonl"
    main(data, output, copies=2)
    lines = output.read_text().splitlines()
    assert len(lines) == 14
    assert lines[:7] == lines[7:]
