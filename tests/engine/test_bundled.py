"""The pair that comes with the package, on documents it was not trained on."""

from __future__ import annotations

from pathlib import Path

from guided_spec.bench.validity import is_valid
from guided_spec.bench.workload import load_workload
from guided_spec.engine.llm import LLM
from guided_spec.engine.setup import bundled_asset
from guided_spec.types import SamplingParams

ITEMS = load_workload(Path(bundled_asset("heldout.jsonl")), 12)
PROMPTS = [item.prompt for item in ITEMS]
PARAMS = [SamplingParams(grammar=item.grammar) for item in ITEMS]


def test_speculation_changes_the_cost_and_nothing_else() -> None:
    with LLM() as llm:
        assert llm.proposer == "chain:grammar_forced+draft_model"
        found = llm.generate(PROMPTS, PARAMS)
    with llm.with_proposer("none") as other:
        plain = other.generate(PROMPTS, PARAMS)
    assert [output.token_ids for output in found] == [output.token_ids for output in plain]
    assert all(is_valid(o.text, i.grammar) for o, i in zip(found, ITEMS, strict=True))
    assert all(output.finish_reason == "stop" for output in found)
    forwards = sum(output.stats.steps for output in found)
    tokens = sum(output.stats.output_tokens for output in found)
    assert forwards < 0.4 * tokens
    assert all(output.stats.forwards_per_token == 1.0 for output in plain)


def test_most_answers_are_right() -> None:
    with LLM() as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    right = [output.text == item.answer for output, item in zip(outputs, ITEMS, strict=True)]
    assert sum(right) >= 0.6 * len(right)
