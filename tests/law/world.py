"""A world of six tokens whose law is known: tables of logits and masks, and all its texts by hand.

Texts are numbered so that tensors can look them up: the empty text is 0, and the children of text i
are ``i * V + 1`` to ``i * V + V``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.bitmask import pack_bitmask
from guided_spec.types import SamplingParams

VOCAB_SIZE = 6
EOS = VOCAB_SIZE - 1
LENGTH = 4  # tokens of a text whose law is compared
K = 2
PROMPT = (1,)
ONLY = 3  # the one legal token at some places; the reduced vocabulary lacks it
REDUCED = DraftVocabulary(torch.tensor([4, 0]), VOCAB_SIZE)
BAD_WORDS = ((1, 0), (2, 2), (4, 1, 2))  # the first may begin with the prompt


SETTINGS = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(temperature=1.0, top_k=3),
    "top_p": SamplingParams(temperature=1.2, top_p=0.9),
    "min_p": SamplingParams(temperature=1.5, min_p=0.2),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.5, frequency_penalty=0.6, presence_penalty=0.5
    ),
    "bias": SamplingParams(
        temperature=1.0, logit_bias={0: 0.8, 2: -1.1}, min_tokens=2, bad_words=BAD_WORDS
    ),
}
MIXED = SamplingParams(
    temperature=1.1,
    top_k=4,
    top_p=0.95,
    min_p=0.02,
    logit_bias={4: 0.7},
    bad_words=BAD_WORDS,
    min_tokens=2,
    repetition_penalty=1.2,
    frequency_penalty=0.4,
)


class Tables(NamedTuple):
    """What follows each text: float32 [N, V] logits of target and drafter, bool [N, V] legal."""

    target: Tensor
    draft: Tensor
    legal: Tensor
    mask_rows: Tensor


@cache
def tables() -> Tables:
    """The world. After an end or an illegal token nothing is forbidden, as ``Lookahead`` has it.

    Elsewhere either ``ONLY`` is legal or at least two others of the first five tokens are, so that
    no bias leads to a dead end.
    """
    generator = torch.Generator().manual_seed(3)
    size = sum(VOCAB_SIZE**length for length in range(LENGTH + K))
    target = torch.randn(size, VOCAB_SIZE, generator=generator)
    draft = target * 0.6 + torch.randn(size, VOCAB_SIZE, generator=generator)
    chance = torch.rand(size, VOCAB_SIZE, generator=generator)
    legal = chance < torch.tensor([0.65, 0.65, 0.65, 0.5, 0.65, 0.3])
    usual = chance[:, :EOS].index_fill(1, torch.tensor([ONLY]), 1.0)
    legal.scatter_(1, usual.topk(2, largest=False).indices, value=True)
    legal[torch.rand(size, generator=generator) < 0.15] = torch.arange(VOCAB_SIZE) == ONLY
    legal[0] = torch.tensor([True, True, False, True, True, False])  # many a first token
    rows, over = legal.tolist(), [False] * size
    for text in range(1, size):
        parent, token = divmod(text - 1, VOCAB_SIZE)
        over[text] = over[parent] or token == EOS or not rows[parent][token]
    legal[torch.tensor(over)] = True
    return Tables(target, draft, legal, pack_bitmask(legal))


def number(text: Sequence[int]) -> int:
    """The row of the tables for what follows ``text``."""
    row = 0
    for token in text:
        row = row * VOCAB_SIZE + 1 + token
    return row


def number_of(nodes: Tensor, tokens: Tensor) -> Tensor:
    """int64 [B] numbers of texts to those of the texts one token longer."""
    return nodes * VOCAB_SIZE + 1 + tokens


@cache
def legal_tokens(text: tuple[int, ...]) -> frozenset[int]:
    """The same grammar as a rule; only the end is legal behind the longest text of the tables."""
    if len(text) >= LENGTH + K:
        return frozenset({EOS})
    row = tables().legal[number(text)].tolist()
    return frozenset(token for token, is_legal in enumerate(row) if is_legal)


# --- the law, written again in plain floats: nothing of the package's warp or adjust is used ---


def law(params: SamplingParams) -> Tensor:
    """float64 [V ** LENGTH]: the probability of each text; one that ends early ends in EOS only."""
    found = torch.zeros(VOCAB_SIZE**LENGTH, dtype=torch.float64)
    texts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    for _ in range(LENGTH):
        texts = [
            ((*text, token), mass * probability)
            for text, mass in texts
            for token, probability in enumerate(following(params, text))
            if probability > 0
        ]
    for text, mass in texts:
        found[flat(torch.tensor([text]))] = mass
    assert math.isclose(float(found.sum()), 1.0, abs_tol=1e-9)
    return found


def flat(texts: Tensor) -> Tensor:
    """int64 [B, LENGTH] texts to [B], places in the law."""
    return (texts * VOCAB_SIZE ** torch.arange(LENGTH - 1, -1, -1)).sum(1)


def following(params: SamplingParams, text: tuple[int, ...]) -> list[float]:
    """[V] the distribution of the token after ``text`` in plain constrained sampling."""
    if EOS in text:
        return [float(token == EOS) for token in range(VOCAB_SIZE)]
    world, row = tables(), number(text)
    scores = {
        token: float(world.target[row, token])
        for token in range(VOCAB_SIZE)
        if world.legal[row, token] and not _is_banned(params, text, token)
    }
    scores = {token: _adjusted(params, text, token, score) for token, score in scores.items()}
    weights = {token: math.exp(score / params.temperature) for token, score in scores.items()}
    weights = _filtered(params, weights)
    total = sum(weights.values())
    return [weights.get(token, 0.0) / total for token in range(VOCAB_SIZE)]


def _is_banned(params: SamplingParams, text: tuple[int, ...], token: int) -> bool:
    if token == EOS and len(text) < params.min_tokens:
        return True
    context = (*PROMPT, *text, token)
    return any(context[-len(word) :] == word for word in params.bad_words)


def _adjusted(params: SamplingParams, text: tuple[int, ...], token: int, score: float) -> float:
    score += dict(params.logit_bias).get(token, 0.0)
    if token in PROMPT or token in text:
        repetition = params.repetition_penalty
        score = score / repetition if score > 0 else score * repetition
    count = text.count(token)
    return score - params.frequency_penalty * count - params.presence_penalty * (count > 0)


def _filtered(params: SamplingParams, weights: dict[int, float]) -> dict[int, float]:
    """min-p, then top-k, then top-p, each on what the one before left."""
    least = params.min_p * max(weights.values())
    ranked = sorted((w, token) for token, w in weights.items() if w >= least)[::-1]
    ranked = ranked[: params.top_k or None]
    total, before, kept = sum(w for w, _ in ranked), 0.0, {}
    for weight, token in ranked:
        if before < params.top_p * total or params.top_p == 1:
            kept[token] = weight
        before += weight
    return kept
