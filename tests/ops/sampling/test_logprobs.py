"""Log-probabilities of a step's tokens against plain Python, row by row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import ConfigError
from guided_spec.ops.bitmask import apply_token_bitmask, pack_bitmask
from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.ops.sampling.logprobs import LogprobsPlan, Scores, gather_logprobs
from guided_spec.ops.sampling.warp import Sampling, warp
from guided_spec.types import LogprobsMode, SamplingParams, TokenLogprobs, TopLogprob

NO = float("-inf")
VOCAB_SIZE = 9
WIDTH = 3  # K + 1
CPU = torch.device("cpu")
MODES: tuple[LogprobsMode, ...] = ("raw", "masked", "processed")


def log_softmax(row: Sequence[float]) -> list[float]:
    largest = max(row)
    total = math.log(sum(math.exp(x - largest) for x in row))
    return [x - largest - total for x in row]


def expected(row: Sequence[float], token: int, count: int) -> TokenLogprobs:
    """``row``: log-probabilities of the vocabulary."""
    ordered = sorted(range(len(row)), key=lambda t: (-row[t], t))
    top = [TopLogprob(t, row[t]) for t in ordered[:count] if row[t] > NO]
    return TokenLogprobs(token, row[token], tuple(top))


def assert_close(found: list[TokenLogprobs], wanted: list[TokenLogprobs]) -> None:
    assert [one.token_id for one in found] == [one.token_id for one in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
        assert [t.token_id for t in ours.top] == [t.token_id for t in theirs.top]
        assert [t.logprob for t in ours.top] == pytest.approx(
            [t.logprob for t in theirs.top], abs=1e-5
        )


class Tables(NamedTuple):
    """What ``Scores`` come to, by mode: raw and masked logits, and probabilities."""

    raw: torch.Tensor
    masked: torch.Tensor
    processed: torch.Tensor


def tables_of(scores: Scores) -> Tables:
    masked = apply_token_bitmask(scores.logits, scores.bitmask)
    return Tables(scores.logits, masked, warp(masked, scores.sampling))


def scores_of(batch: int, params: Sequence[SamplingParams], seed: int = 0) -> Scores:
    """Random logits; every row has at least three legal tokens."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randn(batch, WIDTH, VOCAB_SIZE, generator=generator) * 3
    illegal = torch.rand(raw.shape, generator=generator) < 0.5
    illegal[..., 2:5] = False
    drafted = torch.zeros(batch, WIDTH - 1, dtype=torch.int64)
    return Scores(raw, pack_bitmask(~illegal), drafted, Sampling.stack(params, range(batch), CPU))


def free(logits: torch.Tensor) -> Scores:
    """One request's only row, where everything is legal."""
    sampling = Sampling.stack([SamplingParams()], [0], CPU)
    return Scores(logits, None, torch.zeros(1, 0, dtype=torch.int64), sampling)


ASKED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 2]),
    logprobs=st.sampled_from([None, 0, 1, 3, 20]),
    logprobs_mode=st.sampled_from(MODES),
)


@given(st.lists(ASKED, min_size=1, max_size=5), st.integers(0, 99))
def test_every_row_has_its_own_count_and_mode(params: list[SamplingParams], seed: int) -> None:
    scores = scores_of(len(params), params, seed)
    tables = tables_of(scores)
    before = scores.logits.clone()
    tokens = tables.processed.argmax(-1)
    plan = LogprobsPlan.stack(params, CPU)
    if plan is None:
        assert all(one.logprobs is None for one in params)
        return
    found = gather_logprobs(scores, tokens, plan)
    assert found.values.shape[0] == sum(one.logprobs is not None for one in params)
    assert torch.equal(scores.logits, before)
    records = found.records(tokens.tolist())
    for request, one in enumerate(params):
        if one.logprobs is None:
            assert records[request] == []
            continue
        by_mode = {
            "raw": [log_softmax(row) for row in tables.raw[request].tolist()],
            "masked": [log_softmax(row) for row in tables.masked[request].tolist()],
            "processed": tables.processed[request].log().tolist(),
        }
        rows = zip(by_mode[one.logprobs_mode], tokens[request].tolist(), strict=True)
        assert_close(records[request], [expected(row, t, one.logprobs) for row, t in rows])


@pytest.mark.parametrize("mode", MODES)
def test_records_are_cut_where_the_tokens_are(mode: LogprobsMode) -> None:
    """Padding, dead ends and empty rows give no record, and no NaN."""
    params = [SamplingParams(logprobs=2, logprobs_mode=mode)] * 3
    scores = scores_of(3, params)
    assert scores.bitmask is not None
    scores.bitmask[2] = 0
    tokens = torch.tensor([[2, 3, 4], [3, -1, -1], [-1, -1, -1]])
    plan = LogprobsPlan.stack(params, CPU)
    assert plan is not None
    found = gather_logprobs(scores, tokens, plan)
    records = found.records([[2, 3], [3], []])
    assert [[one.token_id for one in row] for row in records] == [[2, 3], [3], []]
    assert not any(math.isnan(one.logprob) for row in records for one in row)


def test_greedy_tokens_are_certain_once_processed() -> None:
    params = [SamplingParams(logprobs=5, logprobs_mode="processed")]
    scores = scores_of(1, params)
    token = int(tables_of(scores).processed[0, 0].argmax())
    plan = LogprobsPlan.stack(params, CPU)
    assert plan is not None
    (row,) = gather_logprobs(scores, torch.tensor([[token, 0, 0]]), plan).records([[token]])
    assert row == [TokenLogprobs(token, 0.0, (TopLogprob(token, 0.0),))]


def test_processed_ones_are_of_adjusted_logits() -> None:
    """Bias and penalties of the requests that ask, not of those at their place in the batch."""
    params = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, repetition_penalty=1.5, presence_penalty=0.7),
        SamplingParams(temperature=0.5, logit_bias={2: 3.0}, logprobs=3),
    ]
    params[2] = replace(params[2], logprobs_mode="processed")
    table = RuleTable.stack([TokenRules(one) for one in params], VOCAB_SIZE, CPU)
    adjustments = Adjustments.stack(table, [[1, 2], [3, 2], [2, 2]], [1, 1, 1])
    assert adjustments is not None
    scores = scores_of(3, params)._replace(adjustments=adjustments)
    plan = LogprobsPlan.stack(params, CPU)
    assert plan is not None
    tokens = torch.full((3, WIDTH), 2)
    records = gather_logprobs(scores, tokens, plan).records(tokens.tolist())
    masked = apply_token_bitmask(scores.logits, scores.bitmask)
    adjusted = adjustments.apply(masked, scores.drafted)
    expected_rows = torch.log_softmax(adjusted[2] / 0.5, -1).tolist()
    assert_close(records[2], [expected(row, 2, 3) for row in expected_rows])


def test_of_equals_the_lower_id_comes_first() -> None:
    raw = torch.tensor([[[1.0, 2.0, 2.0, 1.0, 2.0]]])
    plan = LogprobsPlan.stack([SamplingParams(logprobs=5)], CPU)
    assert plan is not None
    found = gather_logprobs(free(raw), torch.tensor([[4]]), plan)
    ((record,),) = found.records([[4]])
    assert [one.token_id for one in record.top] == [1, 2, 4, 0, 3]


def test_bfloat16_logits_give_float32_logprobs() -> None:
    raw = torch.randn(1, 1, 500, generator=torch.Generator().manual_seed(0)).bfloat16()
    plan = LogprobsPlan.stack([SamplingParams(logprobs=20)], CPU)
    assert plan is not None
    ((record,),) = gather_logprobs(free(raw), torch.tensor([[7]]), plan).records([[7]])
    assert_close([record], [expected(log_softmax(raw[0, 0].tolist()), 7, 20)])


def test_nobody_asks() -> None:
    assert (
        LogprobsPlan.stack([SamplingParams(), SamplingParams(logprobs_mode="masked")], CPU) is None
    )


@pytest.mark.parametrize("count", [-1, 21, 1.0, True, "5"])
def test_a_count_out_of_range(count: object) -> None:
    with pytest.raises(ConfigError, match="^logprobs="):
        SamplingParams(logprobs=count)  # type: ignore[arg-type]


def test_an_unknown_mode() -> None:
    with pytest.raises(ConfigError, match="logprobs_mode='best': must be one of raw, masked"):
        SamplingParams(logprobs=1, logprobs_mode="best")  # type: ignore[arg-type]
