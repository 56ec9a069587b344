"""The reference of the verify decision is its parts, one behind the other."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given

from guided_spec.ops.bitmask import apply_token_bitmask, pack_bitmask
from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.ops.sampling.noise import NoiseKeys, Stream, exponential_noise, uniform_noise
from guided_spec.ops.sampling.rejection import rejection_sample
from guided_spec.ops.sampling.verify import (
    KERNEL_VERIFIERS,
    VERIFIERS,
    coupled_sample,
    draw_noise,
    verify,
)
from guided_spec.ops.sampling.warp import Sampling, VerifyRows, warp
from guided_spec.types import Accepted, Draft, Noise, SamplingParams, Verifier
from tests.ops.sampling.verify_cases import CPU, Case, cases, unexplained

BATCH, DEPTH, SIZE = 4, 3, 40


def parts(case: Case, noise: Noise) -> Accepted:
    logits = apply_token_bitmask(case.logits, case.bitmask)
    if case.rows.adjustments is not None:
        logits = case.rows.adjustments.apply(logits, case.draft.token_ids)
    decide = {"rejection": rejection_sample, "coupled": coupled_sample}[case.rows.verifier]
    return decide(warp(logits, case.rows.sampling), case.draft, noise)


def keyed_noise(case: Case) -> Noise:
    """Written out: a row's test numbers by position, and one race or one a row."""
    assert isinstance(case.rows.noise, NoiseKeys)
    seeds, first = case.rows.noise
    batch, depth, size = len(seeds), case.draft.token_ids.shape[1], case.logits.shape[-1]
    places = [first + place for place in range(depth + 1)]
    accept = [uniform_noise(seeds, at.unsqueeze(1), Stream.ACCEPT) for at in places[:-1]]
    sample = [exponential_noise(seeds, at, Stream.SAMPLE, size) for at in places]
    tests = torch.cat(accept, 1) if accept else torch.zeros(batch, 0)
    return Noise(tests, torch.stack(sample, 1) if case.rows.verifier == "coupled" else sample[0])


def assert_same(found: Accepted, expected: Accepted) -> None:
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.num_accepted, expected.num_accepted)


@given(cases())
def test_it_is_its_parts(case: Case) -> None:
    before = case.logits.clone()
    noise = keyed_noise(case)
    expected = parts(case, noise)
    assert_same(verify(*vars(case).values()), expected)
    assert_same(case.reference(noise), expected)
    assert torch.equal(case.logits.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_given_noise_is_what_decides(verifier: Verifier) -> None:
    """The race goes to the token with the smallest exponential, wherever it is put."""
    sampling = Sampling.stack([SamplingParams(temperature=1.0)] * BATCH, range(BATCH), CPU)
    draft = Draft(torch.zeros(BATCH, DEPTH, dtype=torch.int64), torch.zeros(BATCH).long())
    for token in (1, SIZE - 1):
        sample = torch.ones(BATCH, DEPTH + 1, SIZE).index_fill(2, torch.tensor([token]), 1e-9)
        sample = sample if verifier == "coupled" else sample[:, 0]
        rows = VerifyRows(sampling, Noise(torch.zeros(BATCH, DEPTH), sample), verifier)
        found = verify(torch.zeros(BATCH, DEPTH + 1, SIZE), None, draft, rows)
        assert found.token_ids[:, 0].tolist() == [token] * BATCH
        assert draw_noise(rows, DEPTH, SIZE) is rows.noise


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_noise_of_a_request_alone(verifier: Verifier) -> None:
    seeds, first = torch.tensor([5, 2**62, 9]), torch.tensor([0, 2**33, 17])
    params = [SamplingParams(temperature=1.0)] * 3
    whole = Sampling.stack(params, seeds.tolist(), CPU)
    together = draw_noise(VerifyRows(whole, NoiseKeys(seeds, first), verifier), DEPTH, SIZE)
    for request in range(3):
        index = torch.tensor([request])
        keys = NoiseKeys(seeds[index], first[index])
        alone = draw_noise(VerifyRows(whole.select(index), keys, verifier), DEPTH, SIZE)
        assert torch.equal(alone.accept[0], together.accept[request])
        assert torch.equal(alone.sample[0], together.sample[request])


def test_every_stage_counts() -> None:
    """Mask, then bias, then filters: each takes the token that was likeliest before it."""
    logits = torch.tensor([5.0, 4.0, 3.0, 2.0, 1.9]).expand(1, 1, -1)
    draft = Draft(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([0]))
    params = SamplingParams(temperature=1.0, top_k=1, logit_bias={1: -9.0})
    table = RuleTable.stack([TokenRules(params)], 5, CPU)
    keys = NoiseKeys(torch.tensor([1]), torch.tensor([3]))
    rows = VerifyRows(Sampling.stack([params], [1], CPU), keys)
    bitmask = pack_bitmask(torch.tensor([[[False, True, True, True, True]]]))
    assert verify(logits, None, draft, rows).token_ids.tolist() == [[0]]
    assert verify(logits, bitmask, draft, rows).token_ids.tolist() == [[1]]
    biased = rows._replace(adjustments=Adjustments.stack(table, [[1, 2]], [1]))
    assert verify(logits, bitmask, draft, biased).token_ids.tolist() == [[2]]


def make_case(verifier: Verifier) -> Case:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(BATCH, DEPTH + 1, SIZE, generator=generator)
    ids = logits[:, :-1].argmax(-1)
    seeds = torch.arange(BATCH)
    sampling = Sampling.stack([SamplingParams(temperature=0.3)] * BATCH, seeds.tolist(), CPU)
    rows = VerifyRows(sampling, NoiseKeys(seeds, seeds), verifier)
    return Case(logits, None, Draft(ids, torch.full((BATCH,), DEPTH)), rows)


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_another_answer_is_not_explained_by_rounding(verifier: Verifier) -> None:
    """The comparison that the kernels are held to lets no other token and no other count pass."""
    case = make_case(verifier)
    answer = case.reference()
    assert unexplained(case, answer) == (0, [])
    for request in range(BATCH):
        ids = answer.token_ids.clone()
        place = int(answer.num_accepted[request])
        ids[request, place] = (ids[request, place] + 1) % SIZE
        assert unexplained(case, Accepted(ids, answer.num_accepted)) == (0, [request])
        longer = answer.num_accepted.clone()
        longer[request] -= 1
        assert unexplained(case, Accepted(answer.token_ids, longer))[1] == [request]


def test_a_close_race_is_explained_by_rounding() -> None:
    case = make_case("coupled")
    exponential = torch.ones(BATCH, DEPTH + 1, SIZE)
    probs = case.probs()
    best = probs[0, 0].argmax()
    other = int(best) - 1
    exponential[0, 0, other] = probs[0, 0, other] / probs[0, 0, best] * (1 + 1e-6)
    noise = Noise(torch.zeros(BATCH, DEPTH), exponential)
    close = replace(case, rows=case.rows._replace(noise=noise))
    answer = close.reference()
    ids = answer.token_ids.clone()
    ids[0, 0], ids[0, 1:] = other, -1
    counts = answer.num_accepted.clone()
    counts[0] = 0
    assert unexplained(close, Accepted(ids, counts)) == (1, [])


def test_verifiers_are_those_that_may_be_named() -> None:
    assert set(VERIFIERS) == set(get_args(Verifier))
    assert set(VERIFIERS) >= KERNEL_VERIFIERS
