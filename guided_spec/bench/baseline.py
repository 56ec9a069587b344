"""The comparison: transformers' own ``generate`` with xgrammar's logits processor, same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import xgrammar

from guided_spec.bench.heap import frozen_heap
from guided_spec.bench.workload import WorkItem
from guided_spec.grammar.unique_keys import UniqueKeysGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.grammar.xgrammar import XGrammarBackend

__all__ = ["BaselineRun", "run_transformers"]


class BaselineRun(NamedTuple):
    """Texts in the order of the workload, output tokens in all, and wall seconds.

    ended: whether each text has come to its end within its tokens.
    """

    texts: list[str]
    tokens: int
    seconds: float
    ended: list[bool]


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
    ended: list[bool] = []
    tokens = 0
    with frozen_heap():
        started = time.perf_counter()
        for prompt, grammar in zip(prompts, grammars, strict=True):
            processors = []
            if grammar is not None:
                inner = grammar.inner if isinstance(grammar, UniqueKeysGrammar) else grammar
                processors.append(xgrammar.contrib.hf.LogitsProcessor(inner.compiled))
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
            ended.append(bool(new) and new[-1] in vocabulary.stop_token_ids)
        seconds = time.perf_counter() - started
    return BaselineRun(texts, tokens, seconds, ended)
