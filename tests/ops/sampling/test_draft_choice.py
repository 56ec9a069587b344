"""The draft's token choice against the same thing written out token by token."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.ops.bitmask import pack_bitmask
from guided_spec.ops.sampling.draft_choice import choose_draft, choose_draft_reference
from guided_spec.ops.sampling.noise import DraftNoise, Stream, exponential_noise
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.types import SamplingParams
from tests.draft_choices import make_case

CPU = torch.device("cpu")
NO = float("-inf")
LOGITS = st.sampled_from([NO, -30.0, -1.0, 0.0, 0.0, 0.5, 2.0, 2.0]) | st.floats(-5, 5, width=16)


class Row(NamedTuple):
    """One request: its logits, its legal target tokens (None: all), its temperature."""

    logits: list[float]
    legal: frozenset[int] | None
    temperature: float


class Drawn(NamedTuple):
    """A batch, with V and the target ids of the draft tokens (None: the target's own)."""

    rows: list[Row]
    vocab_size: int
    ids: list[int] | None


@st.composite
def batches(draw: st.DrawFn) -> Drawn:
    size = draw(st.integers(1, 70))
    tokens = st.integers(0, size - 1)
    ids = draw(st.none() | st.lists(tokens, min_size=1, max_size=12, unique=True))
    width = size if ids is None else len(ids)
    legal = st.frozensets(tokens, max_size=4) | st.frozensets(tokens, min_size=size // 2)
    has_masks = draw(st.booleans())
    rows = st.builds(
        Row,
        st.lists(LOGITS, min_size=width, max_size=width) | st.just([NO] * width),
        legal if has_masks else st.none(),
        st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    )
    return Drawn(draw(st.lists(rows, min_size=1, max_size=4)), size, ids)


class Answer(NamedTuple):
    """What one row comes to."""

    token: int
    probs: list[float]
    starved: bool
    rescued: int


def written_out(row: Row, ids: list[int], noise: list[float], *, is_reduced: bool) -> Answer:
    """By the definition, in Python floats; a race that is nearly a tie is no test."""
    pairs = list(enumerate(ids))
    kept = [i for i, t in pairs if row.logits[i] > NO and (row.legal is None or t in row.legal)]
    probs = [0.0] * len(ids)
    if not kept:
        starved = is_reduced and max(row.logits) > NO
        is_single = starved and row.legal is not None and len(row.legal) == 1
        rescued = min(row.legal or {-1}) if is_single else -1
        return Answer(rescued, probs, starved, rescued)
    largest = max(row.logits[i] for i in kept)
    if row.temperature == 0:
        best = min(i for i in kept if row.logits[i] == largest)
        probs[best] = 1.0
        return Answer(ids[best], probs, starved=False, rescued=-1)
    weights = {i: math.exp((row.logits[i] - largest) / row.temperature) for i in kept}
    for i, weight in weights.items():
        probs[i] = weight / sum(weights.values())
    keys = sorted((probs[i] / noise[ids[i]] for i in kept), reverse=True)
    assume(len(keys) == 1 or keys[1] < keys[0] * (1 - 1e-5))
    best = max(kept, key=lambda i: probs[i] / noise[ids[i]])
    return Answer(ids[best], probs, starved=False, rescued=-1)


@given(batches(), st.integers(0, 2**62))
def test_what_the_definition_says(drawn: Drawn, seed: int) -> None:
    rows, size, ids = drawn
    params = [SamplingParams(temperature=row.temperature) for row in rows]
    sampling = Sampling.stack(params, [seed] * len(rows), CPU)
    positions = torch.arange(len(rows)) + 7
    keys = DraftNoise(sampling.seeds, positions, Stream.DRAFT, size)
    noise = exponential_noise(*keys).tolist()
    masks = None if rows[0].legal is None else torch.zeros(len(rows), size, dtype=torch.bool)
    for number, row in enumerate(rows):
        if masks is not None:
            masks[number, sorted(row.legal or ())] = True
    found = choose_draft(
        torch.tensor([row.logits for row in rows]),
        None if masks is None else pack_bitmask(masks),
        None if ids is None else torch.tensor(ids),
        sampling,
        keys,
    )
    scored, is_reduced = ids or list(range(size)), ids is not None
    expected = [
        written_out(row, scored, drawing, is_reduced=is_reduced)
        for row, drawing in zip(rows, noise, strict=True)
    ]
    assert found.tokens.tolist() == [one.token for one in expected]
    assert (found.probs is None) == sampling.all_greedy
    if found.probs is not None:
        wanted = torch.tensor([one.probs for one in expected])
        torch.testing.assert_close(found.probs, wanted, atol=1e-6, rtol=1e-4)
    assert (found.starved is None, found.rescued is None) == (not is_reduced, not is_reduced)
    if found.starved is not None and found.rescued is not None:
        assert found.starved.tolist() == [one.starved for one in expected]
        assert found.rescued.tolist() == [one.rescued for one in expected]


@pytest.mark.parametrize("temperatures", [[0.0] * 9, [0.7, 1.0, 0.0] * 3], ids=["greedy", "mixed"])
def test_a_reduced_vocabulary_draws_as_the_full_one_would(temperatures: list[float]) -> None:
    """The noise of a draft token is that of its target token: so coupled drafts agree."""
    reduced = make_case((100, 20), temperatures, "dense")
    assert reduced.target_ids is not None
    full = torch.full((len(temperatures), 100), NO).index_copy(
        1, reduced.target_ids, reduced.logits
    )
    wide = choose_draft(*reduced._replace(logits=full, target_ids=None))
    found = choose_draft(*reduced)
    assert bool((found.tokens >= 0).any())
    is_drawn = wide.tokens >= 0
    assert torch.equal(found.tokens[is_drawn], wide.tokens[is_drawn])
    if found.probs is not None and wide.probs is not None:
        torch.testing.assert_close(found.probs, wide.probs[:, reduced.target_ids])


def test_filters() -> None:
    """With the two best tokens alone, either is drawn, and nothing else is."""
    case = make_case((50, 30), [1.0] * 400, "none")
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0)).expand(400, -1)
    params = [SamplingParams(temperature=1.0, top_k=2)] * 400
    filtered = case._replace(logits=logits, sampling=Sampling.stack(params, range(400), CPU))
    found = choose_draft(*filtered)
    assert found.probs is not None
    assert case.target_ids is not None
    best = logits[0].topk(2)
    assert set(found.tokens.tolist()) == set(case.target_ids[best.indices].tolist())
    torch.testing.assert_close(found.probs[0, best.indices], torch.softmax(best.values, 0))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(temperature: float) -> None:
    """NaN at a legal token: nothing is drawn. At an illegal one it does not matter."""
    case = make_case((40, 40), [temperature] * 2, "none")
    assert case.target_ids is not None
    logits = torch.zeros(2, 40)
    logits[:, 33] = math.nan
    legal = torch.ones(2, 40, dtype=torch.bool)
    legal[1, case.target_ids[33]] = False
    nothing = choose_draft(*case._replace(logits=logits, bitmask=pack_bitmask(legal)))
    assert nothing.tokens[0] == -1
    assert nothing.tokens[1] >= 0
    assert nothing.starved is not None
    assert nothing.starved.tolist() == [False, False]


def test_arguments_are_left_alone() -> None:
    case = make_case((60, 25), [0.0, 0.5, 1.0], "each")
    before = [tensor.clone() for tensor in case[:3] if isinstance(tensor, Tensor)]
    choose_draft(*case)
    assert all(map(torch.equal, before, [t for t in case[:3] if isinstance(t, Tensor)]))


def test_no_requests() -> None:
    found = choose_draft(*make_case((60, 25), [], "none"))
    assert found.tokens.shape == (0,)


def test_sampling_without_noise_is_refused() -> None:
    case = make_case((60, None), [0.0, 1.0], "none")
    with pytest.raises(ConfigError, match="noise=None"):
        choose_draft(*case._replace(noise=None))  # type: ignore[arg-type]


def test_greedy_needs_no_noise() -> None:
    case = make_case((60, 25), [0.0] * 5, "each")
    found = choose_draft(*case[:4], noise=None)
    assert torch.equal(found.tokens, choose_draft_reference(*case).tokens)
