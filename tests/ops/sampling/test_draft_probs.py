"""A draft over fewer tokens is the wide one: for every reader, position and token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.ops.sampling.rejection import (
    dense_probs,
    draft_at,
    proposed_probs,
    rejection_sample,
)
from guided_spec.types import Draft, Noise
from tests.ops.sampling.verify_cases import narrowed

BATCH, DEPTH, SIZE = 4, 3, 9


def narrow(generator: torch.Generator, known: int) -> Draft:
    probs = torch.softmax(torch.randn(BATCH, DEPTH, SIZE, generator=generator), -1)
    ids = torch.randint(0, SIZE, (BATCH, DEPTH), generator=generator)
    lengths = torch.randint(0, DEPTH + 1, (BATCH,), generator=generator)
    return narrowed(Draft(ids, lengths, probs), known, generator)


def written_out(draft: Draft) -> list[list[list[float]]]:
    """By loops: the distribution of each token."""
    assert draft.probs is not None
    assert draft.columns is not None
    assert draft.is_certain is not None
    found = []
    for row in range(BATCH):
        found.append([[0.0] * SIZE for _ in range(DEPTH)])
        for place, values in enumerate(found[-1]):
            if draft.is_certain[row, place]:
                values[int(draft.token_ids[row, place])] = 1.0
                continue
            for token in range(SIZE):
                if draft.columns[token] >= 0:
                    values[token] = float(draft.probs[row, place, draft.columns[token]])
    return found


@given(st.integers(0, 2**31), st.integers(1, SIZE))
def test_narrow_is_wide(seed: int, known: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draft = narrow(generator, known)
    expected = torch.tensor(written_out(draft))
    assert torch.equal(dense_probs(draft, SIZE), expected)
    own = expected.gather(-1, draft.token_ids.unsqueeze(-1)).squeeze(-1)
    assert torch.equal(proposed_probs(draft), own)
    places = torch.randint(0, DEPTH, (BATCH,), generator=generator)
    picked = dense_probs(draft_at(draft, places), SIZE)
    assert torch.equal(picked.squeeze(1), expected[torch.arange(BATCH), places])
    wide = Draft(draft.token_ids, draft.num_tokens, expected)
    target = torch.softmax(torch.randn(BATCH, DEPTH + 1, SIZE, generator=generator), -1)
    sample = torch.empty(BATCH, SIZE).exponential_(generator=generator)
    noise = Noise(torch.rand(BATCH, DEPTH, generator=generator), sample.clamp_min(1e-30))
    found, other = (rejection_sample(target, one, noise) for one in (draft, wide))
    assert torch.equal(found.token_ids, other.token_ids)


def test_without_probabilities_every_token_is_certain() -> None:
    draft = Draft(torch.tensor([[1, 2]]), torch.tensor([2]))
    assert proposed_probs(draft).tolist() == [[1.0, 1.0]]
    assert dense_probs(draft, 3).tolist() == [[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]]


def test_cut() -> None:
    draft = narrow(torch.Generator().manual_seed(0), 4)
    short = draft.cut(1)
    assert short.num_tokens is draft.num_tokens
    assert torch.equal(dense_probs(short, SIZE), dense_probs(draft, SIZE)[:, :1])
    assert Draft(draft.token_ids, draft.num_tokens).cut(2).probs is None
