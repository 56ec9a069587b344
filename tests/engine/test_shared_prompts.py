"""Requests with the same prompt read it once: the target, and whoever drafts with a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from guided_spec.engine.outputs import Completion
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.heads.block.runner import BlockRunner
from guided_spec.models.heads.slot_head import SlotHead
from guided_spec.models.line_lm import LineLM
from guided_spec.models.packed.slot_head import PackedSlotHead
from guided_spec.models.slot_lm import SlotLM
from guided_spec.types import SamplingParams
from tests.learned_heads import HeadedTarget, write_head
from tests.models.tiny import build
from tests.tiny_llm import VOCAB_SIZE, make_llm

PROMPT = [5 + at % 60 for at in range(70)]
PARAMS = SamplingParams(max_tokens=9, temperature=1.0, seed=3)
HEADS = [
    *("eagle3", "chain:grammar_forced+eagle3", "chain:grammar_forced:start+eagle3", "dflash"),
    *("deepseek_mtp", "chain:ngram+glm4_moe_mtp"),
]


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    def make(method: str) -> HeadedTarget:
        return write_head(tmp_path_factory.mktemp(method) / method, method, VOCAB_SIZE)

    made: dict[str, HeadedTarget] = {}
    return lambda method: made.get(method) or made.setdefault(method, make(method))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[Any]:
    """Tokens that each kind of model reads in rows longer than a draft."""
    counts = Counter[Any]()
    forward_line, forwards = LineLM.forward_line, {form: form.forward for form in (SlotLM, LineLM)}

    def count(lm: Any, lengths: Sequence[int]) -> None:
        counts[lm.config.model_type] += sum(length for length in lengths if length > 12)

    def feeding(lm: Any, inputs: Any, **options: Any) -> Any:
        count(lm, inputs.counts)
        return forwards[type(lm)](lm, inputs, **options)

    def feeding_a_line(lm: Any, token_ids: Any, rows: Any, *options: Any) -> Any:
        count(lm, rows.counts)
        return forward_line(lm, token_ids, rows, *options)

    for form in forwards:
        monkeypatch.setattr(form, "forward", feeding)
    monkeypatch.setattr(LineLM, "forward_line", feeding_a_line)
    for kind in (SlotHead, PackedSlotHead, BlockRunner):

        def reading(
            head: Any, slots: Any, tokens: Any, states: Any, *, read: Any = kind.read
        ) -> None:
            counts["head"] += sum(len(row) for row in tokens if len(row) > 12)
            read(head, slots, tokens, states)

        monkeypatch.setattr(kind, "read", reading)
    return counts


def tokens(found: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in found]


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["stock", "packed"])
@pytest.mark.parametrize("proposer", HEADS)
def test_a_head_reads_it_once(
    headed: Any, reads: Counter[Any], proposer: str, kernels: Any
) -> None:
    known = headed(proposer.rpartition("+")[2])
    model_type = known.target.config.model_type
    for params in (PARAMS, replace(PARAMS, grammar=GrammarSpec.regex("[a-f]{3,7}"))):
        with make_llm(known.target, proposer, known.draft, kernels=kernels) as llm:
            (output,) = llm.generate(PROMPT, replace(params, n=4))
            assert (reads[model_type], reads["head"]) == (len(PROMPT) - 1, len(PROMPT) - 1)
            alone = [llm.generate(PROMPT, replace(params, seed=3 + at))[0] for at in range(4)]
        assert tokens(output.completions) == [one.token_ids for one in alone]
        reads.clear()


@pytest.mark.slow
@pytest.mark.parametrize("draft", ["qwen3", "qwen3_5"])  # the second has a linear state
@pytest.mark.parametrize("proposer", ["draft_model", "chain:grammar_forced+draft_model"])
def test_a_draft_model_reads_it_once(reads: Counter[Any], draft: str, proposer: str) -> None:
    model = build(draft, vocab_size=VOCAB_SIZE)
    with make_llm("llama", proposer, model, prefill_tokens=32) as llm:
        (output,) = llm.generate(PROMPT, replace(PARAMS, n=4))
        read = reads.pop(model.config.model_type)
        alone = [llm.generate(PROMPT, replace(PARAMS, seed=3 + at))[0] for at in range(4)]
    assert len(PROMPT) - 13 <= read <= len(PROMPT)
    assert tokens(output.completions) == [one.token_ids for one in alone]


def test_late_samples_read_it_once_for_all(reads: Counter[Any]) -> None:
    """Where keys and values are all there is, they are still there."""
    model = build("qwen3", vocab_size=VOCAB_SIZE)
    params = [replace(PARAMS, seed=at, max_tokens=3 + 4 * at) for at in range(6)]
    with make_llm("llama", "draft_model", model, max_batch_size=3) as llm:
        found = llm.generate([PROMPT] * 6, params)
        assert reads["llama"] == len(PROMPT) - 1
        assert reads["qwen3"] == len(PROMPT) - 1
        alone = [llm.generate(PROMPT, one)[0] for one in params]
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]


@pytest.mark.parametrize("length", [1, 2, 70])
def test_other_prompts_are_read_for_themselves(
    headed: Any, reads: Counter[Any], length: int
) -> None:
    known = headed("eagle3")
    prompts = [PROMPT[:length], [*PROMPT[: length - 1], 9], PROMPT[:length]]
    params = [replace(PARAMS, seed=at) for at in range(3)]
    with make_llm(known.target, "eagle3", known.draft) as llm:
        found = llm.generate(prompts, params)
        if length == 70:
            assert reads["head"] == 2 * 69
        alone = [llm.generate([one], [p])[0] for one, p in zip(prompts, params, strict=True)]
    assert [one.token_ids for one in found] == [one.token_ids for one in alone]
