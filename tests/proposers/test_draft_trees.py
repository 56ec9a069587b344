"""Trees around a draft: legal, the best first, and the law of the text is the target's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from guided_spec.config import EngineConfig
from guided_spec.core import DecodeBatch, DraftInFlight, FinishedDraft
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead, Scored
from guided_spec.ops.trees import token_tree
from guided_spec.proposers.draft_trees import DraftTrees
from guided_spec.proposers.drafting import host_draft, no_draft
from guided_spec.step import commit, speculative_step
from guided_spec.types import SamplingParams, Verifier
from tests.proposers.test_draft_loop import SMALL, TARGET, EarlyDrafter, check_two_tokens
from tests.toys import (
    EOS,
    VOCAB_SIZE,
    Rule,
    ToyCompiled,
    along,
    hashed_rule,
    toy_batch,
    toy_context,
)

K = 3


class Knowing(EarlyDrafter):
    """A drafter with a table, which can say what else it knows."""

    @property
    def has_options(self) -> bool:
        return True


def trees(drafter: Any, nodes: int) -> DraftTrees:
    config = EngineConfig(tree_nodes=nodes, num_draft_tokens=K)
    return DraftTrees("toy", drafter, toy_context(config=config, num_slots=1))


def begin(proposer: DraftTrees, batch: DecodeBatch) -> tuple[DraftInFlight, Lookahead]:
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    with torch.inference_mode():
        return proposer.begin(batch, lookahead), lookahead


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
@pytest.mark.parametrize("vocabulary", [None, SMALL], ids=["full", "reduced"])
def test_what_is_emitted_is_the_targets(
    monkeypatch: pytest.MonkeyPatch, vocabulary: Any, verifier: Verifier
) -> None:
    """Around sampled drafts: the first token's law, and the second's behind each first one."""
    rows = 4000
    monkeypatch.setattr(token_tree, "TREE_TOKENS", 16 * rows)
    rules: list[Rule | None] = [hashed_rule(5), None]
    params = [SamplingParams(temperature=1.0, top_k=8)] * (2 * rows)
    compiled = ToyCompiled(hashed_rule(5))
    constraints = [Constraint(compiled) if row % 2 == 0 else None for row in range(2 * rows)]
    limits = [7] * len(params)
    batch = toy_batch([[4]] * len(params), constraints, k=2, params=params, limits=limits)
    batch.verifier = verifier
    with torch.inference_mode():
        step = speculative_step(TARGET, trees(Knowing("mask", vocabulary), 7), batch)
    assert step.branch is not None
    beside = (step.branch.kept > torch.arange(1, step.branch.kept.shape[1] + 1)).any(1)
    # What stands beside the drafts is accepted too. A draft over few tokens gives each of them more
    # than the target does: a refused one leaves little for the others that the drafter knows.
    is_rare = vocabulary is not None and verifier == "rejection"
    assert int(beside.sum()) > (0 if is_rare else rows / 10)
    committed = commit(batch, step.accepted)
    check_two_tokens(committed, rules)


class Known(EarlyDrafter):
    """Drafts given tokens, and knows given scores of all tokens at each place."""

    def __init__(self, drafted: Sequence[int], scores: Sequence[Sequence[float]]) -> None:
        self._drafted, self._scores = drafted, np.array(scores, dtype=np.float32)

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        del carry
        for depth, scores in enumerate(self._scores):
            order = (-scores).argsort(kind="stable").astype(np.int32)
            lookahead.options[0][depth] = Scored(order, scores[order])
        draft = host_draft(batch, lookahead.extend([self._drafted]))
        return FinishedDraft(draft, tuple(lookahead.lengths))

    @property
    def has_options(self) -> bool:
        return True


@pytest.mark.parametrize("seed", range(12))
def test_the_best_legal_branches_are_grown(seed: int) -> None:
    """Of all branches those whose probability, among what is legal, is highest."""
    random, rule = np.random.default_rng(seed), hashed_rule(seed)
    if seed % 3 == 0:
        rule = lambda _: frozenset(range(EOS))  # noqa: E731
    scores = random.normal(size=(K, VOCAB_SIZE)) * 2
    costs: dict[tuple[int, ...], float] = {(): 0.0}
    for depth in range(K):
        for text in [text for text in costs if len(text) == depth and EOS not in text]:
            legal = sorted(rule(text))
            weights = np.exp(scores[depth, legal])
            for token, weight in zip(legal, weights / weights.sum(), strict=True):
                costs[*text, token] = costs[text] - float(np.log(weight))
    trunk = min((t for t in costs if len(t) == K or EOS in t), key=costs.__getitem__, default=())
    nodes = 20
    batch = toy_batch([[4]], [Constraint(ToyCompiled(rule))], k=K, limits=[nodes])
    flight, lookahead = begin(trees(Known(trunk, scores.tolist()), nodes), batch)
    draft = flight.finish()
    assert tuple(draft.token_ids[0, : len(trunk)].tolist()) == trunk
    count, tokens = int(draft.num_tokens[0]), draft.token_ids[0].tolist()
    found = {tuple(along(draft.tree, 0, at, tokens)) for at in range(1, count + 1)}
    assert len(found) == count
    own = {trunk[:length] for length in range(1, len(trunk) + 1)}
    others = sorted((t for t in costs if t and t not in own), key=costs.__getitem__)
    assert found == own | set(others[: nodes - len(trunk)])
    assert flight.most == (count,)
    rows = lookahead.finish(draft.token_ids.shape[1])
    assert rows is not None
    for place in range(count + 1):  # each place has the mask of its own branch
        text = tuple(along(draft.tree, 0, place, tokens))
        if EOS not in text:
            bits = [int(rows[0, place, 0]) >> token & 1 for token in range(VOCAB_SIZE)]
            assert {token for token, bit in enumerate(bits) if bit} == rule(text)


def test_many_requests_are_drafted_for_as_without_trees() -> None:
    """Nothing else is asked of the drafter, and nothing is waited for."""

    class Watched(Knowing):
        def begin(self, batch: Any, lookahead: Any, carry: object | None = None) -> DraftInFlight:
            assert not lookahead.wants_options
            return super().begin(batch, lookahead, carry)

    count = token_tree.TREE_TOKENS // (2 * K + 1) + 1
    batch = toy_batch([[4]] * count, [None] * count, k=K, limits=[7] * count)
    flight, lookahead = begin(trees(Watched("validate"), 7), batch)
    assert not flight.is_walked
    assert flight.finish().tree is None
    assert lookahead.options == [{}] * count


@pytest.mark.parametrize(("limit", "nodes"), [*product((0, 1, 2, 5), (1, 4, 9))])
def test_no_token_too_many(limit: int, nodes: int) -> None:
    batch = toy_batch([[4]], [None], k=K, limits=[limit])
    flight, _ = begin(trees(Knowing("mask"), nodes), batch)
    draft = flight.finish()
    assert draft.token_ids.shape[1] <= max(limit, 0) if draft.tree is None else nodes
    if draft.tree is not None:
        assert draft.tree.depth <= limit


def test_a_draft_that_ends_with_an_illegal_token_stays_a_chain() -> None:
    batch = toy_batch([[4]], [Constraint(ToyCompiled(lambda _: frozenset({2})))], k=K, limits=[9])
    scores = np.zeros((K, VOCAB_SIZE)).tolist()
    flight, lookahead = begin(trees(Known([2, 3, 4], scores), 9), batch)
    assert lookahead.refused == [3]
    assert flight.finish().tree is None


def test_who_knows_nothing_drafts_chains() -> None:
    class Silent(Known):
        def begin(self, batch: Any, lookahead: Any, carry: object | None = None) -> DraftInFlight:
            del lookahead, carry
            return FinishedDraft(no_draft(batch), (0,) * len(batch))

    batch = toy_batch([[4]], [None], k=K, limits=[9])
    flight, _ = begin(trees(Silent([], []), 9), batch)
    assert flight.finish().tree is None
