"""Answers in three ways, and who is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import WAYS, ask, first_json, is_call, is_number, main
from guided_spec.evaluate.measurement import is_valid, load_tasks

TRUTH: Any = [{"book": {"city": ["Rome", "Roma"], "nights": [2], "pets": [False, ""]}}]


def call(**arguments: Any) -> dict[str, Any]:
    return {"name": "book", "arguments": arguments}


@pytest.mark.parametrize(
    ("found", "is_right"),
    [
        (call(city="Rome", nights=2), True),
        (call(city="ro-ma.", nights=2.0, pets=False), True),
        ([call(city="Rome", nights=2)], True),
        (call(city="Rome", nights=2, pets=True), False),
        (call(city="Rome", nights=2, pets=0), False),
        (call(city="Rome", nights=3), False),
        (call(city="Rome"), False),  # only what may be "" may be left out
        (call(city="Rome", nights=2, days=2), False),
        ({"name": "sell", "arguments": {"city": "Rome", "nights": 2}}, False),
        ([call(city="Rome", nights=2)] * 2, False),
        ([], False),
        (None, False),
        ("book", False),
        ({"name": "book"}, False),
    ],
)
def test_calls_by_the_rules_of_bfcl(found: Any, *, is_right: bool) -> None:
    assert is_call(found, TRUTH) is is_right


def test_parallel_calls_come_in_any_order() -> None:
    truth: Any = [{"f": {"x": [1]}}, {"f": {"x": [2]}}]
    calls = [{"name": "f", "arguments": {"x": x}} for x in (2, 1)]
    assert is_call(calls, truth)
    assert not is_call([calls[0]] * 2, truth)


def test_members_and_items_have_accepted_values() -> None:
    truth: Any = [{"f": {"o": [{"a": [1, 2], "b": ["", 5]}], "l": [["x", "Y"]]}}]

    def asked(o: Any, items: Any) -> dict[str, Any]:
        return {"name": "f", "arguments": {"o": o, "l": items}}

    assert is_call(asked({"a": 2}, ["X", "y"]), truth)
    assert not is_call(asked({"a": 3}, ["X", "y"]), truth)
    assert not is_call(asked({"b": 5}, ["X", "y"]), truth)
    assert not is_call(asked({"a": 2, "c": 1}, ["X", "y"]), truth)
    assert not is_call(asked({"a": 2}, ["X"]), truth)


@pytest.mark.parametrize(
    ("text", "expected", "is_right"),
    [
        ('{"reasoning": "2 + 2", "answer": 4}', 4.0, True),
        ('So it is 3. {"answer": "1,200"} 7', 1200.0, True),
        ("First 3, so the total is $1,200.", 1200.0, True),
        ("First 1200, and then 3", 1200.0, False),
        ('{"answer": null} 4', 4.0, False),
        ("none", 4.0, False),
    ],
)
def test_numbers(text: str, expected: float, *, is_right: bool) -> None:
    assert is_number(first_json(text), text, expected) is is_right


def test_the_first_json_of_a_text() -> None:
    assert first_json('I {think} so: {"a": [1]} or {"a": 2}') == {"a": [1]}
    assert first_json("[1, 2") is None


def test_the_accepted_values_of_each_tool_are_right() -> None:
    """Of each argument that may not be left out, the first one."""
    for item in load_tasks(["tools"]):
        calls = [
            {"name": name, "arguments": {k: v[0] for k, v in accepted.items() if "" not in v}}
            for one in item.answer
            for name, accepted in one.items()
        ]
        if any("[{" in json.dumps(one) for one in item.answer):
            continue  # of objects each member has a list
        assert is_call(calls if len(calls) > 1 else calls[0], item.answer)


def test_only_the_way_differs() -> None:
    for item in load_tasks(["arithmetic", "tools"], 2):
        free, grammar, reasoning = (ask(item, way) for way in WAYS)
        assert free.grammar is None
        assert free.prompt == grammar.prompt == item.prompt
        assert grammar.grammar == item.grammar
        assert reasoning.grammar is not None
        assert reasoning.grammar.start is not None
        assert "Answer:" in reasoning.prompt[-1]["content"]
    assert is_valid(
        'Two. Answer:{"answer": 2}', ask(load_tasks(["arithmetic"], 1)[0], "reasoning").grammar
    )


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "quality.json"
    main(["--limit", "1", "--max-tokens", "24", "--output", str(output)])
    rows = json.loads(output.read_text())
    assert [(row["task"], row["way"]) for row in rows] == [
        (task, way) for task in ("arithmetic", "tools") for way in WAYS
    ]
    assert all(row["valid"] == 1 for row in rows if row["way"] == "grammar")
    assert capsys.readouterr().out.count("| arithmetic |") == 3
