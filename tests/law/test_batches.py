"""A request's text has its law in any company, whatever the company drafts and draws."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from guided_spec import proposers
from guided_spec.core import DecodeBatch, DraftInFlight, FinishedDraft
from guided_spec.masks.lookahead import Lookahead
from guided_spec.ops.sampling.noise import DraftNoise, Stream, noise_key, uniform_noise
from guided_spec.proposers import build_proposer
from guided_spec.proposers.chain import Chain
from guided_spec.proposers.drafting import concatenate
from guided_spec.types import Draft, DraftPolicy
from tests.law.batches import PROMPTS, RULES, SCALE, TOLD, Member, law, p_value, write
from tests.law.fields import Fields
from tests.law.harness import UNLIKELY, Case, check_law, emit
from tests.law.world import LENGTH, SETTINGS, VOCAB_SIZE
from tests.law.world import K as SHORT_K
from tests.toys import ToyDrafter, ToyTarget, toy_context

SEEDS = 250
KINDS = range(len(RULES))
Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def _toy(monkeypatch: Patch) -> Iterator[None]:
    """The proposer "toy" samples from logits of its own."""
    drafter = ToyDrafter(ToyTarget(7, scale=SCALE))
    monkeypatch.setitem(proposers.PROPOSERS, "toy", lambda _: drafter)
    with torch.inference_mode():
        yield


def own(seed: int, kind: int) -> int:
    """The noise that a request has in the engine."""
    return noise_key(seed, PROMPTS[kind])


def shared(seed: int, kind: int) -> int:
    """The same for all: what rows may do to one another with their noise, they do."""
    del kind
    return seed


@dataclass(frozen=True)
class Company:
    """A request of each kind with one seed, in one batch.

    joins, policies: see ``Member``.
    """

    spec: str = "chain:grammar_forced+toy"
    key: Callable[[int, int], int] = shared
    joins: tuple[int, ...] = (0, 0, 0)
    policies: tuple[DraftPolicy, ...] = ("mask", "mask", "mask")

    def texts(self, seeds: range) -> list[list[str]]:
        """For each seed those of all kinds."""
        proposer = build_proposer(self.spec, toy_context())
        return [write(self.members(seed), proposer) for seed in seeds]

    def alone(self, seed: int) -> list[str]:
        """The same texts, each in a batch of its own."""
        proposer = build_proposer(self.spec, toy_context())
        members = [replace(self, joins=(0, 0, 0)).members(seed)[kind] for kind in KINDS]
        return [write([member], proposer)[0] for member in members]

    def members(self, seed: int) -> list[Member]:
        return [
            Member(kind, self.key(seed, kind), self.joins[kind], self.policies[kind])
            for kind in KINDS
        ]


LATE = (1, 0, 2)
COMPANIES = {
    "chain": Company(),
    "joining": Company("chain:grammar_forced+ngram+toy", joins=LATE),
    "policies": Company(key=own, policies=("mask", "validate", "mask")),
}


@cache
def texts_of(name: str) -> list[list[str]]:
    return COMPANIES[name].texts(range(SEEDS))


def p_values(texts: list[list[str]]) -> list[float]:
    """Of each kind's texts."""
    columns = zip(KINDS, zip(*texts, strict=True), TOLD, strict=True)
    return [p_value([told(text) for text in of], law(kind, told)) for kind, of, told in columns]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPANIES)
def test_the_law_of_every_row(name: str) -> None:
    found = p_values(texts_of(name))
    sys.stdout.write(f"p = {found}\n")
    assert min(found) > UNLIKELY


@pytest.mark.parametrize("name", sorted(COMPANIES))
def test_the_same_text_alone_and_in_company(name: str) -> None:
    for seed, texts in enumerate(texts_of(name)[:20]):
        assert texts == COMPANIES[name].alone(seed)


def one_budget(
    self: Chain, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
) -> DraftInFlight:
    """The mistake: K columns for the batch, so that one row's draft ends another's."""
    del carry
    lead, *fillers = self._members
    draft, left = lead.begin(batch, lookahead).finish(), batch.num_draft_tokens
    while left > 0 and any(lookahead.is_open):
        before = left
        for filler in fillers:
            given = replace(batch, num_draft_tokens=left)
            with lookahead.pausing(lead.interrupts(given, lookahead)):
                more = filler.begin(given, lookahead).finish()
            draft = concatenate(draft, more)
            left -= more.token_ids.shape[1]
        if left == before:
            break
        draft = concatenate(draft, lead.begin(batch, lookahead).finish())
    draft = draft.cut(max(map(len, lookahead.drafted)) + 1)
    return FinishedDraft(draft, tuple(draft.num_tokens.tolist()))


@pytest.mark.slow
def test_one_budget_for_the_batch(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Chain, "begin", one_budget)
    company = COMPANIES["chain"]
    found = company.texts(range(SEEDS))
    assert min(p_values(found)) < UNLIKELY
    assert found[:20] != [company.alone(seed) for seed in range(20)]


@pytest.mark.slow
def test_other_requests_draw_other_noise() -> None:
    """Equal seeds say nothing about pairs of texts; with the seed alone for a key they do."""
    first = [law(kind, lambda text: text[0]) for kind in (0, 1)]
    exact = {one + other: p * q for one, p in first[0].items() for other, q in first[1].items()}
    pairs = {name: [one[0] + other[0] for one, other, _ in texts_of(name)] for name in COMPANIES}
    assert p_value(pairs["policies"], exact) > UNLIKELY
    assert p_value(pairs["chain"], exact) < UNLIKELY


# --- K may depend on all that was drafted before, on what was refused as well ---

ROWS, MANY = 20_000, 100_000


def written(nodes: Tensor) -> Tensor:
    """int64 [B]: how many tokens the texts of these numbers have."""
    firsts = [sum(VOCAB_SIZE**i for i in range(length)) for length in range(1, 8)]
    return torch.bucketize(nodes, torch.tensor(firsts), right=True)


@dataclass(frozen=True)
class FollowingCase(Case):
    """Drafts are as long as the last step was successful; every third step has none."""

    last: Tensor = field(default_factory=lambda: torch.zeros(ROWS, dtype=torch.int64))
    steps: Tensor = field(default_factory=lambda: torch.zeros(ROWS, dtype=torch.int64))

    def limits(self, seeds: Tensor, nodes: Tensor) -> Tensor:
        gained = written(nodes) - self.last[seeds]
        self.last[seeds] = written(nodes)
        self.steps[seeds] += 1
        return torch.where((self.steps[seeds] + seeds) % 3 == 0, 0, gained.clamp(1, SHORT_K))


@dataclass(frozen=True)
class PeekingCase(Case):
    """The mistake: a draft is dropped where the noise says that it is going to be refused."""

    def limits(self, seeds: Tensor, nodes: Tensor) -> Tensor:
        positions = (written(nodes) + 1).unsqueeze(1)
        noise = uniform_noise(seeds, positions, Stream.ACCEPT).squeeze(1)
        return torch.where(noise < 0.5, SHORT_K, 0)


@pytest.mark.parametrize("kind", ["sampled", "unmasked"])
def test_the_law_holds_when_k_follows_the_past(kind: str) -> None:
    case = FollowingCase(kind, SETTINGS["temperature"])
    with torch.inference_mode():
        texts = emit(case, torch.arange(ROWS))
    assert set(case.last.tolist()) == {0, 1, 2, 3}
    check_law(case, texts)


def test_the_law_is_broken_when_k_follows_the_noise() -> None:
    case = PeekingCase("sampled", SETTINGS["temperature"])
    with torch.inference_mode():
        texts = emit(case, torch.arange(ROWS))
    with pytest.raises(AssertionError, match="p ="):
        check_law(case, texts)


@dataclass(frozen=True)
class AfterCase(Case):
    """A draft is a full one where the last full one ended in an odd token, and empty elsewhere."""

    is_full: Tensor = field(default_factory=lambda: torch.zeros(MANY, dtype=torch.bool))

    def limits(self, seeds: Tensor, nodes: Tensor) -> Tensor:
        del nodes
        limits = torch.where(self.is_full[seeds], SHORT_K, 0)
        limits[0] = SHORT_K  # somebody has to draft
        return limits

    def draft(self, batch: DecodeBatch, fields: Fields, nodes: Tensor) -> Draft:
        draft = super().draft(batch, fields, nodes)
        is_odd = draft.token_ids[:, -1] % 2 == 1
        self.is_full[batch.sampling.seeds] = is_odd | (draft.num_tokens < SHORT_K)
        return draft


def check_what_follows_the_refused(kind: str) -> None:
    case = AfterCase(kind, SETTINGS["min_p"])
    check_law(case, emit(case, torch.arange(MANY)))


@pytest.mark.parametrize("kind", ["sampled", "unmasked"])
def test_k_that_follows_what_was_refused(kind: str) -> None:
    check_what_follows_the_refused(kind)


def test_drafts_that_share_noise_with_refused_ones(monkeypatch: Patch) -> None:
    """By position alone, a refused token foretells what is drafted there next."""

    def by_position(batch: DecodeBatch, positions: Tensor) -> DraftNoise:
        return DraftNoise(batch.sampling.seeds, positions, Stream.DRAFT, VOCAB_SIZE)

    monkeypatch.setattr(DecodeBatch, "draft_keys", by_position)
    with pytest.raises(AssertionError, match="p ="):
        check_what_follows_the_refused("sampled")


@dataclass(frozen=True)
class TwinCase(Case):
    """K follows a text that was written before; offset: between the seeds of the two."""

    first: Tensor = field(default_factory=lambda: torch.empty(0))
    offset: int = 0

    def limits(self, seeds: Tensor, nodes: Tensor) -> Tensor:
        at = written(nodes).clamp_max(LENGTH - 1)
        return torch.where(self.first[seeds - self.offset, at] < VOCAB_SIZE // 2, SHORT_K, 0)


@pytest.mark.parametrize("offset", [0, ROWS])
def test_k_that_follows_a_twin(offset: int) -> None:
    """Equal requests need other noise where K is chosen by what was accepted before."""
    seeds = torch.arange(ROWS)
    first = emit(Case("sampled", SETTINGS["temperature"]), seeds)
    case = TwinCase("sampled", SETTINGS["temperature"], first=first, offset=offset)
    texts = emit(case, seeds + offset)
    if offset:
        check_law(case, texts)
        return
    with pytest.raises(AssertionError, match="p ="):
        check_law(case, texts)
