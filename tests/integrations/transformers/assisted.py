"""The kinds of assisted generation of transformers, on tiny random models that it runs with."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.transformers.processor import GrammarLogitsProcessor
from tests.models import tiny
from tests.models.heads import mtp_checkpoints
from tests.tiny_llm import VOCAB_SIZE, near_copy, tiny_model, tiny_tokenizer

KINDS = (
    "assistant",
    "other_tokenizer",
    "lookup",
    "early_exit",
    "dflash",
    "deepseek_v3",
    "glm4_moe",
)
FOREIGN_SIZE = 310


class Assisted(NamedTuple):
    """A model, and the arguments of generate that make it draft."""

    model: PreTrainedModel
    arguments: Mapping[str, Any]


def build(kind: str, folder: Path) -> Assisted:
    """One of KINDS; the two last ones have MTP layers, in a checkpoint written to ``folder``."""
    llama = tiny_model("llama")
    match kind:
        case "assistant":
            return Assisted(llama, {"assistant_model": near_copy("llama")})
        case "other_tokenizer":
            names = {"tokenizer": tiny_tokenizer(), "assistant_tokenizer": _foreign_tokenizer()}
            assistant = tiny.build("llama", 2, FOREIGN_SIZE, num_hidden_layers=1)
            return Assisted(llama, {"assistant_model": assistant, **names})
        case "lookup":
            return Assisted(llama, {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1})
        case "early_exit":
            return Assisted(llama, {"assistant_early_exit": 3})
        case "dflash":
            own = copy.deepcopy(llama)  # on which transformers leaves its hooks
            return Assisted(own, {"assistant_model": _block(), "speculation_type": "dflash"})
    written = mtp_checkpoints.write(folder, kind, num_modules=2, vocab_size=VOCAB_SIZE)
    model = AutoModelForCausalLM.from_pretrained(written.folder, dtype=torch.float32).eval()
    # Where its layers are in a checkpoint: the class knows the published ones, of 46 to 92 layers.
    first = model.config.num_hidden_layers
    model._keys_to_ignore_on_load_unexpected = [rf"layers\.{first + at}\." for at in range(2)]
    return Assisted(model, {"use_mtp": True})


def run(
    kind: Assisted, grammar: GrammarSpec, prompt: str, *, is_plain: bool = False, **arguments: Any
) -> Tensor:
    """[T]: the new tokens of one text, with a processor of its own."""
    tokenizer = tiny_tokenizer()
    processor = GrammarLogitsProcessor(grammar, tokenizer, model=kind.model)
    inputs = tokenizer(prompt, return_tensors="pt")
    model: Any = kind.model
    output: Tensor = model.generate(
        **inputs,
        logits_processor=[processor],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
        **({} if is_plain else kind.arguments),
        **arguments,
    )
    return output[0, inputs["input_ids"].shape[1] :]


def left_padded(prompts: Sequence[str]) -> dict[str, Tensor]:
    """``input_ids`` and ``attention_mask`` int64 [B, T], padded with token 3."""
    rows = [tiny_tokenizer()(prompt)["input_ids"] for prompt in prompts]
    width = max(map(len, rows))
    padded = [[*[3] * (width - len(row)), *row] for row in rows]
    mask = [[int(at >= width - len(row)) for at in range(width)] for row in rows]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


def _foreign_tokenizer() -> PreTrainedTokenizerFast:
    """Other tokens than those of ``tiny_tokenizer``, and fewer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=FOREIGN_SIZE - 10,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["on and on and on"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def _block() -> PreTrainedModel:
    """A DFlash drafter of the tiny llama's width."""
    if not hasattr(transformers, "MuseGlimmerAssistantConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no DFlash drafter")
    config = transformers.MuseGlimmerAssistantConfig(
        **{name: tiny.BASE[name] for name in ("hidden_size", "intermediate_size")},
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        block_size=4,
        mask_token_id=0,
        target_layer_ids=[0, 1, 2],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    drafter: PreTrainedModel = AutoModel.from_config(config).eval()
    return drafter
