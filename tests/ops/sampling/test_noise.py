"""The noise: Philox as published, keyed by seed, position, stream and column and nothing else."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.grammar.spec import GrammarSpec
from guided_spec.ops.sampling import noise as noise_module
from guided_spec.ops.sampling.noise import (
    Stream,
    exponential_noise,
    noise_key,
    philox,
    request_key,
    uniform_noise,
)
from guided_spec.types import SamplingParams

LOW = 2**32 - 1
SEEDS = st.integers(0, 2**63 - 1)
POSITIONS = st.integers(0, 2**40)


def philox4x32(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The reference of the paper, in Python's integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = right >> 32 ^ c1 ^ k0, right & LOW, left >> 32 ^ c3 ^ k1, left & LOW
        k0, k1 = k0 + 0x9E3779B9 & LOW, k1 + 0xBB67AE85 & LOW
    return c0, c1, c2, c3


# Random123's known answers (kat_vectors, philox4x32 10).
KNOWN = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((LOW,) * 4, (LOW,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_reference_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]
) -> None:
    assert philox4x32(counter, key) == answer


def test_known_answer() -> None:
    found = philox(torch.tensor([0]), torch.tensor([0]), Stream.ACCEPT, 4)
    assert found.tolist() == [list(KNOWN[0][2])]


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=4), st.sampled_from(Stream))
def test_philox_is_the_reference(rows: list[tuple[int, int]], stream: Stream) -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    found = philox(seeds, positions, stream, 10)
    for (seed, position), words in zip(rows, found.tolist(), strict=True):
        key = (seed & LOW, seed >> 32)
        blocks = [
            philox4x32((block, position & LOW, position >> 32, int(stream)), key)
            for block in range(3)
        ]
        assert words == [word for block in blocks for word in block][:10]


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=2, max_size=5))
def test_a_row_is_the_same_alone(rows: list[tuple[int, int]]) -> None:
    seeds, positions = (torch.tensor(column) for column in zip(*rows, strict=True))
    together = exponential_noise(seeds, positions, Stream.SAMPLE, 9)
    spread = positions.unsqueeze(1) + torch.arange(3)
    uniform = uniform_noise(seeds, spread, Stream.ACCEPT)
    for row in range(len(rows)):
        one = slice(row, row + 1)
        alone = exponential_noise(seeds[one], positions[one], Stream.SAMPLE, 9)
        assert torch.equal(alone, together[one])
        for depth in range(3):
            single = uniform_noise(seeds[one], spread[one, depth : depth + 1], Stream.ACCEPT)
            assert single.item() == uniform[row, depth].item()


def test_columns_do_not_depend_on_how_many_there_are() -> None:
    seeds, positions = torch.tensor([5]), torch.tensor([6])
    wide = exponential_noise(seeds, positions, Stream.DRAFT, 101)
    assert torch.equal(exponential_noise(seeds, positions, Stream.DRAFT, 7), wide[:, :7])


def test_keys_share_no_number() -> None:
    seeds = torch.tensor([1, 1, 2, 1 + 2**32])
    positions = torch.tensor([1, 2, 1, 1])
    words = torch.cat([philox(seeds, positions, stream, 64) for stream in Stream])
    assert words.unique().numel() == words.numel()


def test_a_noise_key_is_made_of_seed_prompt_and_grammar() -> None:
    """It is the same number in every process."""
    spec = GrammarSpec.regex("[a-d]\u00e9")
    keys = [
        noise_key(7, [1, 2]),
        noise_key(8, [1, 2]),
        noise_key(7, [1]),
        noise_key(7, [2, 1]),
        noise_key(7, [1, 2], spec),
        noise_key(7, [1, 2], GrammarSpec.lark("[a-d]\u00e9")),
        noise_key(7, [1, 2], spec.after("x")),
        noise_key(7, [1, 2], spec.after([5, 6], reasoning_budget=3)),
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**63 for key in keys)
    assert keys[0] == 4610928929769687676
    assert noise_key(7, (1, 2), spec.with_backend("xgrammar")) == noise_key(7, [1, 2], spec)


LEFT_OUT: dict[str, Any] = {
    "n": 3,
    "cache_salt": "x",
    "lora": "x",
    "logprobs": 2,
    "logprobs_mode": "masked",
    "echo": True,
    "max_tokens": 9,
    "stop": ("x",),
    "stop_token_ids": (3,),
    "ignore_eos": True,
    "complete": False,
    "on_short": "error",
    "return_routed_experts": True,
}
OTHERWISE: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.1,
    "logit_bias": {3: 1.0},
    "bad_words": ("x",),
    "allowed_token_ids": (3,),
    "min_tokens": 1,
    "repetition_penalty": 1.5,
    "frequency_penalty": 1.5,
    "presence_penalty": 1.5,
    "draft_policy": "mask",
}


def test_requests_that_draw_or_draft_otherwise_have_other_keys() -> None:
    """Not those that report other things, or end elsewhere."""
    plain = SamplingParams(seed=1)
    names = {field.name for field in fields(SamplingParams)}
    assert names == {*OTHERWISE, *LEFT_OUT, "seed", "grammar"}
    others = [replace(plain, **{name: value}) for name, value in OTHERWISE.items()]
    keys = {request_key(7, [1, 2], one) for one in (plain, *others)}
    assert len(keys) == 1 + len(OTHERWISE)
    for name, value in LEFT_OUT.items():
        alike = replace(plain, **{name: value})
        assert request_key(7, [1, 2], alike) == request_key(7, [1, 2], plain)


def test_equal_requests_have_equal_keys() -> None:
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"presence_penalty": -0.0}, {"presence_penalty": 0.0}),
        ({"bad_words": "x"}, {"bad_words": ["x"]}),
        ({"logit_bias": {3: 1, 2: 0.5}}, {"logit_bias": [(2, 0.5), (3, 1.0)]}),
        ({"top_k": -1}, {}),
    ]
    for one, other in pairs:
        found = [request_key(7, [1], SamplingParams(**params)) for params in (one, other)]
        assert found[0] == found[1]
    assert request_key(7, [1], SamplingParams()) == noise_key(7, [1])


def test_a_coupled_key_leaves_the_draft_policy_out() -> None:
    params = [SamplingParams(draft_policy=policy) for policy in (None, "mask", "validate")]
    assert len({request_key(7, [1], one, "coupled") for one in params}) == 1
    assert len({request_key(7, [1], one, "rejection") for one in params}) == 3


def test_streams_differ() -> None:
    assert len({int(stream) for stream in Stream}) == len(Stream)


def test_uniform_range_and_moments() -> None:
    positions = torch.arange(200_000).view(2, -1)
    drawn = uniform_noise(torch.tensor([3, 4]), positions, Stream.ACCEPT)
    assert drawn.dtype == torch.float32
    assert 0 <= drawn.min().item() < 1e-4
    assert 1 - 1e-4 < drawn.max().item() < 1
    assert abs(drawn.mean().item() - 1 / 2) < 0.005
    assert abs(drawn.var().item() - 1 / 12) < 0.002


def test_exponential_range_and_moments() -> None:
    drawn = exponential_noise(torch.arange(20), torch.arange(20), Stream.SAMPLE, 20_000)
    assert drawn.dtype == torch.float32
    assert bool((drawn > 0).all())
    assert bool(drawn.isfinite().all())
    assert abs(drawn.mean().item() - 1) < 0.01
    assert abs(drawn.var().item() - 1) < 0.03


@pytest.mark.parametrize("word", [0, 1, 2**24, 2**31, LOW - 1, LOW])
def test_exponential_of_extreme_bits(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    monkeypatch.setattr(noise_module, "philox", lambda *_: torch.tensor([[word]]))
    drawn = exponential_noise(torch.tensor([0]), torch.tensor([0]), Stream.SAMPLE, 1).item()
    expected = -torch.log1p(torch.tensor(-(word + 0.5) / 2**32, dtype=torch.float64)).item()
    assert 0 < drawn < 17
    assert drawn == pytest.approx(min(expected, 24 * 0.6931472), rel=1e-6)


@pytest.mark.parametrize(("word", "expected"), [(0, 0.0), (255, 0.0), (LOW, 1 - 2**-24)])
def test_uniform_of_extreme_bits(
    monkeypatch: pytest.MonkeyPatch, word: int, expected: float
) -> None:
    monkeypatch.setattr(noise_module, "philox", lambda *_: torch.tensor([[word]]))
    drawn = uniform_noise(torch.tensor([0]), torch.tensor([[0]]), Stream.ACCEPT)
    assert drawn.item() == expected
