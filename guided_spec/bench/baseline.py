"""The comparison: transformers' own ``generate`` with xgrammar's logits processor, same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import xgrammar

from guided_spec.bench.workload import WorkItem
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.grammar.xgrammar import XGrammarBackend

__all__ = ["BaselineRun", "run_transformers"]


class BaselineRun(NamedTuple):
    """Texts in the order of the workload, output tokens in all, and wall seconds."""

    texts: list[str]
    tokens: int
    seconds: float


def run_transformers(
    model: Any,
    vocabulary: Vocabulary,
    prompts: Sequence[list[int]],
    items: Sequence[WorkItem],
    *,
    max_tokens: int,
) -> BaselineRun:
    """Greedy, one request at a time, grammars compiled beforehand (as they are for our engine)."""
    backend = XGrammarBackend(vocabulary)
    grammars = [None if i.grammar is None else backend.compile(i.grammar) for i in items]
    texts: list[str] = []
    tokens = 0
    started = time.perf_counter()
    for prompt, grammar in zip(prompts, grammars, strict=True):
        processors = []
        if grammar is not None:
            processors.append(xgrammar.contrib.hf.LogitsProcessor(grammar.compiled))
        input_ids = torch.tensor([prompt], device=model.device)
        with torch.inference_mode():
            output = model.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                logits_processor=processors,
                eos_token_id=list(vocabulary.stop_token_ids),
                pad_token_id=vocabulary.stop_token_ids[0],
            )
        new = output[0, len(prompt) :].tolist()
        tokens += len(new)
        texts.append(vocabulary.decode(new))
    return BaselineRun(texts, tokens, time.perf_counter() - started)
