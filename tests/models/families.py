"""A tiny random model of every causal LM class of transformers, whatever its configuration is.

The fields of a configuration are shrunk by their names; some families need values of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ENCODER = " as an encoder"

# The largest value of a field, and the fields.
SIZES: dict[int, str] = {
    1: "first_k_dense_replace moe_layer_start_index n_groups mamba_n_groups mamba_ngroups "
    "zero_expert_num num_mem_blocks",
    2: "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads n_group "
    "num_experts_per_tok num_experts_per_token moe_k moe_topk num_expert_group topk_group",
    4: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_blocks "
    "depth num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads "
    "decoder_attention_heads swa_num_attention_heads linear_num_heads linear_num_value_heads "
    "num_query_groups num_experts n_routed_experts num_local_experts moe_num_experts "
    "moe_layer_end_index o_groups",
    8: "head_dim d_kv d_head dim_head swa_head_dim linear_head_dim linear_key_head_dim kv_channels "
    "linear_value_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim sliding_window window_size "
    "attention_window attention_window_size local_attention local_attention_window_len d_rel "
    "attention_chunk_size chunk_size mamba_chunk_size local_attn_chunk_length block_size mem_len "
    "lsh_attn_chunk_length index_block_size index_topk rotary_dim hidden_size_per_layer_input "
    "query_pre_attn_scalar",
    # Few heads of an indexer leave many keys with a score of 0, and the choice of them to chance.
    16: "index_n_heads moe_intermediate_size kv_lora_rank q_lora_rank o_lora_rank index_head_dim "
    "qk_head_dim shared_expert_intermediate_size shared_experts_intermediate_size adapter_rank "
    "shared_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size "
    "hc_lowrank laurel_rank ssm_state_size state_size mamba_d_state rel_extent time_step_rank "
    "ple_embed_dim router_hidden_size gated_norm_rank",
    32: "hidden_size d_model n_embd dim emb_dim embedding_size attention_hidden_size dim_model "
    "encoder_hidden_size embedding_dim lru_width decoder_hidden_size word_embed_proj_dim "
    "input_embedding_size output_embedding_size hidden_size_global",
    64: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff d_inner n_inner dff "
    "mlp_dim ffn_hidden_size feed_forward_size dim_ff intermediate_size_mlp "
    "dense_intermediate_size vocab_size unpadded_vocab_size decoder_vocab_size "
    "vocab_size_per_layer_input pronunciation_vocab_size shape_vocab_size "
    "encoder_hash_byte_group_vocab",
    512: "max_position_embeddings n_positions max_target_positions",
}
LARGEST = {name: value for value, names in SIZES.items() for name in names.split()}
KINDS_OF_LAYERS = ("layer_types", "mlp_layer_types", "indexer_types")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
NUM_LAYERS = 4

MIXED = ["sliding_attention", "full_attention"] * 2
MHA = {"num_key_value_heads": 4}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2}
CONV = {"layer_types": ["conv", "full_attention"] * 2}
HEADS = {"head_dim": 8}
ZAMBA = {
    "layers_block_type": ["mamba", "hybrid"] * 2,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
}

OWN_VALUES: dict[str, dict[str, Any]] = {
    "axk1": MHA,
    "axk2": MHA,
    "bailing_hybrid": MHA,
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": 4},
    "blenderbot-small": {"encoder_layers": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE},
        "layer_types": MIXED,
    },
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {**MHA, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "deepseek_v3": MHA,
    "deepseek_v32": MHA,
    # Beyond it the same tokens tie for a place, in transformers too: more than the texts have.
    "doge": {"keep_window_size": 64},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": MHA,
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "gemma3n_text": {
        "num_hidden_layers": 8,
        "num_kv_shared_layers": 4,
        "layer_types": MIXED * 2,
        "activation_sparsity_pattern": [0.0] * 8,
        "intermediate_size": 64,
    },
    "gemma4_text": {"num_kv_shared_layers": 0, "global_head_dim": 8},
    "glm4_moe_lite": MHA,
    "glm_moe_dsa": MHA,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "hrm_text": {"num_hidden_layers": 2},
    "hunyuan_v1_dense": HEADS,
    "hunyuan_v1_moe": HEADS,
    "jamba": {"mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": MHA,
    "lfm2": CONV,
    "lfm2_moe": CONV,
    "longcat_flash": MHA,
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2},
    "minicpm3": MHA,
    "ministral": HEADS,
    "nemotron": {**HEADS, "num_key_value_heads": 2},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "layers_block_type": ["mamba", "attention", "mlp", "attention"],
    },
    "qwen4_exp_text": INDEXER,
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"] * 2,
        "attention_head_size": 8,
        "max_position_embeddings": 512,
    },
    "sarvam_mla": MHA,
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "youtu": MHA,
    "zamba": {**ZAMBA, "mamba_dt_rank": 4},
    "zamba2": ZAMBA,
}

# With transformers 5.23. A class joins this list by a line here only.
NOT_BUILT: dict[str, str] = {
    "dots3_note": "its vision tower checks sizes against each other",
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": "it drafts for another model",
    "gemma4_unified_assistant": "it drafts for another model",
    "musicgen": "its class takes the configuration of its decoder only",
    "musicgen_melody": "its class takes the configuration of its decoder only",
    "qwen4_exp": "its text model is built as qwen4_exp_text",
    "reformer" + ENCODER: "its class is a decoder's",
}


KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def families_of(kind: str) -> list[str]:
    """A model type; twice, where its configuration may make it an encoder."""
    fields: Any = CONFIG_MAPPING[kind].__dataclass_fields__
    return [kind, kind + ENCODER] if "is_decoder" in fields else [kind]


def all_families() -> list[str]:
    """Those of every model type; loads the configurations of all of them."""
    return [family for kind in KINDS for family in families_of(kind)]


def build_family(family: str, seed: int = 0) -> PreTrainedModel:
    """A model in float32 on the CPU; its next token depends on the past.

    family: one of ``all_families``.
    """
    kind = family.removesuffix(ENCODER)
    values = dict(OWN_VALUES.get(kind, {}))
    if family != kind:
        values["is_decoder"] = False
    config = _shrink(CONFIG_MAPPING[kind], values)
    torch.manual_seed(seed)
    try:
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    except ValueError as error:
        if "scaled_dot_product" not in str(error):
            raise
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 or not parameter.any():
                parameter.normal_(0.0, 0.25)
    for name in TOKENS:
        setattr(model.generation_config, name, None)
    model.generation_config.pad_token_id = 0
    model.eval()
    assert isinstance(model, PreTrainedModel)
    return model


def _shrink(kind: Any, own: dict[str, Any]) -> Any:
    """The default of a configuration class with small fields, but those of ``own`` as given."""
    default = kind()
    values: dict[str, Any] = {}
    for name in default.to_dict():
        found = default.__dict__.get(name)
        if isinstance(found, PreTrainedConfig):
            values[name] = _shrink(type(found), own.get(name, {}))
        elif name in TOKENS:
            values[name] = 0
        elif name in KINDS_OF_LAYERS and found:
            kinds = list(dict.fromkeys(found))
            values[name] = (kinds * NUM_LAYERS)[:NUM_LAYERS]
        elif name in LARGEST and isinstance(found, list):
            values[name] = LARGEST[name]
        elif name in LARGEST and type(found) is int:
            values[name] = min(found, LARGEST[name])
        elif name == "is_decoder":
            values[name] = True
    small = {
        name: value
        for name, value in own.items()
        if not isinstance(values.get(name), PreTrainedConfig)
    }
    return kind(**{**values, **small})
