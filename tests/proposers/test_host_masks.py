"""The draft loop: what each policy drafts, and that none of them changes what is emitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, Proposer, from_propose
from guided_spec.errors import ConfigError
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.sampling.rejection import dense_probs
from guided_spec.proposers.draft_session import DraftRows
from guided_spec.proposers.drafting import read_policy
from guided_spec.proposers.host_masks import HostMasks, draft_autoregressively
from guided_spec.step import Committed, commit, speculative_step
from guided_spec.types import DRAFT_POLICIES, Draft, DraftPolicy, SamplingParams
from tests.loops import plain_greedy, speculate, target_probs
from tests.toys import (
    EOS,
    VOCAB_SIZE,
    Rule,
    ToyCompiled,
    ToyTarget,
    chi_square_p_value,
    hashed_rule,
    text_rule,
    toy_batch,
)

POLICIES: tuple[DraftPolicy, ...] = ("mask", "validate")
SMALL = DraftVocabulary(torch.tensor([0, 2, 3, 5, 6, EOS]), VOCAB_SIZE)
TARGET = ToyTarget(3)


class TableDrafter:
    """Drafts from a table of logits by the last token, in a vocabulary of its own."""

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, policy: DraftPolicy, vocabulary: DraftVocabulary | None = None) -> None:
        size = VOCAB_SIZE if vocabulary is None else len(vocabulary)
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(VOCAB_SIZE, size, generator=generator) * 2
        self._policy, self._vocabulary = policy, vocabulary

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        return self.run(batch, lookahead).in_flight().finish()

    def run(self, batch: DecodeBatch, lookahead: Lookahead) -> HostMasks:
        last = [
            [*context, *drafted][-1]
            for context, drafted in zip(batch.contexts, lookahead.drafted, strict=True)
        ]
        rows = DraftRows.from_batch(batch, lookahead, self._policy)
        masks = HostMasks(rows, self._vocabulary)
        masks.draft(self.table[last], lambda token_ids: self.table[token_ids])
        return masks

    def release(self, slots: Sequence[int]) -> None:
        del slots


class EarlyDrafter(TableDrafter, Proposer):
    """The same, whose draft the target reads before the host has seen it."""

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        del carry
        return self.run(batch, lookahead).in_flight()


@pytest.mark.parametrize("kind", [TableDrafter, EarlyDrafter])
@pytest.mark.parametrize("vocabulary", [None, SMALL], ids=["full", "reduced"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_emitted_is_the_targets(
    policy: DraftPolicy, vocabulary: DraftVocabulary | None, kind: type[TableDrafter]
) -> None:
    """Free and constrained rows: the first token's law, and the second's after each first one."""
    rows = 6000
    rules: list[Rule | None] = [hashed_rule(5), None]
    params = [SamplingParams(temperature=1.0, top_k=8)] * (2 * rows)
    compiled = ToyCompiled(hashed_rule(5))
    constraints = [Constraint(compiled) if row % 2 == 0 else None for row in range(2 * rows)]
    batch = toy_batch([[4]] * (2 * rows), constraints, k=2, params=params)
    with torch.inference_mode():
        step = speculative_step(TARGET, from_propose(kind(policy, vocabulary)), batch)
    committed = commit(batch, step.accepted)
    assert max(len(one.token_ids) for one in committed) == 3  # drafts are accepted at all
    check_two_tokens(committed, rules)


def check_two_tokens(committed: Sequence[Committed], rules: Sequence[Rule | None]) -> None:
    """The law of the first token, and of the second behind each first one.

    rules: of the texts, in turn.
    """
    for parity, rule in enumerate(rules):
        texts = [tuple(one.token_ids) for one in committed[parity :: len(rules)]]
        check_law(Counter(text[0] for text in texts), law(rule, ()))
        for first, count in Counter(text[0] for text in texts if len(text) > 1).items():
            seconds = Counter(text[1] for text in texts if len(text) > 1 and text[0] == first)
            if count > 100:
                check_law(seconds, law(rule, (first,)))


def law(rule: Rule | None, output: tuple[int, ...]) -> Tensor:
    probs = target_probs(TARGET, rule, [4], output)
    kept = probs.topk(8)
    return torch.zeros(VOCAB_SIZE).scatter(0, kept.indices, kept.values / kept.values.sum())


def check_law(counts: Counter[int], probs: Tensor) -> None:
    assert chi_square_p_value(torch.tensor([counts[t] for t in range(VOCAB_SIZE)]), probs) > 1e-6


def propose(batch: DecodeBatch, drafter: TableDrafter) -> tuple[Draft, Lookahead]:
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    return drafter.propose(batch, lookahead), lookahead


def lists(draft: Draft) -> list[list[int]]:
    rows = zip(draft.token_ids.tolist(), draft.num_tokens.tolist(), strict=True)
    return [row[:length] for row, length in rows]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocabulary", [None, SMALL], ids=["full", "reduced"])
@pytest.mark.parametrize("policies", [*((one,) for one in POLICIES), POLICIES], ids="+".join)
def test_a_draft_that_is_read_early_is_the_same(
    policies: tuple[DraftPolicy, ...], vocabulary: DraftVocabulary | None, temperature: float
) -> None:
    """Whoever reads its tokens beforehand; limits, ends of texts and free rows among them."""
    rules = [hashed_rule(2), text_rule([b"ab"]), None, hashed_rule(5), text_rule([b"ca:b"])]
    params = [
        SamplingParams(
            temperature=temperature, seed=row, draft_policy=policies[row % len(policies)]
        )
        for row in range(len(rules))
    ]
    drafts, lookaheads = [], []
    for is_early in (False, True):
        constraints = [None if rule is None else Constraint(ToyCompiled(rule)) for rule in rules]
        batch = toy_batch([[4]] * 5, constraints, k=4, limits=[4, 4, 4, 2, 0], params=params)
        batch.policies = tuple(one.draft_policy for one in params)
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        pending = TableDrafter("mask", vocabulary).run(batch, lookahead).in_flight()
        first = pending.draft.token_ids.clone() if is_early else None
        draft = pending.finish()
        if first is not None:
            assert torch.equal(first, draft.token_ids)
            read = pending.draft
            assert torch.equal(read.token_ids, draft.token_ids)
            assert bool((read.num_tokens >= draft.num_tokens).all())
            assert bool(((read.token_ids >= 0) & (read.token_ids < VOCAB_SIZE)).all())
        drafts.append(draft)
        lookaheads.append(lookahead)
    assert lists(drafts[0]) == lists(drafts[1])
    assert max(map(len, lists(drafts[0]))) == 4
    assert lookaheads[0].drafted == lookaheads[1].drafted
    assert lookaheads[0].refused == lookaheads[1].refused
    late, early = drafts
    assert (late.probs is None) == (early.probs is None) == (temperature == 0)
    if late.probs is not None:
        early = early.cut(late.token_ids.shape[1])
        assert torch.equal(dense_probs(late, VOCAB_SIZE), dense_probs(early, VOCAB_SIZE))


def test_validate_keeps_the_first_illegal_token_for_the_verifier() -> None:
    drafter = TableDrafter("validate")
    drafter.table = torch.nn.functional.one_hot(torch.arange(VOCAB_SIZE).roll(-1)).float()
    rules = [text_rule([b"bcd"]), text_rule([b"ba"]), text_rule([b"d"]), text_rule([b"b"])]
    batch = toy_batch([[0]] * 4, [Constraint(ToyCompiled(rule)) for rule in rules], k=3)
    draft, lookahead = propose(batch, drafter)
    assert lists(draft) == [[1, 2, 3], [1, 2], [1], [1, 2]]
    assert lookahead.drafted == [[1, 2, 3], [1], [], [1]]
    assert lookahead.refused == [None, 2, 1, 2]


def test_a_starved_row_drafts_the_only_legal_token_or_nothing() -> None:
    rules = [text_rule([b"a:a"]), text_rule([b"ab", b"a:"]), text_rule([b"a1"])]
    batch = toy_batch(
        [[0]] * 3,
        [Constraint(ToyCompiled(rule)) for rule in rules],
        k=4,
        params=[SamplingParams(temperature=1.0)] * 3,
    )
    draft, lookahead = propose(batch, TableDrafter("mask", SMALL))
    assert lists(draft) == [[0, 7, 0, EOS], [0], [0, 9, EOS]]
    assert lookahead.starved == [1, 1, 1]
    probs = dense_probs(draft, VOCAB_SIZE)
    assert probs[0, 1].tolist() == [float(token == 7) for token in range(VOCAB_SIZE)]
    assert probs.sum(-1)[0].tolist() == pytest.approx([1.0] * 4)
    assert draft.probs is not None
    assert draft.probs.shape == (3, 4, len(SMALL))


def test_free_drafts_wait_for_the_host_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    next_mask = Lookahead.next_mask

    def counting(lookahead: Lookahead) -> Tensor | None:
        asked.append(1)
        return next_mask(lookahead)

    monkeypatch.setattr(Lookahead, "next_mask", counting)
    for policy, masks in zip(POLICIES, (3, 0), strict=True):
        asked.clear()
        propose(toy_batch([[0]], [Constraint(ToyCompiled(hashed_rule(1)))]), TableDrafter(policy))
        assert len(asked) == masks
    asked.clear()
    propose(toy_batch([[0]], [None]), TableDrafter("mask"))
    assert not asked


def test_each_request_has_its_own_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    fills: Counter[tuple[int, int]] = Counter()
    fill = MaskRows.fill

    def counting(rows: MaskRows, matcher: object, request: int, depth: int) -> None:
        fills[request, depth] += 1
        fill(rows, matcher, request, depth)  # type: ignore[arg-type]

    monkeypatch.setattr(MaskRows, "fill", counting)
    rule = hashed_rule(2)
    alone: list[list[int]] = []
    policies: list[DraftPolicy | None] = ["mask", "validate", None]
    for policy in policies:
        batch = toy_batch([[0]], [Constraint(ToyCompiled(rule))], k=4)
        batch.policies = (policy,)
        alone += lists(propose(batch, TableDrafter("validate"))[0])
    batch = toy_batch([[0]] * 3, [Constraint(ToyCompiled(rule)) for _ in policies], k=4)
    batch.policies = tuple(policies)
    fills.clear()
    draft, lookahead = propose(batch, TableDrafter("validate"))
    assert lists(draft) == alone
    assert lists(draft)[1] == lists(draft)[2]
    assert {request for request, _ in fills} == {0}  # only the masked one needs its masks now
    lookahead.start()
    lookahead.finish(draft.token_ids.shape[1])
    assert set(fills.values()) == {1}


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("vocabulary", [None, SMALL], ids=["full", "reduced"])
@pytest.mark.parametrize("policy", POLICIES)
def test_greedy_text(policy: DraftPolicy, vocabulary: DraftVocabulary | None, k: int) -> None:
    rules = [hashed_rule(1), None, text_rule([b'{"ab":1}', b'{"cd":0}']), hashed_rule(2)]
    drafter = TableDrafter(policy, vocabulary)
    found = speculate(TARGET, from_propose(drafter), rules, [4], length=10, k=k)
    assert found == [plain_greedy(TARGET, rule, [4], 10) for rule in rules]


def test_policies_by_name() -> None:
    assert set(POLICIES) == set(DRAFT_POLICIES)
    assert read_policy("", "validate") == "validate"
    assert read_policy("mask", "validate") == "mask"
    with pytest.raises(ConfigError, match="draft policy='topk_walk': must be one of mask, val"):
        read_policy("topk_walk", "mask")
    with pytest.raises(ConfigError, match="draft_policy='topk_walk'"):
        SamplingParams(draft_policy="topk_walk")  # type: ignore[arg-type]


ROWS = 20_000


def test_tokens_are_drawn_from_the_reported_probabilities() -> None:
    generator = torch.Generator().manual_seed(1)
    first = torch.randn(VOCAB_SIZE, generator=generator)
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=generator)
    params = SamplingParams(temperature=1.2, top_k=4)
    batch = toy_batch([[0]] * ROWS, [None] * ROWS, k=2, params=[params] * ROWS)
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    draft = draft_autoregressively(
        first.expand(ROWS, -1), lambda token_ids: table[token_ids], batch, lookahead
    )
    assert draft.probs is not None
    assert draft.num_tokens.tolist() == [2] * ROWS
    assert bool((draft.probs[:, 0] == draft.probs[:1, 0]).all())
    law = torch.zeros(VOCAB_SIZE, VOCAB_SIZE)
    for token in draft.token_ids[:, 0].unique().tolist():
        row = (draft.token_ids[:, 0] == token).nonzero()[0, 0]
        law[token] = draft.probs[row, 0, token] * draft.probs[row, 1]
    assert float(law.sum()) == pytest.approx(1.0, abs=1e-4)
    counts = torch.bincount((draft.token_ids * torch.tensor([VOCAB_SIZE, 1])).sum(1), minlength=144)
    assert chi_square_p_value(counts, law) > 1e-6


def test_ragged_rows_stop_where_they_must() -> None:
    rules = [text_rule([b"ab"]), hashed_rule(1), text_rule([b"abcd"]), None]
    constraints = [None if rule is None else Constraint(ToyCompiled(rule)) for rule in rules]
    stuck = Constraint(ToyCompiled(lambda prefix: frozenset() if prefix else frozenset({2})))
    batch = toy_batch([[0]] * 5, [*constraints, stuck], k=4, limits=[4, 0, 2, 4, 4])
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    fed: list[list[int]] = []

    def forward(token_ids: Tensor) -> Tensor:
        fed.append(token_ids.tolist())
        return torch.arange(VOCAB_SIZE).float().expand(5, -1)

    draft = draft_autoregressively(forward(torch.zeros(5)), forward, batch, lookahead)
    assert draft.probs is None
    assert draft.num_tokens.tolist() == [3, 0, 2, 4, 1]
    assert lookahead.drafted == [[0, 1, EOS], [], [0, 1], [EOS] * 4, [2]]
    assert draft.token_ids.shape == (5, 4)
    assert len(fed) == 4  # the last token is not fed
    assert all(0 <= token < VOCAB_SIZE for row in fed for token in row)


def test_nothing_to_draft() -> None:
    batch = toy_batch([[0]], [None], k=3, limits=[0])
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    draft = draft_autoregressively(torch.zeros(1, VOCAB_SIZE), torch.zeros_like, batch, lookahead)
    assert draft.token_ids.shape == (1, 0)
    assert draft.num_tokens.tolist() == [0]
