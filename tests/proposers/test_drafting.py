"""What proposers share: joining ragged drafts, and sampling from what is reported."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.lookahead import Lookahead
from guided_spec.proposers.drafting import concatenate, draft_autoregressively, host_draft
from guided_spec.types import Draft, SamplingParams
from tests.toys import (
    EOS,
    VOCAB_SIZE,
    ToyCompiled,
    chi_square_p_value,
    hashed_rule,
    text_rule,
    toy_batch,
)

SIZE = 3
RAGGED = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4), min_size=SIZE, max_size=SIZE
)
BATCH = toy_batch([[0]] * SIZE, [None] * SIZE)


def with_probs(draft: Draft, seed: int) -> Draft:
    shape = (*draft.token_ids.shape, VOCAB_SIZE)
    return draft._replace(probs=torch.rand(shape, generator=torch.Generator().manual_seed(seed)))


def probs_at(draft: Draft, row: int, at: int) -> Tensor:
    if draft.probs is not None:
        return draft.probs[row, at]
    return torch.nn.functional.one_hot(draft.token_ids[row, at], VOCAB_SIZE).float()


@given(RAGGED)
def test_host_draft(lists: list[list[int]]) -> None:
    draft = host_draft(BATCH, lists)
    assert draft.token_ids.shape == (SIZE, max(map(len, lists)))
    for row, tokens in enumerate(lists):
        length = int(draft.num_tokens[row])
        assert draft.token_ids[row].tolist() == tokens + [0] * (draft.token_ids.shape[1] - length)
        assert length == len(tokens)


@given(left=RAGGED, right=RAGGED, left_probs=st.booleans(), right_probs=st.booleans())
def test_concatenate(
    left: list[list[int]], right: list[list[int]], *, left_probs: bool, right_probs: bool
) -> None:
    first, second = host_draft(BATCH, left), host_draft(BATCH, right)
    first = with_probs(first, 1) if left_probs else first
    second = with_probs(second, 2) if right_probs else second
    joined = concatenate(first, second)
    assert (joined.probs is None) == (not left_probs and not right_probs)
    assert bool(((joined.token_ids >= 0) & (joined.token_ids < VOCAB_SIZE)).all())
    for row in range(SIZE):
        length = int(joined.num_tokens[row])
        assert joined.token_ids[row, :length].tolist() == left[row] + right[row]
        parts = [(first, at) for at in range(len(left[row]))]
        parts += [(second, at) for at in range(len(right[row]))]
        for at, (draft, index) in enumerate(parts):
            assert torch.equal(probs_at(joined, row, at), probs_at(draft, row, index))


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
