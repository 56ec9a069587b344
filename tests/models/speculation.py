"""A ragged speculative greedy loop over a CausalLM, with drafts that are right some of the time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from guided_spec.models.causal_lm import CausalLM, make_causal_lm
from guided_spec.models.stock.slots import SlotInputs

DRAFT_TOKENS = 4
CHUNK = 7


@dataclass
class Row:
    """One text in one slot. expected: what greedy decoding gives; the source of its drafts."""

    slot: int
    prompt: list[int]
    expected: list[int]
    tokens: list[int] = field(default_factory=list)  # generated; all but the last are in the cache

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def is_done(self) -> bool:
        """Whether all that is expected has been generated."""
        return len(self.tokens) >= len(self.expected)


def speculated(
    lm: CausalLM, prompts: Sequence[list[int]], expected: Sequence[list[int]]
) -> list[list[int]]:
    """Three texts by drafts that are right some of the time, at least as long as expected."""
    rows = [Row(s, p, e) for s, p, e in zip([2, 0, 1], prompts, expected, strict=True)]
    prefill(lm, rows)
    source = random.Random(0)
    while open_rows := [row for row in rows if not row.is_done]:
        speculate(lm, open_rows, source)
    return [row.tokens for row in rows]


def greedy_texts(model: PreTrainedModel, prompts: Sequence[list[int]]) -> list[list[int]]:
    """16 tokens of each, in packed form."""
    expected = [generate_alone(model, prompt, 16) for prompt in prompts]
    lm = make_causal_lm(model, num_slots=3, max_length=60, kernels="packed")
    assert lm.is_packed
    return [tokens[:16] for tokens in speculated(lm, prompts, expected)]


def prompts_of(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    source = random.Random(seed)
    return [[source.randrange(1, vocab_size) for _ in range(n)] for n in lengths]


def generate_alone(model: PreTrainedModel, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers' own ``generate`` gives for this prompt alone."""
    options = {"do_sample": False, "max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    ids = torch.tensor([prompt])
    text = model.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
    return [int(token) for token in text[0, len(prompt) :]]


def prefill(lm: CausalLM, rows: Sequence[Row]) -> None:
    """Read the prompts in chunks of CHUNK tokens and take each row's first token."""
    for start in range(0, max(len(row.prompt) for row in rows), CHUNK):
        chunks = [row.prompt[start : start + CHUNK] for row in rows]
        token_ids = torch.tensor([[*chunk, *[0] * (CHUNK - len(chunk))] for chunk in chunks])
        counts = [len(chunk) for chunk in chunks]
        # A row that has been read keeps its length: 0 would start it anew.
        starts = [min(start, len(row.prompt)) for row in rows]
        inputs = SlotInputs(token_ids, [row.slot for row in rows], starts, counts)
        logits = lm.forward(inputs, logits="last").logits
        lm.commit(counts, counts)
        assert logits is not None
        for row, scores, count in zip(rows, logits, counts, strict=True):
            if count and start + count == len(row.prompt):
                row.tokens.append(int(scores[0].argmax()))


def speculate(lm: CausalLM, rows: Sequence[Row], source: random.Random) -> list[int]:
    """One step: feed last token and draft, accept the longest right prefix; accepted per row."""
    drafts = [_draft(row, lm.vocab_size, source) for row in rows]
    width = 1 + max(len(draft) for draft in drafts)
    fed = [[row.tokens[-1], *draft] for row, draft in zip(rows, drafts, strict=True)]
    token_ids = torch.tensor([[*tokens, *[0] * (width - len(tokens))] for tokens in fed])
    counts = [len(tokens) for tokens in fed]
    slots, starts = [row.slot for row in rows], [row.length for row in rows]
    logits = lm.forward(SlotInputs(token_ids, slots, starts, counts)).logits
    assert logits is not None
    accepted = []
    for row, draft, best in zip(rows, drafts, logits.argmax(-1).tolist(), strict=True):
        n = next((i for i, token in enumerate(draft) if token != best[i]), len(draft))
        row.tokens.extend(best[: n + 1])
        accepted.append(n)
    lm.commit([n + 1 for n in accepted], counts)
    return accepted


def _draft(row: Row, vocab_size: int, source: random.Random) -> list[int]:
    """The next expected tokens, some of them replaced; 0 to DRAFT_TOKENS of them."""
    start = len(row.tokens)
    ahead = row.expected[start : start + source.randint(DRAFT_TOKENS - 1, DRAFT_TOKENS)]
    return [token if source.random() < 0.8 else source.randrange(vocab_size) for token in ahead]
