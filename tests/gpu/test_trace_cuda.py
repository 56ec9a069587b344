"""A trace on a CUDA device holds what the same text's trace holds on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from guided_spec.trace.record import TokenTrace, Trace
from guided_spec.types import SamplingParams
from tests.gpu.test_engine_cuda import GRAMMARS, PROMPTS, PROPOSERS
from tests.tiny_llm import make_llm, near_copy, tiny_model

pytestmark = pytest.mark.gpu


def run(device: str, proposer: str, temperature: float) -> list[Trace]:
    model: Any = copy.deepcopy(tiny_model("llama")).to(device)
    draft: Any = copy.deepcopy(near_copy("llama")).to(device)
    params = [
        SamplingParams(max_tokens=60, temperature=temperature, seed=3, grammar=grammar)
        for grammar in GRAMMARS
    ]
    with make_llm(model, proposer, draft=draft, max_batch_size=3, verifier="coupled") as llm:
        outputs = llm.generate(PROMPTS, params, trace=True)
    for output in outputs:
        assert output.trace is not None
        assert output.trace.token_ids == output.token_ids
    return [output.trace for output in outputs if output.trace is not None]


def tokens(trace: Trace) -> list[TokenTrace]:
    """Those that were looked at, step by step."""
    looked_at = [
        token for step in trace.steps for token in (*step.drafted, step.drawn) if token is not None
    ]
    return [token for token in looked_at if token.outcome != "unused"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_equal_to_the_cpu(proposer: str, temperature: float) -> None:
    pairs = zip(run("cuda", proposer, temperature), run("cpu", proposer, temperature), strict=True)
    compared = 0
    for found, expected in pairs:
        assert found.token_ids == expected.token_ids
        for one, other in zip(tokens(found), tokens(expected), strict=True):
            names = ("id", "text", "source", "outcome", "allowed", "place")
            assert [getattr(one, n) for n in names] == [getattr(other, n) for n in names]
            for name in ("draft_prob", "target_prob", "processed_prob"):
                value = getattr(other, name)
                near = None if value is None else pytest.approx(value, rel=1e-2, abs=1e-4)
                assert getattr(one, name) == near
            compared += 1
    assert compared > 60
