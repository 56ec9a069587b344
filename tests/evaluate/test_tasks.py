"""The tasks that come with the package, and what is measured of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from guided_spec.bundled import bundled_asset
from guided_spec.errors import ConfigError
from guided_spec.evaluate.gains import gains_markdown
from guided_spec.evaluate.measurement import (
    TASKS,
    Measurement,
    Plan,
    WorkItem,
    is_valid,
    load_tasks,
    run_plan,
)
from guided_spec.evaluate.plots import Origin
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, near_copy

SIZE_LIMIT = 400_000


def test_every_task_is_a_file_of_its_own_and_small() -> None:
    folder = Path(bundled_asset("tasks"))
    assert {path.stem for path in folder.glob("*.jsonl")} == set(TASKS)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= SIZE_LIMIT
    table = (folder / "README.md").read_text(encoding="utf-8")
    for name in TASKS:
        assert f"| `{name}` | {len(load_tasks([name]))} |" in table


def test_tasks_are_whole_or_a_part() -> None:
    items = load_tasks(["tools", "chat", "tools"], 3)
    assert [item.task for item in items] == ["tools"] * 3 + ["chat"] * 3
    assert all(isinstance(item.prompt, list) for item in items)
    assert [item.grammar is None for item in items] == [False] * 3 + [True] * 3
    assert all(item.answer for item in items[:3])


def test_no_prompt_stands_twice() -> None:
    prompts = [json.dumps(item.prompt) for item in load_tasks(TASKS)]
    assert len(set(prompts)) == len(prompts)


def test_an_unknown_task() -> None:
    with pytest.raises(ConfigError, match="tasks='poetry': must be one of extraction, "):
        load_tasks(["poetry"])


@pytest.mark.slow
def test_every_schema_compiles_and_is_no_other_than_what_judges() -> None:
    """A text of each grammar is valid for the judge, which reads the schema by itself."""
    items = [item for item in load_tasks(TASKS) if item.grammar is not None]
    with make_llm("llama") as llm:
        llm.compile(item.grammar for item in items if item.grammar is not None)
        chosen = items[:: max(1, len(items) // 12)]
        params = [SamplingParams(max_tokens=400, grammar=item.grammar) for item in chosen]
        outputs = llm.generate(["A"] * len(chosen), params)
    assert all(output.is_complete for output in outputs)
    assert all(is_valid(o.text, i.grammar) for o, i in zip(outputs, chosen, strict=True))


@pytest.fixture(scope="module")
def measured() -> list[Measurement]:
    items = [
        WorkItem("A", GrammarSpec.regex("[0-9]{3}-abcdef-[a-z]{4}"), task="codes"),
        WorkItem("free", None, task="talk"),
        WorkItem("A", GrammarSpec.regex("[a-z]{4}").after("!"), task="talk"),
        WorkItem("B", GrammarSpec.regex("[0-9]{2}-abc"), task="codes"),
    ]
    params = SamplingParams(max_tokens=24, seed=1)
    proposers = ["chain:grammar_forced+draft_model"]
    with make_llm("llama", "none", near_copy("llama"), max_batch_size=2) as llm:
        settings: Any = {"with_transformers": False, "by_kind": True}
        plan = Plan(
            items,
            proposers,
            params,
            batch_sizes=(2,),
            temperatures=(0.0, 0.9),
            **settings,
        )
        names: list[str] = []
        return run_plan(llm, plan, names.append)


def test_tasks_are_measured_apart(measured: list[Measurement]) -> None:
    keys = [(m.name, m.temperature, m.task) for m in measured]
    each = [(heat, task) for heat in (0.0, 0.9) for task in ("codes", "talk")]
    assert keys == [
        (name, *rest) for name in ("none", "chain:grammar_forced+draft_model") for rest in each
    ]
    assert all(m.requests == 2 and m.valid == 1.0 for m in measured)
    assert all(m.same_text == 1.0 for m in measured if m.temperature == 0)


def test_kinds_add_up(measured: list[Measurement]) -> None:
    for m in measured:
        assert m.kinds is not None
        if m.temperature == 0:  # the traced texts are the timed ones
            assert sum(kind.written for kind in m.kinds) == m.tokens
            assert sum(kind.accepted for kind in m.kinds) <= m.accepted
        assert all(kind.accepted <= kind.drafted for kind in m.kinds)
        assert m.kinds.forced.accepted == m.kinds.forced.drafted  # nothing else can be drawn there
    codes, talk = (measured[at].kinds for at in (0, 1))
    assert codes is not None
    assert talk is not None
    assert codes.free.written == 0 < codes.forced.written
    assert talk.free.written > 0
    record = json.loads(json.dumps(measured[0].as_dict()))
    assert record["kinds"]["forced"]["written"] == codes.forced.written


def test_markdown_compares_with_plain_decoding() -> None:
    plain = Measurement("none", 2, 0, 100, 10.0, 100, task="chat")
    fast = Measurement("eagle3", 2, 0, 100, 5.0, 40, 120, 60, task="chat", draft="a/head")
    text = gains_markdown([plain, fast], "org/model", Origin("command", "here", "1.0", "today"))
    assert "Model: org/model. here; 1.0; today." in text
    assert "| `eagle3=head` | 0 | 1 | 2.00 (2.50) |" in text
    assert "| chat | 0 | 1 | `eagle3=head` | 20 | 2.50 | 50% |" in text
