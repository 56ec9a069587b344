"""Measuring: workloads in, honest counts out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from guided_spec.errors import ConfigError
from guided_spec.evaluate.measurement import (
    Measurement,
    Plan,
    WorkItem,
    is_valid,
    load_workload,
    run_plan,
)
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.training.data.records import read_grammar
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, near_copy

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
LINES = [
    {"prompt": "A", "schema": SCHEMA, "answer": {"name": "Ada", "ok": True}},
    {"prompt": "call", "regex": "[0-9]{3}-[a-z]{4}"},
    {"prompt": "cat or dog", "choice": ["a cat", "a dog"]},
    {"messages": [{"role": "user", "content": "hi"}]},
]


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.jsonl"
    path.write_text("\n\n".join(map(json.dumps, LINES)) + "\n", encoding="utf-8")
    return path


def test_a_workload(workload: Path) -> None:
    items = load_workload(workload)
    assert items == [
        WorkItem("A", GrammarSpec.json_schema(SCHEMA), {"name": "Ada", "ok": True}),
        WorkItem("call", GrammarSpec.regex("[0-9]{3}-[a-z]{4}")),
        WorkItem("cat or dog", GrammarSpec.choice(["a cat", "a dog"])),
        WorkItem([{"role": "user", "content": "hi"}], None),
    ]
    assert load_workload(workload, 2) == items[:2]


def test_a_request_may_ask_for_any_grammar() -> None:
    regex = GrammarSpec.regex("b")
    for record, expected in (
        ({"lark": "start: A"}, GrammarSpec.lark("start: A")),
        ({"regex": "b", "after": "</think>"}, regex.after("</think>")),
        ({"regex": "b", "after": True}, regex.after()),
        ({"regex": "b", "reasoning_budget": 9}, regex.after(reasoning_budget=9)),
    ):
        assert read_grammar(record) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no requests"),
        ('{"prompt": "a"}\n{"prompt": ', ":2': is not JSON"),
        ("\n[1, 2]\n", ":2': must be a JSON object"),
        ('{"schema": {}}', ":1': has neither prompt nor messages"),
        (
            '{"prompt": "a", "grammar": "b"}',
            ":1': grammar='b': is unknown; the keys are additional_properties, after, .*",
        ),
        ('{"prompt": "a", "reasoning_budget": 3}', ":1': after=None: needs a grammar"),
        ('{"prompt": "a", "choice": []}', "must be a non-empty list"),
        ('{"prompt": "a", "regex": 5}', "must be a str"),
        ('{"prompt": "a", "schema": 5}', "must be a dict"),
    ],
)
def test_a_broken_workload(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "workload.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_workload(path)


def test_an_unreadable_workload(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_workload(tmp_path / "absent.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_workload(tmp_path / "binary")


@pytest.fixture(scope="module")
def measured() -> tuple[list[Measurement], list[str]]:
    items = [
        WorkItem("A", GrammarSpec.json_schema(SCHEMA)),
        WorkItem("call", GrammarSpec.regex("[0-9]{3}-[a-z]{4}")),
        WorkItem("cat or dog", GrammarSpec.choice(["a cat", "a dog"])),
        WorkItem("free", None),
    ]
    names: list[str] = []
    proposers = ["ngram", "none", "chain:grammar_forced+draft_model", "ngram"]
    with make_llm("llama", "none", near_copy("llama"), max_batch_size=1) as llm:
        plan = Plan(items, proposers, SamplingParams(max_tokens=32), with_transformers=True)
        return run_plan(llm, plan, names.append), names


@pytest.mark.slow
def test_every_way_is_measured_once_in_order(
    measured: tuple[list[Measurement], list[str]],
) -> None:
    measurements, names = measured
    assert names == ["none", "transformers", "ngram", "chain:grammar_forced+draft_model"]
    assert [m.name for m in measurements] == names


@pytest.mark.slow
def test_forwards_and_tokens(measured: tuple[list[Measurement], list[str]]) -> None:
    plain, transformers, ngram, chain = measured[0]
    assert {m.tokens for m in measured[0]} == {plain.tokens}  # the same texts
    assert plain.forwards == plain.tokens == transformers.forwards
    assert plain.forwards_per_token == 1.0
    assert plain.drafted == plain.accepted == 0
    assert chain.forwards < plain.forwards
    assert 0 < chain.accepted <= chain.drafted
    assert chain.forced > 0
    assert chain.acceptance_length == pytest.approx(chain.tokens / chain.forwards)
    assert ngram.forwards <= plain.forwards


@pytest.mark.slow
def test_validity_and_sameness(measured: tuple[list[Measurement], list[str]]) -> None:
    for measurement in measured[0]:
        assert (measurement.requests, measurement.failed) == (4, 0)
        assert measurement.valid == 1.0
        assert measurement.same_text == 1.0
        assert measurement.seconds > 0
    assert measured[0][1].mask_microseconds is None  # transformers does not tell
    assert measured[0][0].mask_microseconds is not None


def test_a_measurement_is_json(measured: tuple[list[Measurement], list[str]]) -> None:
    for measurement in measured[0]:
        record = json.loads(json.dumps(measurement.as_dict()))
        assert record["forwards_per_token"] == measurement.forwards_per_token
        assert record["tokens_per_second"] == pytest.approx(
            measurement.tokens / measurement.seconds
        )


@pytest.mark.slow
def test_another_text_is_noticed() -> None:
    """At temperature 1 with a drawn seed the texts differ, and a broken request is counted."""
    items = [WorkItem("A", GrammarSpec.regex("[a-z]{12}")), WorkItem("A", GrammarSpec.regex("("))]
    params = SamplingParams(max_tokens=16, temperature=1.5)
    names: list[str] = []
    with make_llm("llama") as llm:
        plan = Plan(items, ["ngram"], params, with_transformers=False)
        measurements = run_plan(llm, plan, names.append)
    assert [m.name for m in measurements] == ["none", "ngram"] == names
    assert [m.failed for m in measurements] == [1, 1]
    assert [m.same_text for m in measurements] == [1.0, 0.5]


@pytest.mark.parametrize(
    ("text", "grammar", "expected"),
    [
        ("anything", None, True),
        ('{"name": "a", "ok": true}', GrammarSpec.json_schema(SCHEMA), True),
        ('{"name": "a"}', GrammarSpec.json_schema(SCHEMA), False),
        ("{", GrammarSpec.json_schema(SCHEMA), False),
        ("{}", GrammarSpec.json_object(), True),
        ("[]", GrammarSpec.json_object(), False),
        ("ab", GrammarSpec.regex("a."), True),
        ("abc", GrammarSpec.regex("a."), False),
        ("x", GrammarSpec.choice(["x", "y"]), True),
        ("z", GrammarSpec.choice(["x", "y"]), False),
        ("free </t>ab", GrammarSpec.regex("a.").after("</t>"), True),
        ("ab</t>free", GrammarSpec.regex("a.").after("</t>"), False),
        ("ab", GrammarSpec.regex("a.").after("</t>"), True),
        ("free </think>ab", GrammarSpec.regex("a.").after(), True),
        ("free </think>b", GrammarSpec.regex("a.").after(), False),
        ("not seen", GrammarSpec.regex("a.").after([1]), True),
        ("no judge", GrammarSpec.ebnf('root ::= "a"'), True),
    ],
)
def test_the_judge(text: str, grammar: GrammarSpec | None, *, expected: bool) -> None:
    assert is_valid(text, grammar) is expected
