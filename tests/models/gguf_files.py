"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

# Of transformers' names for a layer's weights, those of llama.cpp.
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_llama(vocab_size: int) -> LlamaForCausalLM:
    """Random weights, in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
) -> None:
    """kind: of the matrices; vectors are float32."""
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, model.config)
    _write_tokenizer(writer, tokenizer, model.config.vocab_size)
    for name, tensor in model.state_dict().items():
        values = _permuted(name, tensor.float().numpy(), model.config)
        if values.ndim > 1 and kind is not gguf.GGMLQuantizationType.F32:
            writer.add_tensor(_renamed(name), gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_renamed(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(
    writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> None:
    parsed = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {one["content"] for one in parsed["added_tokens"] if one["special"]}
    tokens: Any = tokenizer.convert_ids_to_tokens([*range(len(tokenizer))])
    tokens += [f"[unused{number}]" for number in range(len(tokens), vocab_size)]
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    merges = parsed["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)


def _renamed(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, *parts = name.split(".")
    return f"blk.{layer}.{_LAYER['.'.join(parts[:-1])]}.weight"


def _permuted(name: str, values: NDArray[Any], config: Any) -> NDArray[Any]:
    """llama.cpp rotates pairs of neighbours, transformers the two halves of a head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(name.split(".")[-2])
    if count is None:
        return values
    split = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
