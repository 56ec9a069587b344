"""What proposers share: putting drafts together, and joining ragged ones."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from guided_spec.ops.sampling.rejection import dense_probs
from guided_spec.proposers.drafting import concatenate, host_draft
from guided_spec.types import Draft
from tests.ops.sampling.verify_cases import narrowed
from tests.toys import VOCAB_SIZE, toy_batch

SIZE = 3
RAGGED = st.lists(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4), min_size=SIZE, max_size=SIZE
)
BATCH = toy_batch([[0]] * SIZE, [None] * SIZE)


def with_probs(draft: Draft, seed: int) -> Draft:
    shape = (*draft.token_ids.shape, VOCAB_SIZE)
    return draft._replace(probs=torch.rand(shape, generator=torch.Generator().manual_seed(seed)))


def changed(draft: Draft, how: str, seed: int) -> Draft:
    if how == "one_hot":
        return draft
    wide = with_probs(draft, seed)
    return wide if how == "wide" else narrowed(wide, 5, torch.Generator().manual_seed(seed))


@given(RAGGED)
def test_host_draft(lists: list[list[int]]) -> None:
    draft = host_draft(BATCH, lists)
    assert draft.token_ids.shape == (SIZE, max(map(len, lists)))
    for row, tokens in enumerate(lists):
        length = int(draft.num_tokens[row])
        assert draft.token_ids[row].tolist() == tokens + [0] * (draft.token_ids.shape[1] - length)
        assert length == len(tokens)


HOW = st.sampled_from(["one_hot", "wide", "narrow"])


@example(left=[[]] * SIZE, right=[[]] * SIZE, left_how="wide", right_how="one_hot")
@given(left=RAGGED, right=RAGGED, left_how=HOW, right_how=HOW)
def test_concatenate(
    left: list[list[int]], right: list[list[int]], left_how: str, right_how: str
) -> None:
    first = changed(host_draft(BATCH, left), left_how, 1)
    second = changed(host_draft(BATCH, right), right_how, 2)
    joined = concatenate(first, second)
    hows = {left_how, right_how} if any(left) else {right_how}  # nothing to join to otherwise
    assert (joined.probs is None) == (hows == {"one_hot"})
    drawn = {id(part): dense_probs(part, VOCAB_SIZE) for part in (joined, first, second)}
    assert bool(((joined.token_ids >= 0) & (joined.token_ids < VOCAB_SIZE)).all())
    for row in range(SIZE):
        length = int(joined.num_tokens[row])
        assert joined.token_ids[row, :length].tolist() == left[row] + right[row]
        parts = [(first, at) for at in range(len(left[row]))]
        parts += [(second, at) for at in range(len(right[row]))]
        for at, (draft, index) in enumerate(parts):
            assert torch.equal(drawn[id(joined)][row, at], drawn[id(draft)][row, index])


def test_two_drafts_of_one_head_keep_its_columns() -> None:
    one = changed(host_draft(BATCH, [[1, 2], [3], []]), "narrow", 1)
    other = one._replace(is_certain=None)
    for joined in (concatenate(one, other), concatenate(one, host_draft(BATCH, [[1]] * SIZE))):
        assert joined.columns is one.columns
        assert joined.probs is not None
        assert joined.probs.shape[-1] == 5
