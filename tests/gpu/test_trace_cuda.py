"""A trace on a CUDA device holds what a separate forward there gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.gpu.test_engine_cuda import PROPOSERS
from tests.tiny_llm import make_llm, near_copy, tiny_model
from tests.trace.test_recorder import PROMPTS, Reference, ask, check_text, run, trace_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_equal_to_what_was_generated(proposer: str, temperature: float) -> None:
    model: Any = copy.deepcopy(tiny_model("llama"))
    draft: Any = copy.deepcopy(near_copy("llama"))
    model, draft = model.to("cuda"), draft.to("cuda")
    params = ask(temperature)
    with make_llm(model, proposer, draft, max_batch_size=3) as llm:
        for prompt, completion, one in zip(PROMPTS, run(llm, params), params, strict=True):
            check_text(completion)
            Reference(llm, prompt, one).check(trace_of(completion), model, draft)
