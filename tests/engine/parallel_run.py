"""Run by torchrun in ``test_parallel``: generate on one process's share of a model and report."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from guided_spec.engine.llm import LLM
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams

PROMPTS = ["a", "The name", "1"]
PARAMS = [
    SamplingParams(max_tokens=30, grammar=GrammarSpec.regex(r"[0-9]{3}-[a-z]{4,8}")),
    SamplingParams(max_tokens=30, grammar=GrammarSpec.choice(["cat", "dog"])),
    SamplingParams(max_tokens=20, temperature=1.0),
]


def generate(folder: str, tp_plan: str | None) -> list[list[int]]:
    """The token ids of every prompt; fewer slots than requests, a grammar to wait for."""
    options: dict[str, Any] = {} if tp_plan is None else {"tp_plan": tp_plan}
    proposer = "chain:grammar_forced+ngram"
    with LLM(folder, proposer, max_model_len=96, max_batch_size=2, **options) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, on_error="return")
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = generate(sys.argv[1], "auto")
    target = Path(sys.argv[2]) / f"{os.environ['RANK']}.json"
    target.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()
