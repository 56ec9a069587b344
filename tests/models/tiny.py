"""Tiny random models of many architectures, on the CPU in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.line_lm import LineLM
from guided_spec.models.slot_lm import SlotLM

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MIXED = ["sliding_attention", "full_attention"] * 2
GEMMA: dict[str, Any] = {
    "head_dim": 8,
    "sliding_window": 8,
    "query_pre_attn_scalar": 8,
    "layer_types": MIXED,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 64,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
YOUTU = (
    *("num_key_value_heads", "kv_lora_rank", "q_lora_rank", "v_head_dim"),
    *("qk_rope_head_dim", "qk_nope_head_dim"),
)
DELTA = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
GLM = {
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

SLIDING = {"sliding_window": 8, "layer_types": MIXED}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 4.0, 8.0],
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}
MULTIPLIED = {
    **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22},
    **{"attention_multiplier": 0.1, "logits_scaling": 8.0},
}

# name: (configuration class, what differs from BASE, attention implementation)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {}, "sdpa"),
    "llama_eager": ("LlamaConfig", {}, "eager"),
    "llama3_rope": ("LlamaConfig", {"rope_parameters": LLAMA3_ROPE}, "sdpa"),
    "qwen2": ("Qwen2Config", {}, "sdpa"),
    "qwen3": ("Qwen3Config", {"head_dim": 8}, "sdpa"),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 8, **EXPERTS}, "sdpa"),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, "sdpa"),
    "mistral": ("MistralConfig", {"sliding_window": 8, "head_dim": 8}, "sdpa"),
    "gemma2": ("Gemma2Config", GEMMA, "eager"),
    "gemma3": ("Gemma3TextConfig", GEMMA, "sdpa"),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": MIXED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "eager",
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**MLA, "n_shared_experts": 2, "topk_method": "group_limited_greedy"},
        "sdpa",
    ),
    "deepseek_v3": ("DeepseekV3Config", MLA, "sdpa"),
    "deepseek_v3_yarn": (
        "DeepseekV3Config",
        {**MLA, "q_lora_rank": None, "rope_parameters": YARN, "attention_bias": True},
        "sdpa",
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        {**MLA, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 16},
        "sdpa",
    ),
    "glm4_moe": ("Glm4MoeConfig", GLM, "sdpa"),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", MLA, "sdpa"),
    "youtu": ("YoutuConfig", {name: MLA[name] for name in YOUTU}, "sdpa"),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
        "sdpa",
    ),
    "qwen3_5": ("Qwen3_5TextConfig", DELTA, "sdpa"),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16},
        "sdpa",
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": [*MIXED, *MIXED],
            "num_hidden_layers": 8,
            "num_kv_shared_layers": 4,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 8,
        },
        "sdpa",
    ),
    "olmo2": ("Olmo2Config", {}, "sdpa"),
    "olmo3": (
        "Olmo3Config",
        {
            **SLIDING,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN_ROPE},
        },
        "sdpa",
    ),
    "phi3": (
        "Phi3Config",
        {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.75}, "sliding_window": 8},
        "sdpa",
    ),
    "phi3_longrope": (
        "Phi3Config",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 96},
        "sdpa",
    ),
    "exaone4": ("Exaone4Config", {**SLIDING, "sliding_window_pattern": 2}, "sdpa"),
    "glm": ("GlmConfig", {"head_dim": 8, "attention_bias": True}, "sdpa"),
    "glm4": ("Glm4Config", {"head_dim": 8}, "sdpa"),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 8}, "sdpa"),
    "helium": ("HeliumConfig", {"head_dim": 8}, "sdpa"),
    "hunyuan": ("HunYuanDenseV1Config", {"head_dim": 8}, "sdpa"),
    "hunyuan_alpha": ("HunYuanDenseV1Config", {"head_dim": 8, "rope_parameters": ALPHA}, "sdpa"),
    "granite": ("GraniteConfig", MULTIPLIED, "sdpa"),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1, 0]}, "sdpa"),
    "bitnet": ("BitNetConfig", {}, "sdpa"),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 8,
        },
        "sdpa",
    ),
    "jamba": (
        "JambaConfig",
        {
            **{"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
            **{"expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2},
            **{"mamba_d_state": 16, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        },
        "sdpa",
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **{"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4},
            **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 16},
            **{"num_experts_per_tok": 2, "shared_intermediate_size": 16, "mamba_chunk_size": 8},
        },
        "sdpa",
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16},
            **{"head_dim": 8, "mamba_chunk_size": 8},
        },
        "sdpa",
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **{"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
            **{"qk_rope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16},
            **{"num_local_experts": 4, "num_experts": 4, "num_experts_per_token": 2},
            **{"linear_num_heads": 4, "linear_head_dim": 8},
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
        "sdpa",
    ),
    "mamba": ("MambaConfig", {"state_size": 8}, "eager"),
    "zamba": (
        "ZambaConfig",
        {
            **{"layers_block_type": ["mamba", "hybrid"] * 2, "attention_hidden_size": 64},
            **{"attention_head_dim": 16, "mamba_dt_rank": 4, "mamba_d_state": 16},
            **{"n_mamba_heads": 2, "use_mamba_kernels": False},
        },
        "sdpa",
    ),
    "rwkv": ("RwkvConfig", {}, "eager"),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 64,
            "num_local_experts": 4,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
        "sdpa",
    ),
    "llama4_scaled": (
        "Llama4TextConfig",
        {"head_dim": 8, "num_local_experts": 4, "attention_chunk_size": 8, "floor_scale": 6},
        "sdpa",
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2}, "sdpa"),
}


def build(name: str, seed: int = 0, vocab_size: int = 64, **overrides: object) -> PreTrainedModel:
    """A random model; skips the test where the installed transformers lacks the architecture.

    name: a key of ARCHITECTURES. overrides: further fields of its configuration.
    """
    class_name, differences, attention = ARCHITECTURES[name]
    if not hasattr(transformers, class_name):
        pytest.skip(f"transformers {transformers.__version__} has no {class_name}")
    values = {**BASE, **differences, "vocab_size": vocab_size, **overrides}
    config = getattr(transformers, class_name)(**values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, dtype=torch.float32
    )
    _spread(model)
    assert isinstance(model, PreTrainedModel)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    model.eval()
    return model


def _spread(model: PreTrainedModel) -> None:
    """Weights larger than at the start of training, so that what comes next depends on the past."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values that a token takes in a slot."""
    return _over_a_slot(model).kv_bytes_per_token


def state_bytes_per_slot(model: PreTrainedModel) -> int:
    """Bytes of linear state that a slot takes besides."""
    return _over_a_slot(model).state_bytes_per_slot


def _over_a_slot(model: PreTrainedModel) -> SlotLM:
    return SlotLM(model, num_slots=1, max_length=1)


def make_line_lm(model: Any, **options: Any) -> LineLM:
    """A model that has a packed form, in that form."""
    lm = make_causal_lm(model, **{"kernels": "packed", **options})
    assert isinstance(lm, LineLM)
    return lm
