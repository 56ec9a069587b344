"""The kernels of the verify decision on a CUDA device, at the sizes of real vocabularies."""

from __future__ import annotations

import pytest
import torch

from guided_spec.ops.bitmask import pack_bitmask
from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.verify import verify
from guided_spec.ops.sampling.warp import Sampling, VerifyRows
from guided_spec.types import Accepted, Draft, SamplingParams, Verifier
from tests.ops.sampling.verify_cases import Case, narrowed, unexplained
from tests.toys import chi_square_p_value

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
DEPTH = 3
NEAR = 1e-4  # the reference adds a quarter of a million float32 numbers
PARAMS = (
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.9, top_k=50),
    SamplingParams(temperature=1.2, min_p=0.05),
    SamplingParams(temperature=1.1, min_p=0.001, top_k=200, top_p=0.9),
    SamplingParams(temperature=0.7, top_k=1000),
    SamplingParams(temperature=1.5, top_p=0.999),
)


def make_case(
    size: int, batch: int, dtype: torch.dtype, verifier: Verifier, *, has_probs: bool = False
) -> Case:
    """Free, dense, sparse and impossible rows; drafts that are often right, of any length."""
    generator = torch.Generator(CUDA).manual_seed(size + batch)
    shape = (batch, DEPTH + 1, size)
    logits = torch.randn(shape, generator=generator, device=CUDA) * 3
    logits[..., :: size // 7] += 9  # a few likely tokens, with ties in bfloat16
    logits = logits.to(dtype)
    share = torch.tensor([1.1, 0.98, 0.001, 0.5], device=CUDA)[torch.arange(batch) % 4]
    legal = torch.rand(shape, generator=generator, device=CUDA) < share.view(-1, 1, 1)
    legal[-1, -1] = batch == 1
    bitmask = pack_bitmask(legal)
    lengths = torch.arange(batch, device=CUDA) % (DEPTH + 1) if batch > 1 else None
    lengths = torch.tensor([DEPTH], device=CUDA) if lengths is None else lengths
    heads = logits[:, :-1].float().masked_fill(~legal[:, :-1], -1e4)
    draft = Draft(heads.argmax(-1), lengths)
    if has_probs:
        probs = torch.softmax(heads * 0.9, -1)
        ids = torch.multinomial(probs.flatten(0, 1), 1, generator=generator)
        draft = Draft(ids.view(batch, DEPTH), lengths, probs)
    seeds = torch.arange(batch, device=CUDA) + 2**40
    params = [PARAMS[request % len(PARAMS)] for request in range(batch)]
    sampling = Sampling.stack(params, seeds.tolist(), CUDA)
    return Case(
        logits, bitmask, draft, VerifyRows(sampling, NoiseKeys(seeds, seeds % 97), verifier)
    )


def check(case: Case) -> None:
    found = verify(case.logits, case.bitmask, case.draft, case.rows)
    close, wrong = unexplained(case, found, NEAR)
    assert not wrong
    assert close <= 1 + len(case.logits) // 20


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("size", [1000, 32_000, 128_256, 151_669, 262_144])
def test_kernels_decide_as_the_reference(
    size: int, batch: int, dtype: torch.dtype, verifier: Verifier
) -> None:
    check(make_case(size, batch, dtype, verifier))


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("size", [1000, 128_256])
def test_drafts_with_probabilities(size: int, *, is_narrow: bool) -> None:
    case = make_case(size, 16, torch.bfloat16, "rejection", has_probs=True)
    if is_narrow:
        draft = narrowed(case.draft, size // 3, torch.Generator(CUDA).manual_seed(1))
        case = Case(case.logits, case.bitmask, draft, case.rows)
    check(case)


def with_rules(case: Case, params: SamplingParams) -> Case:
    batch, _, size = case.logits.shape
    rules = [TokenRules(params, ((1, 2), (0,)), (4,)) if row % 3 else None for row in range(batch)]
    texts = [[1, 5, 7, 5, row % 3] for row in range(batch)]
    table = RuleTable.stack(rules, size, CUDA)
    adjustments = Adjustments.stack(table, texts, [2] * batch)
    sampling = Sampling.stack([params] * batch, range(batch), CUDA)
    rows = case.rows._replace(adjustments=adjustments, sampling=sampling)
    few = torch.arange(batch * DEPTH, device=CUDA).view(batch, DEPTH) % 3
    return Case(case.logits, case.bitmask, case.draft._replace(token_ids=few), rows)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("masked", [False, True])
def test_bias_bans_and_penalties(*, temperature: float, masked: bool) -> None:
    params = SamplingParams(
        temperature=temperature,
        logit_bias={0: 20.0, 1: 21.0, 2: 22.0, 4: 24.0, 7: 21.0},
        min_tokens=5,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.2,
        top_p=0.95,
    )
    case = with_rules(make_case(32_000, 9, torch.bfloat16, "rejection"), params)
    bitmask = case.bitmask
    assert bitmask is not None
    before = bitmask.clone()
    check(case if masked else Case(case.logits, None, case.draft, case.rows))
    assert torch.equal(bitmask, before)


def test_broken_logits_are_dead_ends() -> None:
    for kind in (torch.nan, torch.inf):
        case = make_case(32_000, 8, torch.float32, "rejection")
        case.logits[:, :, 17_001] = kind
        check(Case(case.logits, None, case.draft, case.rows))


@pytest.mark.parametrize("has_probs", [False, True])
def test_first_tokens_have_the_targets_law(*, has_probs: bool) -> None:
    """Of a peaked row, whatever was drafted; the rest of the vocabulary counts as one."""
    batch, size = 20_000, 4000
    likely = torch.tensor([5, 1000, 2049, 3000, size - 1], device=CUDA)
    row = torch.full((size,), -9.0, device=CUDA)
    row[likely] = torch.tensor([1.0, 2.0, 0.5, 1.5, 0.0], device=CUDA)
    logits = row.expand(batch, 2, size)
    generator = torch.Generator(CUDA).manual_seed(1)
    drafted = torch.softmax(row * 0.5, -1)
    if not has_probs:
        drafted = torch.zeros_like(row).index_fill(0, likely[3], 1.0)
    ids = torch.multinomial(drafted, batch, replacement=True, generator=generator).view(-1, 1)
    probs = drafted.expand(batch, 1, -1) if has_probs else None
    draft = Draft(ids, torch.ones(batch, dtype=torch.int64, device=CUDA), probs)
    seeds = torch.arange(batch, device=CUDA)
    params = [SamplingParams(temperature=0.7)] * batch
    rows = VerifyRows(Sampling.stack(params, range(batch), CUDA), NoiseKeys(seeds, seeds * 0))
    first = verify(logits, None, draft, rows).token_ids[:, 0]
    law = torch.softmax(row / 0.7, -1).double()
    counts = torch.bincount(first, minlength=size)
    grouped, expected = counts[likely], law[likely]
    grouped = torch.cat([grouped, (counts.sum() - grouped.sum()).view(1)]).cpu()
    expected = torch.cat([expected, (1 - expected.sum()).view(1)]).cpu()
    assert chi_square_p_value(grouped, expected) > 1e-6


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_a_graph_replays_the_same(verifier: Verifier) -> None:
    """And with other inputs in the same memory it gives what these give."""
    case = make_case(32_000, 8, torch.bfloat16, verifier)
    expected = verify(case.logits, case.bitmask, case.draft, case.rows)
    other = torch.randn(case.logits.shape, device=CUDA).to(torch.bfloat16) * 4
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = verify(case.logits, case.bitmask, case.draft, case.rows)
    for _ in range(3):
        graph.replay()
        assert_same(found, expected)
    case.logits.copy_(other)
    graph.replay()
    assert_same(found, verify(other, case.bitmask, case.draft, case.rows))


def assert_same(found: Accepted, expected: Accepted) -> None:
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(found.num_accepted, expected.num_accepted)
