"""What proposers share: putting drafts together, and joining ragged ones."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.proposers.drafting import concatenate, host_draft
from guided_spec.types import Draft
from tests.toys import VOCAB_SIZE, toy_batch

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
