"""SGLang's modules and the smallest inputs they take, for the tests that run our plugin in them."""

from __future__ import annotations

import importlib
import json
import zlib
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests.tiny_llm import VOCAB_SIZE, tiny_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
TOKENIZER = tiny_tokenizer()
END = int(str(TOKENIZER.eos_token_id))


@cache
def sgl(name: str) -> Any:
    """A module of SGLang."""
    return importlib.import_module(f"sglang.srt.{name}")


def use_portable_kernels() -> None:
    """Let SGLang run on any CPU what it runs on Intel's XPUs and on Apple's machines.

    There it handles draft trees with its own Triton kernels and rotates positions in plain torch;
    on a CPU it imports packages that have to be built for it. Where kernels are launched,
    TRITON_INTERPRET=1 has to be set. As a plugin of SGLang this is called in every process.
    """
    utils = sgl("utils")
    is_xpu, utils.is_xpu = utils.is_xpu, lambda: True
    try:
        for name in ("cache_locs", "reconstruct_tree", "spec_tree"):
            module: Any = importlib.import_module(f"sglang.kernels.ops.speculative.{name}")
            module._is_xpu = True
    finally:
        utils.is_xpu = is_xpu
    sgl("layers.rotary_embedding.base")._is_mps = True


def compile_json(backend: Any, schema: object = SCHEMA) -> Any:
    value, is_hit = backend.get_cached_or_future_value(
        ("json", json.dumps(schema)), require_reasoning=False
    )
    return value if is_hit else value.result(timeout=60)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def mask_of(grammar: Any) -> Tensor:
    bitmask: Tensor = grammar.allocate_vocab_mask(VOCAB_SIZE, 1, "cpu")
    grammar.fill_vocab_mask(bitmask, 0)
    return bitmask[0]


def legal_of(grammar: Any) -> list[bool]:
    row = mask_of(grammar)
    return [allows(row, token) for token in range(VOCAB_SIZE)]


def allows(row: Tensor, token: int) -> bool:
    return bool((int(row[token // 32]) >> (token % 32)) & 1)


def make_request(rid: str, **params: str) -> Any:
    sampling = sgl("sampling.sampling_params").SamplingParams(**params)
    ids = array("q", [5, 6])
    return sgl("managers.schedule_batch").Req(rid, "", ids, sampling, vocab_size=VOCAB_SIZE)


def logits_after(text: Sequence[int]) -> Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(repr(list(text)).encode()))
    return torch.randn(VOCAB_SIZE, generator=generator) * 2
