"""The law tests see the bugs that speculative engines have had: each is put in, and each is caught.

``check_law`` has to fail with the bug; ``test_law.py`` shows that it holds without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from guided_spec.core import DecodeBatch
from guided_spec.ops.sampling import verify as decision
from guided_spec.ops.sampling.adjust import Adjustments
from guided_spec.ops.sampling.noise import DraftNoise, Stream, exponential_noise
from guided_spec.ops.sampling.rejection import rejection_sample
from guided_spec.ops.sampling.warp import Sampling, warp
from guided_spec.step import VERIFIERS
from guided_spec.types import Accepted, Draft, Noise, SamplingParams, Verifier
from tests.law.fields import Fields
from tests.law.harness import Case, check_law, emit
from tests.law.world import (
    SETTINGS,
    VOCAB_SIZE,
    K,
    flat,
    law,
    number_of,
    tables,
)

Patch = pytest.MonkeyPatch
ROWS = 100_000
BOTH: tuple[Verifier, ...] = ("rejection", "coupled")


def is_caught(case: Case, rows: int = ROWS) -> bool:
    with torch.inference_mode():
        texts = emit(case, torch.arange(rows))
    try:
        check_law(case, texts)
    except AssertionError:
        return True
    return False


def case(kind: str, setting: str = "temperature", verifier: Verifier = "rejection") -> Case:
    return Case(kind, SETTINGS[setting], verifier)


def change_verifier(patch: Patch, change: Callable[[Tensor, Draft, Noise], Draft]) -> None:
    """Have the rejection sampler see another draft."""

    def mutant(probs: Tensor, draft: Draft, noise: Noise) -> Accepted:
        return rejection_sample(probs, change(probs, draft, noise), noise)

    patch.setitem(VERIFIERS, "rejection", mutant)


def change_noise(patch: Patch, change: Callable[[DecodeBatch, Noise], Noise]) -> None:
    original = DecodeBatch.verify_noise
    patch.setattr(DecodeBatch, "verify_noise", lambda b, k: change(b, original(b, k)))


# --- the test of a draft token ---


def accept_at_zero(probs: Tensor, draft: Draft, noise: Noise) -> Accepted:
    """``u * q <= p`` for ``u * q < p``: a masked token is kept where u is 0."""
    raised = probs.clone()
    at = draft.token_ids.unsqueeze(-1)
    kept = raised[:, :-1].gather(-1, at)
    raised[:, :-1] = raised[:, :-1].scatter(-1, at, torch.where(kept > 0, kept, 1e-30))
    return rejection_sample(raised, draft, noise)


def test_an_acceptance_that_is_not_strict(monkeypatch: Patch) -> None:
    """At u = 0 throughout; then the sampler still keeps to the grammar, and the mutant does not."""
    change_noise(monkeypatch, lambda _, noise: noise._replace(accept=noise.accept * 0))
    unmasked = case("unmasked")
    possible = law(unmasked.params) > 0
    seeds = torch.arange(5000)
    assert bool(possible[flat(emit(unmasked, seeds))].all())
    monkeypatch.setitem(VERIFIERS, "rejection", accept_at_zero)
    assert not bool(possible[flat(emit(unmasked, seeds))].all())
    assert is_caught(unmasked)


def without_illegal(probs: Tensor, draft: Draft, _: Noise) -> Draft:
    """Dropped before the test: the draft ends in front of its illegal token."""
    is_legal = probs[:, :-1].gather(-1, draft.token_ids.unsqueeze(-1)).squeeze(-1) > 0
    return draft._replace(num_tokens=draft.num_tokens.minimum(is_legal.long().cumprod(1).sum(1)))


def minus_one(probs: Tensor, draft: Draft, _: Noise) -> Draft:
    """Replaced by -1, which is refused: the token is then drawn from the target as a whole."""
    assert draft.probs is not None
    is_legal = probs[:, :-1].gather(-1, draft.token_ids.unsqueeze(-1)) > 0
    return draft._replace(probs=draft.probs * is_legal)


@pytest.mark.parametrize("change", [without_illegal, minus_one])
def test_an_illegal_draft_token_that_is_not_verified(
    monkeypatch: Patch, change: Callable[[Tensor, Draft, Noise], Draft]
) -> None:
    change_verifier(monkeypatch, change)
    assert is_caught(case("unmasked"))


def test_drafts_verified_with_probabilities_before_the_mask(monkeypatch: Patch) -> None:
    """q over all tokens for tokens that were drawn under the mask."""

    def flattened(_: Tensor, draft: Draft, __: Noise) -> Draft:
        assert draft.probs is not None
        return draft._replace(probs=draft.probs * 0.5 + 0.5 / VOCAB_SIZE)

    change_verifier(monkeypatch, flattened)
    assert is_caught(case("sampled"))


def test_a_token_from_outside_the_draft_vocabulary_verified_with_probability_zero(
    monkeypatch: Patch,
) -> None:
    """q looked up by offsets that are off by one, and no token known to be certain."""

    def shifted(_: Tensor, draft: Draft, __: Noise) -> Draft:
        assert draft.columns is not None
        return draft._replace(columns=draft.columns.roll(1), is_certain=None)

    change_verifier(monkeypatch, shifted)
    assert is_caught(case("starved"))


# --- masks and forks ---


@pytest.mark.slow
@pytest.mark.parametrize("verifier", BOTH)
@pytest.mark.parametrize("kind", ["sampled", "starved"])
def test_forks_that_follow_the_argmax(monkeypatch: Patch, kind: str, verifier: Verifier) -> None:
    """The drafter draws one token, and the fork is moved along the likeliest one."""
    monkeypatch.setattr(Fields, "followed", follow_the_argmax)
    assert is_caught(case(kind, verifier=verifier))


def follow_the_argmax(fields: Fields, tokens: Tensor) -> Tensor:
    """To the legal token that the drafter likes best at the fork's place."""
    legal = tables().legal[fields._forks].bool()
    best = tables().draft[fields._forks].masked_fill(~legal, float("-inf")).argmax(1)
    return number_of(fields._forks, torch.where(tokens >= 0, best, tokens))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", BOTH)
@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.roll(1, 0),
        lambda rows: torch.cat([rows[:, :1], torch.full_like(rows[:, 1:], -1)], 1),
        lambda rows: torch.cat([rows[:, :-1], torch.full_like(rows[:, -1:], -1)], 1),
        lambda rows: rows[:, :1].expand_as(rows),
    ],
    ids=["another_request", "first_row_only", "no_bonus_row", "one_row_for_all"],
)
def test_target_rows_with_wrong_masks(
    monkeypatch: Patch, change: Callable[[Tensor], Tensor], verifier: Verifier
) -> None:
    finish = Fields.finish
    monkeypatch.setattr(Fields, "finish", lambda fields, k: change(finish(fields, k)))
    assert is_caught(case("shorter", verifier=verifier))


# --- the pipeline from logits to probabilities ---


def filters_on_the_bonus_row(logits: Tensor, sampling: Sampling) -> Tensor:
    filtered = warp(logits, sampling)
    if logits.shape[1] == 1:
        return filtered
    free = replace(sampling, any_top_k=False, any_top_p=False, any_min_p=False)
    return torch.cat([warp(logits, free)[:, :-1], filtered[:, -1:]], 1)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", BOTH)
@pytest.mark.parametrize("setting", ["top_k", "top_p", "min_p"])
def test_filters_on_the_bonus_row_alone(
    monkeypatch: Patch, setting: str, verifier: Verifier
) -> None:
    monkeypatch.setattr(decision, "warp", filters_on_the_bonus_row)
    assert is_caught(case("sampled", setting, verifier))


def test_min_p_left_out_of_the_verification(monkeypatch: Patch) -> None:
    monkeypatch.setattr(decision, "warp", lambda x, s: warp(x, replace(s, any_min_p=False)))
    assert is_caught(case("sampled", "min_p"))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", BOTH)
@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=1.0, frequency_penalty=1.0), SETTINGS["penalties"]],
    ids=["frequency", "all"],
)
def test_penalties_blind_to_the_draft(
    monkeypatch: Patch, params: SamplingParams, verifier: Verifier
) -> None:
    apply = Adjustments.apply

    def blind(self: Adjustments, logits: Tensor, drafted: Tensor, first: int = 0) -> Tensor:
        return apply(self, logits, torch.full_like(drafted, -1), first)

    monkeypatch.setattr(Adjustments, "apply", blind)
    assert is_caught(Case("sampled", params, verifier))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", BOTH)
def test_bias_and_bans_left_out(monkeypatch: Patch, verifier: Verifier) -> None:
    monkeypatch.setattr(Adjustments, "apply", lambda _, logits, *__: logits)
    assert is_caught(case("sampled", "bias", verifier))


@pytest.mark.slow
@pytest.mark.parametrize("verifier", BOTH)
def test_bad_words_and_min_tokens_that_do_not_move_with_the_row(
    monkeypatch: Patch, verifier: Verifier
) -> None:
    """Every row of a step gets the bans of the first."""
    apply = Adjustments.apply

    def still(self: Adjustments, logits: Tensor, drafted: Tensor, first: int = 0) -> Tensor:
        rows = [apply(self, row.unsqueeze(1), drafted, first) for row in logits.unbind(1)]
        return torch.cat(rows, 1)

    monkeypatch.setattr(Adjustments, "apply", still)
    assert is_caught(case("sampled", "bias", verifier))


# --- the noise ---


@pytest.mark.parametrize("verifier", BOTH)
@pytest.mark.parametrize("is_global", [False, True], ids=["batch_row", "global_state"])
def test_noise_of_the_batch(monkeypatch: Patch, verifier: Verifier, *, is_global: bool) -> None:
    """The same seed gives another text in another batch; without the bug it does not."""
    seeds, some = torch.arange(2000), torch.arange(500, 1500).flip(0)
    sampled = case("sampled", verifier=verifier)
    assert torch.equal(emit(sampled, seeds)[some], emit(sampled, some))
    change = global_state() if is_global else row_of_the_batch
    change_noise(monkeypatch, change)
    assert not torch.equal(emit(sampled, seeds)[some], emit(sampled, some))


def row_of_the_batch(batch: DecodeBatch, noise: Noise) -> Noise:
    rows = torch.arange(len(batch)).expand(len(batch))
    sample = exponential_noise(rows, batch.positions(), Stream.SAMPLE, VOCAB_SIZE)
    return noise._replace(sample=sample.view(len(batch), *[1] * (noise.sample.dim() - 2), -1))


def global_state() -> Callable[[DecodeBatch, Noise], Noise]:
    generator = torch.Generator().manual_seed(0)

    def draw(_: DecodeBatch, noise: Noise) -> Noise:
        sample = torch.empty(noise.sample.shape).exponential_(generator=generator)
        return noise._replace(sample=sample.clamp_min(1e-30))

    return draw


def test_coupled_verification_with_the_noise_of_the_first_position(monkeypatch: Patch) -> None:
    change_noise(
        monkeypatch, lambda _, noise: noise._replace(sample=noise.sample[:, :1].repeat(1, K + 1, 1))
    )
    assert is_caught(case("sampled", verifier="coupled"))


def test_drafts_that_share_the_noise_of_the_rejection_sampler(monkeypatch: Patch) -> None:
    """The draw from the residual is then no fresh draw."""

    def shared(batch: DecodeBatch, positions: Tensor) -> DraftNoise:
        return DraftNoise(batch.sampling.seeds, positions, Stream.SAMPLE, VOCAB_SIZE)

    monkeypatch.setattr(DecodeBatch, "draft_keys", shared)
    assert is_caught(case("sampled"))


def test_one_test_number_for_the_whole_draft(monkeypatch: Patch) -> None:
    change_noise(
        monkeypatch, lambda _, noise: noise._replace(accept=noise.accept[:, :1].expand(-1, K))
    )
    assert is_caught(case("sampled"))


@pytest.mark.parametrize("verifier", BOTH)
def test_noise_that_does_not_move_with_the_text(monkeypatch: Patch, verifier: Verifier) -> None:
    """The same numbers in every step."""
    monkeypatch.setattr(DecodeBatch, "positions", lambda batch: torch.ones(len(batch)).long())
    assert is_caught(case("one_hot", verifier=verifier))
