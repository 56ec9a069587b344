"""Sampled texts have the law of plain constrained sampling where several features meet.

The grammars have few texts, so that each one's probability can be written out: the target's logits
behind each beginning, masked, adjusted and warped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from guided_spec.engine.llm import LLM
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.adjust import (
    Adjustments,
    RuleTable,
    TokenRules,
    spell_bad_words,
)
from guided_spec.ops.sampling.warp import Sampling, warp
from guided_spec.types import SamplingParams
from tests.learned_heads import HeadedTarget, write_head
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy, tiny_model
from tests.toys import CPU, chi_square_p_value

PROMPT = "The age is"
NUM_SEEDS = 1500
UNLIKELY = 1e-6
Law = dict[tuple[int, ...], float]

FEW = GrammarSpec.regex("[a-c]{2,3}(1|2)?")
LONG = GrammarSpec.regex("[ab]{1,8}")
BEGUN = GrammarSpec.regex("ca[a-c]{2}(1|2)?")
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.4,
    "frequency_penalty": 0.8,
    "presence_penalty": -0.5,
}


class Case(NamedTuple):
    """proposer: a head's or ``draft_model``, alone or at the end of a chain."""

    proposer: str
    params: SamplingParams
    options: dict[str, Any]


def sampled(**changes: Any) -> SamplingParams:
    values = {"max_tokens": 6, "temperature": 1.0, "seed": 7, "grammar": FEW, **changes}
    return SamplingParams(**values)


TABLES = {"grammar_tables": "always"}
CASES = {
    "penalties, a chain, a table": Case(
        "chain:grammar_forced+draft_model", sampled(**PENALTIES), TABLES
    ),
    "penalties, forced at starts, a head's tables": Case(
        "chain:grammar_forced:start+eagle3", sampled(**PENALTIES, grammar=BEGUN), TABLES
    ),
    "biases, a block": Case("dflash", sampled(logit_bias={66: 1.0, 67: -1.0}), {}),
    "penalties, top-p, a loop": Case(
        "eagle3", sampled(**PENALTIES, temperature=0.8, top_p=0.95), {}
    ),
    "min-p, a block": Case("dspark", sampled(min_p=0.1), {}),
    "penalties, a block with a state": Case("domino", sampled(**PENALTIES), {}),
    "a chain, a packed block with a state": Case(
        "chain:grammar_forced+domino", sampled(grammar=BEGUN, top_p=0.95), {"kernels": "packed"}
    ),
    "a block of candidates": Case("lilicorr", sampled(), {}),
    "a budget's end, a block": Case("dflash", sampled(grammar=LONG, max_tokens=4), {}),
    "a budget's end, few draft tokens": Case("eagle3", sampled(grammar=LONG, max_tokens=4), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_law_of_whole_texts(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    target, draft = headed(case.proposer, tmp_path)
    options = {"max_batch_size": 60, "max_model_len": 32, "num_draft_tokens": 3, **case.options}
    with make_llm(target, case.proposer, draft, **options) as llm:
        exact = law(llm, case.params)
        found = llm.generate(PROMPT, replace(case.params, n=NUM_SEEDS))[0].completions
        others = law(llm, sampled(grammar=case.params.grammar, temperature=1.6))
    assert 0 < sum(sum(c.stats.accepted) for c in found) < sum(sum(c.stats.drafted) for c in found)
    counts = Counter(tuple(c.token_ids) for c in found)
    assert set(counts) <= set(exact)
    assert p_value(counts, exact) > UNLIKELY
    # Enough texts to tell their law from another one.
    assert p_value(counts, {text: others.get(text, 0.0) for text in exact}) < UNLIKELY


def p_value(counts: Counter[tuple[int, ...]], exact: Law) -> float:
    observed = torch.tensor([float(counts[text]) for text in exact])
    probabilities = torch.tensor(list(exact.values()), dtype=torch.float64)
    return chi_square_p_value(observed, probabilities / probabilities.sum())


def headed(proposer: str, folder: Path) -> HeadedTarget:
    if "draft_model" in proposer:
        return HeadedTarget(tiny_model("llama"), near_copy("llama"))  # type: ignore[arg-type]
    return write_head(folder, proposer.rpartition("+")[2], VOCAB_SIZE)


def law(llm: LLM, params: SamplingParams) -> Law:
    """The probability of every text."""
    assert params.grammar is not None
    assert llm._endings is not None
    compiled = llm._grammars.submit(params.grammar).result()
    compiled = llm._endings.bound(compiled, params.max_tokens, is_required=False)
    found: Law = {}
    open_texts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_texts:
        text, mass = open_texts.pop()
        if text and text[-1] in llm.vocabulary.stop_token_ids or len(text) == params.max_tokens:
            found[text] = mass
            continue
        following = next_probs(llm, params, compiled, text)
        rows = following.nonzero().flatten().tolist()
        open_texts += [((*text, token), mass * float(following[token])) for token in rows]
    return found


def next_probs(
    llm: LLM, params: SamplingParams, compiled: CompiledGrammar, text: tuple[int, ...]
) -> Tensor:
    """[V]: of the token behind a beginning."""
    matcher, tokens = compiled.new_matcher(), [*llm.encode(PROMPT), *text]
    assert all(map(matcher.accept_token, text))
    row = torch.zeros(1, num_mask_words(VOCAB_SIZE), dtype=torch.int32)
    matcher.fill_next_token_bitmask(row, 0)
    with torch.inference_mode():
        logits = llm.model(torch.tensor([tokens])).logits[:, -1:].float()
    logits = logits.masked_fill(~unpack_bitmask(row, VOCAB_SIZE), -torch.inf)
    words = spell_bad_words(params, llm.tokenizer, VOCAB_SIZE)
    rules = TokenRules(params, words, tuple(llm.vocabulary.stop_token_ids))
    table = RuleTable.stack([rules], VOCAB_SIZE, CPU)
    adjustments = Adjustments.stack(table, [tokens], [len(tokens) - len(text)])
    if adjustments is not None:
        logits = adjustments.apply(logits, torch.empty(1, 0, dtype=torch.int64))
    return warp(logits, Sampling.stack([params], [0], CPU))[0, 0].double()
