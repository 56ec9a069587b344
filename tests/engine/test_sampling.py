"""Seeds repeat a text in any company, and the texts have the model's own distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.engine.llm import LLM
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.line_lm import LineLM
from guided_spec.models.packed.packed_lm import LineOutput, Rows
from guided_spec.models.slot_lm import SlotLM
from guided_spec.models.stock.slots import SlotInputs, SlotOutput
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.types import MAX_SEED, SamplingParams
from tests.models.heads.block_checkpoints import write_dflash
from tests.tiny_llm import make_llm, near_copy, tiny_model
from tests.toys import chi_square_p_value

PROPOSERS = ("none", "ngram", "draft_model", "chain:grammar_forced+draft_model")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
}
PROMPTS = ("A", "The name of the cat is", "123-", "on and on and on", "a")
PARAMS = (
    SamplingParams(max_tokens=24, temperature=1.0, seed=1, grammar=GrammarSpec.json_schema(SCHEMA)),
    SamplingParams(max_tokens=16, temperature=0.7, seed=2, top_p=0.9),
    SamplingParams(max_tokens=24, temperature=1.0, seed=3, grammar=GrammarSpec.regex("[a-z]{9}")),
    SamplingParams(max_tokens=12, temperature=2.0, seed=4, top_k=20, min_p=0.01),
    SamplingParams(max_tokens=10),
)


def run(llm: LLM, indices: Sequence[int]) -> dict[int, list[int]]:
    outputs = llm.generate(
        [PROMPTS[i] for i in indices], [PARAMS[i] for i in indices], on_error="return"
    )
    assert [output.error for output in outputs] == [None] * len(indices)
    return {i: output.token_ids for i, output in zip(indices, outputs, strict=True)}


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_the_same_alone_and_in_any_batch(architecture: str, proposer: str) -> None:
    draft = near_copy(architecture)
    with make_llm(architecture, proposer, draft, max_batch_size=4, prefill_tokens=9) as llm:
        alone = {i: run(llm, [i])[i] for i in range(5)}
        assert run(llm, [0, 1, 2, 3, 4]) == alone
        assert run(llm, [3, 4, 1, 0, 2]) == alone
        assert run(llm, [2, 1]) == {i: alone[i] for i in (1, 2)}


ONE_SEED = (
    ("A", GrammarSpec.regex("[a-d]-[a-d]")),
    ("A", GrammarSpec.regex("[a-d][a-d]([ab]x|[cd])[a-d]")),
    ("b", GrammarSpec.regex("[a-d]-[a-d]")),
)


def one_seed(llm: LLM, seed: int, rows: Sequence[int]) -> list[str]:
    prompts, grammars = zip(*(ONE_SEED[row] for row in rows), strict=True)
    params = [SamplingParams(temperature=1.0, seed=seed, grammar=grammar) for grammar in grammars]
    return [output.text for output in llm.generate(prompts, params)]


def test_one_seed_for_a_batch(uniform: PreTrainedModel) -> None:
    """A text is the same alone, in company, and beside itself; others do not resemble it."""
    proposer = "chain:grammar_forced+draft_model"
    with make_llm(uniform, proposer, uniform) as llm:
        resembling = 0
        for seed in range(12):
            together = one_seed(llm, seed, [0, 1, 2, 0])
            assert together[3] == together[0]
            assert together[:3] == [one_seed(llm, seed, [row])[0] for row in range(3)]
            resembling += together[0] == together[2]
    assert resembling < 4


def test_seeds_decide() -> None:
    grammar = GrammarSpec.regex("[a-z]{12}")
    with make_llm("llama", "draft_model", near_copy("llama")) as llm:

        def texts(seeds: Sequence[int | None]) -> list[str]:
            params = [SamplingParams(temperature=1.5, seed=s, grammar=grammar) for s in seeds]
            return [
                output.text
                for output in llm.generate(["A"] * len(params), params, on_error="return")
            ]

        seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**62, MAX_SEED]
        first = texts(seeds)
        assert len(set(first)) == len(seeds)
        assert texts(seeds) == first
        assert len(set(texts([None] * 6))) > 1


def test_a_drawn_seed_is_reported_and_repeats_the_text() -> None:
    grammar = GrammarSpec.regex("[a-z]{12}")
    with make_llm("llama", "ngram") as llm:
        drawn = llm.generate("A", SamplingParams(temperature=1.5, grammar=grammar))[0]
        assert 0 <= drawn.stats.seed <= MAX_SEED
        params = SamplingParams(temperature=1.5, grammar=grammar, seed=drawn.stats.seed)
        assert llm.generate("A", params)[0].text == drawn.text


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_samples_are_the_texts_of_successive_seeds(architecture: str) -> None:
    """More samples than slots: late ones take the prompt over from one that already writes."""
    params: dict[str, Any] = {"temperature": 1.0, "max_tokens": 10}
    draft = near_copy(architecture)
    with make_llm(architecture, "draft_model", draft, max_batch_size=3, prefill_tokens=4) as llm:
        group = llm.generate("The name of", SamplingParams(seed=MAX_SEED - 1, n=5, **params))[0]
        seeds = [MAX_SEED - 1, MAX_SEED, 0, 1, 2]
        assert [c.stats.seed for c in group.completions] == seeds
        for completion, seed in zip(group.completions, seeds, strict=True):
            alone = llm.generate("The name of", SamplingParams(seed=seed, **params))[0]
            assert completion.token_ids == alone.token_ids
    assert len({tuple(c.token_ids) for c in group.completions}) > 1
    assert group.token_ids == group.completions[0].token_ids


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
@pytest.mark.parametrize("prefill_tokens", [1024, 7])
def test_samples_share_one_prefill(
    architecture: str, prefill_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    prompt = list(range(5, 25))
    of_rows, of_line = SlotLM.forward, LineLM.forward_line

    def count(starts: Sequence[int], counts: Sequence[int]) -> None:
        last = len(prompt) - 1  # which is left for the first step
        pairs = zip(starts, counts, strict=True)
        read.extend(max(min(start + count, last) - start, 0) for start, count in pairs)

    def forward(self: SlotLM, inputs: SlotInputs, **options: Any) -> SlotOutput:
        count(inputs.starts, inputs.counts)
        return of_rows(self, inputs, **options)

    def forward_line(self: LineLM, tokens: Tensor, rows: Rows, *layers: Any) -> LineOutput:
        count(rows.starts, rows.counts)
        return of_line(self, tokens, rows, *layers)

    monkeypatch.setattr(SlotLM, "forward", forward)
    monkeypatch.setattr(LineLM, "forward_line", forward_line)
    with make_llm(architecture, "none", prefill_tokens=prefill_tokens) as llm:
        group = llm.generate(prompt, SamplingParams(n=5, temperature=1.0, seed=0, max_tokens=4))[0]
    assert sum(read) == len(prompt) - 1
    assert len(group.completions) == 5


# --- the law of the first two tokens -------------------------------------------------------------

LAW = GrammarSpec.regex("[a-d]{2}[a-z]{4}|9[0-9]{5}")
LAW_PROMPT = "The age is"
NUM_SEEDS = 2000  # a share has noise of 1.1 % at most: the draft model's own law has a p-value of 0


def legal(llm: LLM, tokens: Sequence[int]) -> Tensor:
    """Bool [V]: what may follow, from a fresh matcher."""
    matcher = XGrammarBackend(llm.vocabulary).compile(LAW).new_matcher()
    assert all(matcher.accept_token(token) for token in tokens)
    row = torch.zeros(1, num_mask_words(llm.vocabulary.vocab_size), dtype=torch.int32)
    matcher.fill_next_token_bitmask(row, 0)
    return unpack_bitmask(row, llm.vocabulary.vocab_size)[0]


def exact_law(llm: LLM) -> dict[tuple[int, int], float]:
    """The probability of every first pair of tokens, from the model's own logits."""
    prompt = llm.encode(LAW_PROMPT)

    def after(tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = llm.model(torch.tensor([prompt + tokens])).logits[0, -1].double()
        return logits.masked_fill(~legal(llm, tokens), -torch.inf).softmax(-1)

    first = after([])
    law: dict[tuple[int, int], float] = {}
    for token in first.nonzero().flatten().tolist():
        for follower, probability in enumerate(after([token]).tolist()):
            law[token, follower] = float(first[token]) * probability
    return law


@pytest.mark.slow
@pytest.mark.parametrize(
    ("proposer", "draft"),
    [
        ("none", "near"),
        ("draft_model", "near"),
        ("draft_model", "foreign"),
        ("chain:grammar_forced+draft_model", "foreign"),
        ("dflash:validate", "head"),
    ],
)
def test_the_law_of_the_first_two_tokens(proposer: str, draft: str, tmp_path: Path) -> None:
    drafter: Any = near_copy("llama", 0.05) if draft == "near" else tiny_model("llama", seed=3)
    if draft == "head":
        drafter = str(write_dflash(tmp_path, tiny_model("llama")))
    options = {"max_batch_size": 100, "max_model_len": 24, "num_draft_tokens": 3}
    with make_llm("llama", proposer, drafter, **options) as llm:
        law = exact_law(llm)
        params = SamplingParams(
            temperature=1.0, seed=0, n=NUM_SEEDS, grammar=LAW, max_tokens=3, complete=False
        )
        group = llm.generate(LAW_PROMPT, params)[0].completions
    counts = Counter((c.token_ids[0], c.token_ids[1]) for c in group)
    assert set(counts) <= {pair for pair, probability in law.items() if probability > 0}
    observed = torch.tensor([float(counts[pair]) for pair in law])
    expected = torch.tensor(list(law.values()), dtype=torch.float64)
    assert int((expected * NUM_SEEDS > 10).sum()) > 10  # enough outcomes to tell laws apart
    assert chi_square_p_value(observed, expected) > 1e-6
    if draft == "head" or (draft == "near" and proposer == "draft_model"):
        drafted = sum(sum(c.stats.drafted) for c in group)
        assert 0 < sum(sum(c.stats.accepted) for c in group) < drafted


@pytest.mark.slow
def test_the_law_tells_a_wrong_drafter_from_the_target() -> None:
    """The same test fails where it has to: the draft model's own distribution is another one."""
    options = {"max_batch_size": 100, "max_model_len": 24}
    with make_llm("llama", "none") as llm:
        law = exact_law(llm)
    with make_llm(near_copy("llama", 0.05), "none", **options) as llm:
        params = SamplingParams(
            temperature=1.0, seed=0, n=NUM_SEEDS, grammar=LAW, max_tokens=2, complete=False
        )
        group = llm.generate(LAW_PROMPT, params)[0].completions
    counts = Counter((c.token_ids[0], c.token_ids[1]) for c in group)
    observed = torch.tensor([float(counts[pair]) for pair in law])
    expected = torch.tensor(list(law.values()), dtype=torch.float64)
    assert chi_square_p_value(observed, expected) < 1e-6
