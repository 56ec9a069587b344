"""Whole texts under a grammar: the law is the model's, conditioned, and a text is its seed's."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from guided_spec.conditioned import ConditionedText, sample_conditioned
from guided_spec.errors import ConfigError, NoTokenLeftError
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.sampling.warp import Sampling, warp
from guided_spec.types import SamplingParams
from tests.toys import (
    CPU,
    ToyCompiled,
    ToyTarget,
    chi_square_p_value,
    text_rule,
)

TARGET = ToyTarget(seed=3, scale=1.0)
PARTS = (b"a", b"b", b"c", b"ab", b"bc", b"d", b"e", b"f", b"g", b"h", b"i", b"")
VOCABULARY = Vocabulary(PARTS, (11,), 12)
RULE = text_rule([b"ab", b"abc", b"b", b"cab"], VOCABULARY)  # eight ways to write the four
STOP = VOCABULARY.stop_token_ids[0]
SAMPLES = 300


def draw(number: int, **changes: Any) -> ConditionedText:
    most = changes.pop("most_read", 4096)
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 9, "seed": number} | changes)
    compiled = ToyCompiled(RULE)
    return sample_conditioned(TARGET.logits, compiled, VOCABULARY, [1, 2], params, most_read=most)


def laws(**changes: Any) -> tuple[dict[tuple[int, ...], float], dict[tuple[int, ...], float]]:
    """By brute force, each text's share: of the conditioned law, and of masking each token."""
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 9} | changes)
    sampling = Sampling.stack([params], [0], CPU)
    whole, local = dict[tuple[int, ...], float](), dict[tuple[int, ...], float]()

    def probs(logits: Tensor) -> list[float]:
        found: list[float] = warp(logits.view(1, 1, -1), sampling).flatten().double().tolist()
        return found

    def walk(path: tuple[int, ...], share: float, masked: float) -> None:
        if path and path[-1] == STOP:
            whole[path], local[path] = share, masked
        elif len(path) < params.max_tokens:
            logits, legal = TARGET.logits(path), RULE(path)
            only = torch.full_like(logits, -torch.inf)
            only[sorted(legal)] = logits[sorted(legal)]
            free, kept = probs(logits), probs(only)
            for token in legal:
                walk((*path, token), share * free[token], masked * kept[token])

    walk((), 1.0, 1.0)
    total = sum(whole.values())
    return {path: share / total for path, share in whole.items()}, local


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.8, "top_p": 0.97, "max_tokens": 3}],
)
def test_the_law_is_the_models_conditioned_on_the_grammar(changes: dict[str, Any]) -> None:
    whole, local = laws(**changes)
    counts = Counter(draw(seed, **changes).token_ids for seed in range(SAMPLES))
    assert set(counts) <= set(whole)
    found = torch.tensor([counts[path] for path in whole])
    assert chi_square_p_value(found, torch.tensor([*whole.values()])) > 1e-3
    # And the test tells the two laws apart.
    assert chi_square_p_value(found, torch.tensor([*local.values()])) < 1e-6


def test_a_text_is_a_function_of_its_seed_and_reads_little() -> None:
    once, again = ([draw(seed) for seed in seeds] for seeds in (range(60), reversed(range(60))))
    assert once == again[::-1]
    assert len({text.token_ids for text in once}) > 1
    beginnings = {path[:end] for path in laws()[0] for end in range(len(path))}
    assert max(text.num_read for text in once) <= len(beginnings)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"temperature=0\.0: must be above 0"):
        draw(0, temperature=0.0)
    with pytest.raises(ConfigError, match="seed=None: must be an int"):
        draw(0, seed=None)
    with pytest.raises(ConfigError, match=r"stop=\('x',\): must stay at its default"):
        draw(0, stop="x")
    with pytest.raises(ConfigError, match="most_read=1: does not decide"):
        draw(0, most_read=1)
    with pytest.raises(NoTokenLeftError, match="within max_tokens=1 any probability"):
        draw(0, max_tokens=1)
