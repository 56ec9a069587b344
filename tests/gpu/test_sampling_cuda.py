"""The sampling pipeline, coupled verification and log-probabilities on a CUDA device."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

from guided_spec.engine.outputs import RequestOutput
from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.ops.sampling.logprobs import LogprobsPlan
from guided_spec.ops.sampling.verify import coupled_sample
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.types import Draft, Noise, SamplingParams
from tests.gpu.test_engine_cuda import GRAMMARS, PROMPTS
from tests.tiny_llm import make_llm, near_copy, tiny_model

pytestmark = pytest.mark.gpu

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
EVERYTHING: dict[str, Any] = {
    "logit_bias": {5: 2.5, 17: -3.0},
    "bad_words": [[3, 4], [9]],
    "min_tokens": 4,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.2,
}


def test_a_batch_is_made_while_the_device_is_busy() -> None:
    params = [SamplingParams(**EVERYTHING), SamplingParams(logprobs=2), SamplingParams(top_p=0.5)]
    rules = [TokenRules(one, ((3, 4), (9,)), (1,)) for one in params]
    with warnings.catch_warnings(action="ignore"):  # torch calls the mode a prototype, once
        torch.cuda.set_sync_debug_mode("error")
    try:
        sampling = Sampling.stack(params, [1, 2, 3], CUDA)
        plan = LogprobsPlan.stack(params, CUDA)
        table = RuleTable.stack(rules, 257, CUDA)
        adjustments = Adjustments.stack(table, [[3, 7, 7, 3], [1, 2], [5, 6, 9]], [2, 1, 1])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert plan is not None
    assert adjustments is not None
    assert sampling.seeds.tolist() == [1, 2, 3]
    assert sampling.top_p.tolist() == [1.0, 1.0, 0.5]
    assert [one.tolist() for one in plan.rows.values()] == [[1]]
    assert adjustments.num_output.tolist() == [2, 1, 2]


def test_adjustments_decide_alike() -> None:
    vocab_size, generator = 257, torch.Generator().manual_seed(0)
    params = [SamplingParams(**EVERYTHING), SamplingParams(), SamplingParams(min_tokens=2)]
    words = (((3, 4), (9,)), (), ())
    rules = [TokenRules(one, word, (1,)) for one, word in zip(params, words, strict=True)]
    contexts = [[3, 7, 7, 3], [1, 2], [5, 6, 9]]
    logits = torch.randn(3, 4, vocab_size, generator=generator)
    drafted = torch.randint(0, 12, (3, 3), generator=generator)
    found = []
    for device in (CPU, CUDA):
        table = RuleTable.stack(rules, vocab_size, device)
        adjustments = Adjustments.stack(table, contexts, [2, 1, 1])
        assert adjustments is not None
        found.append(adjustments.apply(logits.to(device), drafted.to(device)).cpu())
    torch.testing.assert_close(found[1], found[0])


def test_coupled_verification_decides_alike() -> None:
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(5, 4, 300) * 4, -1)
    noise = Noise(torch.zeros(5, 3), torch.rand(5, 4, 300) + 0.1)
    ids = (probs / noise.sample).argmax(-1)[:, :3].clone()
    ids[1, 2] = 7
    draft = Draft(ids, torch.tensor([3, 3, 0, 2, 1]))
    expected = coupled_sample(probs, draft, noise)
    moved = Draft(ids.cuda(), draft.num_tokens.cuda())
    found = coupled_sample(probs.cuda(), moved, Noise(noise.accept.cuda(), noise.sample.cuda()))
    assert torch.equal(found.token_ids.cpu(), expected.token_ids)
    assert torch.equal(found.num_accepted.cpu(), expected.num_accepted)


def generate(proposer: str) -> list[RequestOutput]:
    model: Any = copy.deepcopy(tiny_model("llama"))
    draft: Any = copy.deepcopy(near_copy("llama"))
    params = [
        SamplingParams(max_tokens=40, temperature=0.9, top_p=0.95, seed=7, grammar=grammar, **more)
        for grammar, more in zip(
            GRAMMARS, ({}, {}, EVERYTHING, {"logprobs": 3, "logprobs_mode": "masked"}), strict=True
        )
    ]
    options: dict[str, Any] = {"verifier": "coupled", "max_batch_size": 3}
    with make_llm(model.to("cuda"), proposer, draft.to("cuda"), **options) as llm:
        return llm.generate(PROMPTS, params)


@pytest.mark.parametrize("proposer", ["draft_model", "draft_model:validate", "chain:ngram+ngram"])
def test_a_seed_means_a_text(proposer: str) -> None:
    plain, found = generate("none"), generate(proposer)
    assert [output.error for output in found] == [None] * len(PROMPTS)
    assert [output.token_ids for output in found] == [output.token_ids for output in plain]
    expected, given = plain[3].completions[0].logprobs, found[3].completions[0].logprobs
    assert expected is not None
    assert given is not None
    for one, other in zip(expected, given, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
