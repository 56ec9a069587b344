"""Engines over tiny random models: a byte-level tokenizer, near copies, ``make_llm``."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from guided_spec.engine.llm import LLM
from guided_spec.proposers import takes_draft
from tests.models.tiny import build

STORIES = Path(__file__).resolve().parent / "data" / "stories"
TOKENIZER_SIZE = 380
VOCAB_SIZE = 403  # wider than the tokenizer, and no multiple of 32

CORPUS = """\
{"name": "Ada", "age": 36, "kind": "cat", "tags": ["a", "b"], "ok": true, "note": null}
{"name": "Bob", "age": 41, "kind": "dog", "tags": [], "ok": false, "items": [1, 2.5, -3]}
The name of the cat is Ada and the name of the dog is Bob; the age of the cat is 36.
A warning is not an error; an error is not an end. The first answer: maybe. Caf\u00e9 \u4f60\u597d.
{"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
"""


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 380 tokens: every byte, ``<eos>``, ``<think>`` (not special), merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE - 1,
        special_tokens=["<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    wrapped.add_tokens(["<think>"])
    return wrapped


@cache
def tiny_model(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model over the tokenizer's vocabulary; shared, so not to be changed."""
    return build(name, seed, VOCAB_SIZE)


@cache
def near_copy(name: str, noise: float = 0.015) -> PreTrainedModel:
    """``tiny_model(name)`` with noise on its weights: a draft model that is often right."""
    draft = copy.deepcopy(tiny_model(name))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() > 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
    return draft


def make_llm(model: Any, proposer: str = "none", draft: Any = None, **options: Any) -> LLM:
    """An LLM with small settings; ``model`` may be an architecture's name.

    draft: left out for a proposer that takes none. options: as for ``LLM``; the tiny tokenizer, K=4
    and a context of 192 unless told.
    """
    if not takes_draft(proposer):
        draft = None
    if isinstance(model, str) and not model.startswith("/"):
        model = tiny_model(model)
    defaults: dict[str, Any] = {
        "num_draft_tokens": 4,
        "max_forced_tokens": 8,
        "max_model_len": 192,
        "max_batch_size": 5,
    }
    if not isinstance(model, str):
        defaults["tokenizer"] = tiny_tokenizer()
    return LLM(model, proposer, draft=draft, **{**defaults, **options})
