"""The soak's toy: a random Llama of one layer, a near copy that drafts, and a tokenizer.

Its vocabulary lacks one byte, "~", so that a grammar which needs it comes to a dead end.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 256  # tokens
_VOCAB_SIZE = 352  # of the logits: wider than the tokenizer's
_NUM_TOKENS = 340
_NOISE = 0.02  # on the draft's weights: it is often right
_CORPUS = """\
{"name": "Ada", "age": 36, "kind": "cat", "tags": ["a", "b"], "ok": true, "note": null}
{"name": "Bob", "age": 41, "kind": "dog", "tags": [], "ok": false, "items": [1, 2.5, -3]}
The name of the cat is Ada and the name of the dog is Bob; the age of the cat is 36.
"""


class Toy(NamedTuple):
    """A target and what goes with it, in float32 on the CPU; the same at every call."""

    model: LlamaForCausalLM
    draft: LlamaForCausalLM
    tokenizer: PreTrainedTokenizerFast


def make_toy() -> Toy:
    """Made anew, in a second."""
    generator = torch.Generator().manual_seed(0)
    config = LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), draft.parameters(), strict=True):
            if ours.dim() > 1:
                ours.copy_(torch.randn(ours.shape, generator=generator) * 0.4)
                theirs.copy_(ours + torch.randn(ours.shape, generator=generator) * _NOISE)
    return Toy(model, draft, _tokenizer())


def _tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte but one, ``<eos>``, ``<think>`` (not special), and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_NUM_TOKENS - 1,
        special_tokens=["<eos>"],
        initial_alphabet=sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"~"}),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS] * 3, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    wrapped.add_tokens(["<think>"])
    return wrapped
