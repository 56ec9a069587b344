"""Warping against a slow reference that sorts nothing and shares no code with it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.ops.sampling.warp import Sampling, warp
from guided_spec.types import SamplingParams

NO = float("-inf")
CPU = torch.device("cpu")


def softmax(scores: dict[int, float]) -> dict[int, float]:
    largest = max(scores.values())
    weights = {token: math.exp(score - largest) for token, score in scores.items()}
    total = sum(weights.values())
    return {token: weight / total for token, weight in weights.items()}


def reference_probs(logits: list[float], params: SamplingParams) -> list[float]:
    """What ``warp`` must give for one row, one filter after another in plain Python."""
    kept = {token: score for token, score in enumerate(logits) if score > NO}
    if kept and params.temperature == 0:
        kept = {logits.index(max(logits)): 0.0}
    elif kept:
        kept = {token: score / params.temperature for token, score in kept.items()}
        probs = softmax(kept)
        floor = params.min_p * max(probs.values())
        kept = {token: kept[token] for token in kept if probs[token] >= floor}
        if params.top_k:
            rank = {t: sum(other > kept[t] for other in kept.values()) for t in kept}
            kept = {t: kept[t] for t in kept if rank[t] < params.top_k}
        if params.top_p < 1:
            probs = softmax(kept)
            before = {t: sum(q for q in probs.values() if q > probs[t]) for t in kept}
            kept = {t: kept[t] for t in kept if before[t] < params.top_p}
    final = softmax(kept) if kept else {}
    return [final.get(token, 0.0) for token in range(len(logits))]


# Whole numbers and few of them: many ties, and no two sums of probabilities almost equal to top_p.
LOGITS = st.lists(
    st.lists(st.sampled_from([NO, -3.0, 0.0, 0.5, 1.0, 2.0]), min_size=7, max_size=7),
    min_size=2,
    max_size=2,
)
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 2, 3, 6, 50]),
    top_p=st.sampled_from([1e-6, 0.23456, 0.51234, 0.87654, 0.98765, 1.0]),
    min_p=st.sampled_from([0.0, 0.0123, 0.2345, 0.77777]),
)


def warped(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    return warp(logits, Sampling.stack(params, range(len(params)), CPU))


@given(st.lists(st.tuples(LOGITS, PARAMS), min_size=1, max_size=4))
def test_warp_is_the_reference(rows: list[tuple[list[list[float]], SamplingParams]]) -> None:
    logits = torch.tensor([row for row, _ in rows])
    before = logits.clone()
    found = warped(logits, [params for _, params in rows])
    expected = [[reference_probs(one, params) for one in row] for row, params in rows]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert torch.equal(logits, before)


@given(st.lists(st.tuples(LOGITS, PARAMS), min_size=2, max_size=4))
def test_a_row_is_the_same_alone(rows: list[tuple[list[list[float]], SamplingParams]]) -> None:
    logits = torch.tensor([row for row, _ in rows])
    together = warped(logits, [params for _, params in rows])
    for index, (_, params) in enumerate(rows):
        alone = warped(logits[index : index + 1], [params])
        torch.testing.assert_close(alone[0], together[index], atol=1e-6, rtol=1e-5)


EACH = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=2),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.0, min_p=0.5),
    SamplingParams(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1),
]


@pytest.mark.parametrize("params", EACH)
def test_no_legal_token_gives_zeros(params: SamplingParams) -> None:
    found = warped(torch.full((1, 2, 5), NO), [params])
    assert torch.equal(found, torch.zeros(1, 2, 5))


def test_no_legal_token_beside_healthy_rows() -> None:
    logits = torch.randn(len(EACH), 3, 9, generator=torch.Generator().manual_seed(0))
    logits[:, 1] = NO
    found = warped(logits, EACH)
    assert bool((found[:, 1] == 0).all())
    torch.testing.assert_close(found[:, ::2].sum(-1), torch.ones(len(EACH), 2))


@pytest.mark.parametrize("params", EACH)
def test_one_legal_token_takes_all(params: SamplingParams) -> None:
    logits = torch.full((1, 1, 5), NO)
    logits[0, 0, 3] = -40.0
    assert warped(logits, [params]).tolist() == [[[0, 0, 0, 1, 0]]]


def test_top_k_above_the_legal_tokens_revives_none() -> None:
    logits = torch.tensor([[[NO, 1.0, NO, 1.0, NO, NO]]])
    found = warped(logits, [SamplingParams(temperature=1.0, top_k=4)])
    assert found.tolist() == [[[0, 0.5, 0, 0.5, 0, 0]]]


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-30, 1e-37, 1e-39, 1e-44, 1e-60])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_tiny_temperatures_are_greedy(temperature: float, filters: dict[str, float]) -> None:
    logits = torch.tensor([[[NO, -90.0, 30.0, 90.0, 50.0], [NO, -90.0, -30.0, -50.0, NO]]])
    params = SamplingParams(temperature=temperature, **filters)  # type: ignore[arg-type]
    other = SamplingParams(temperature=1.0)
    found = warped(logits.expand(2, -1, -1), [params, other])
    assert found[0].tolist() == [[0, 0, 0, 1, 0], [0, 0, 1, 0, 0]]


def test_ties_at_the_edge_are_all_kept() -> None:
    logits = torch.tensor([[[2.0, 1.0, 1.0, 1.0, 0.0]]])
    for params in (
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=0.5),
    ):
        kept = warped(logits, [params])[0, 0] > 0
        assert kept.tolist() == [True, True, True, True, False]


def test_the_largest_logits_always_pass_min_p() -> None:
    logits = torch.tensor([[[2.0, 1.0, 2.0]]])
    found = warped(logits, [SamplingParams(temperature=1.0, min_p=1.0)])
    assert found.tolist() == [[[0.5, 0, 0.5]]]


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[[0.0, 3.0, 3.0]]])
    for params in ([SamplingParams()], [SamplingParams(), SamplingParams(temperature=1.0)]):
        found = warped(logits.expand(len(params), -1, -1), params)
        assert found[0].tolist() == [[0, 1, 0]]


def test_bfloat16_logits_give_float32_probabilities() -> None:
    logits = torch.randn(2, 2, 6).bfloat16()
    for params in ([SamplingParams()] * 2, [SamplingParams(temperature=0.7)] * 2):
        assert warped(logits, params).dtype == torch.float32
