"""The pair that comes with the package, on documents it was not trained on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from guided_spec.bundled import bundled_asset
from guided_spec.engine.llm import LLM
from guided_spec.errors import ModelError
from guided_spec.evaluate.measurement import is_valid, load_workload
from guided_spec.types import SamplingParams

ITEMS = load_workload(Path(bundled_asset("heldout.jsonl")), 12)
PROMPTS = [item.prompt for item in ITEMS]
PARAMS = [SamplingParams(grammar=item.grammar) for item in ITEMS]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "proposer", ["eagle3", "mtp:validate", "dspark", "chain:grammar_forced+eagle3"]
)
def test_the_bundled_heads_are_found_by_their_names(proposer: str) -> None:
    with LLM(proposer=proposer) as llm:
        outputs = llm.generate(PROMPTS[:2], PARAMS[:2])
        assert sum(sum(output.stats.accepted) for output in outputs) > 0
        with llm.with_proposer("draft_model") as other:
            found = other.generate(PROMPTS[:2], PARAMS[:2])
    assert [output.text for output in found] == [output.text for output in outputs]


def test_another_draft_is_taken_at_its_word() -> None:
    with pytest.raises(ModelError, match="draft"):
        LLM(proposer="eagle3", draft=bundled_asset("draft"))


def test_the_bundled_draft_has_a_name_too() -> None:
    with LLM("bundled", "eagle3", draft="bundled") as llm:
        assert llm.proposer == "eagle3"
        with llm.with_proposer("chain:grammar_forced+auto", "bundled") as other:
            assert other.proposer == "chain:grammar_forced+draft_model"


@pytest.mark.parametrize("proposer", [None, "eagle3", "draft_model"])
@pytest.mark.parametrize("damage", ["absent", "empty", "corrupt"])
def test_a_draft_that_cannot_be_loaded_is_named_as_such(
    tmp_path: Path, proposer: str | None, damage: str
) -> None:
    draft = tmp_path / "draft"
    if damage == "empty":
        draft.mkdir()
    if damage == "corrupt":
        shutil.copytree(bundled_asset("draft"), draft)
        (draft / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelError, match=f"^draft={str(draft)!r}"):
        LLM(proposer=proposer, draft=str(draft))


def test_most_answers_are_right() -> None:
    with LLM("bundled") as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
    right = [output.text == item.answer for output, item in zip(outputs, ITEMS, strict=True)]
    assert sum(right) >= 0.6 * len(right)
