"""How many tokens of a text a budget had a say in: counted once a token, whoever drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.grammar.completion.completion import CompletingGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, near_copy

PROPOSERS = (
    "none",
    "draft_model:validate",
    "chain:grammar_forced+draft_model",
)
WORDS = GrammarSpec.regex("([a-z]+,)*end")
ITEMS = GrammarSpec.json_schema({"type": "array", "items": {"enum": ["cat", 3, None]}})
CASES = (
    (WORDS, 12),
    (ITEMS, 9),
    (GrammarSpec.json_object(), 24),
    (WORDS.after("<think>", reasoning_budget=5), 20),
    (GrammarSpec.regex("[a-f]{3}"), 60),
    (GrammarSpec.regex("[a-f]{3,30}").with_backend("llguidance"), 12),
)


def steered(llm: LLM, spec: GrammarSpec, budget: int, tokens: Sequence[int]) -> int:
    """By definition: rows with the budget and without, at every token."""
    compiled = llm._grammars.submit(spec).result()
    own = compiled.new_matcher()
    assert llm._endings is not None
    within = CompletingGrammar(compiled, llm._endings.of(compiled), budget).new_matcher()
    rows = np.zeros((2, -(-llm.vocabulary.vocab_size // 32)), dtype=np.int32)
    found = 0
    for token in tokens:
        own.fill_next_token_bitmask(rows, 0)
        within.fill_next_token_bitmask(rows, 1)
        own_bits, within_bits = unpack_bitmask(torch.from_numpy(rows), llm.vocabulary.vocab_size)
        found += not torch.equal(own_bits, within_bits)
        assert own.accept_token(token)
        assert within.accept_token(token)
    return found


def run(llm: LLM, requests: Sequence[tuple[GrammarSpec, int]], **params: Any) -> list[Completion]:
    wishes = [SamplingParams(max_tokens=b, grammar=spec, **params) for spec, b in requests]
    outputs = llm.generate(["The name"] * len(wishes), wishes, on_error="return")
    assert [output.error for output in outputs] == [None] * len(wishes)
    return [output.completions[0] for output in outputs]


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_count_is_that_of_the_definition(proposer: str) -> None:
    pytest.importorskip("llguidance")
    with make_llm("llama", proposer, near_copy("llama"), max_batch_size=6) as llm:
        for heat in (0.0, 1.0):
            found = run(llm, CASES, temperature=heat, seed=3)
            expected = [
                steered(llm, spec, budget, completion.token_ids)
                for (spec, budget), completion in zip(CASES, found, strict=True)
            ]
            assert [completion.stats.steered for completion in found] == expected
            assert expected[0] > 0
            assert expected[4] == 0  # its text is short, and the budget far


def test_without_a_budget_nothing_is_steered() -> None:
    with make_llm("llama", "ngram", max_batch_size=6) as llm:
        cut = run(llm, CASES[:3], complete=False)
        assert [completion.stats.steered for completion in cut] == [0, 0, 0]
        free = llm.generate("A", SamplingParams(max_tokens=5))[0]
        assert free.stats.steered == 0
        assert free.stats.as_dict()["steered"] == 0


def test_tokens_behind_a_stop_string_do_not_count() -> None:
    with make_llm("llama", "chain:grammar_forced+draft_model", near_copy("llama")) as llm:
        spec = GrammarSpec.regex("[a-f]*(?:xyz){6}end")
        whole = run(llm, [(spec, 24)])[0]
        assert whole.stats.steered > 0
        cut = run(llm, [(spec, 24)], stop="zx")[0]
        assert len(cut.token_ids) < len(whole.token_ids)
        assert cut.stats.steered == steered(llm, spec, 24, cut.token_ids)
