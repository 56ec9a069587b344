"""The configuration of a draft head's own decoder layers, and whether it suits a target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from guided_spec.errors import ModelError

__all__ = ["build_head_config", "check_fit"]

CLASSES: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}

# What shapes a layer. The rest of a config.json (dtypes, token ids, a quantization) is not passed
# on: it is about a whole model, and would make transformers warn or act.
FIELDS = (
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "vocab_size",
)
WINDOW_FIELDS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")


def build_head_config(
    values: Mapping[str, Any], model_type: str, target: PreTrainedModel, source: str
) -> Any:
    """A transformers configuration for the layers, with the target's attention implementation.

    values: what the checkpoint says; fields that are missing have transformers' defaults, which
        speculators leaves out when it saves. Windows are read only where ``layer_types`` says
        which layers have one. model_type: "llama" or "qwen3". source: what to name in the error.

    Raises ModelError for another model type, a rotary embedding of no text model, and for values
    that transformers refuses.
    """
    if model_type not in CLASSES:
        raise ModelError(
            f"checkpoint={source!r}: model_type of its layers: expected one of "
            f"{', '.join(sorted(CLASSES))}, found {model_type!r}; pass a head of such layers"
        )
    fields = FIELDS + (WINDOW_FIELDS if values.get("layer_types") else ())
    known = {name: values[name] for name in fields if values.get(name) is not None}
    try:
        config = _construct(CLASSES[model_type], known)
    except Exception as error:  # transformers validates with several classes of exception
        reason = " ".join(str(error).split())
        raise ModelError(
            f"checkpoint={source!r}: config.json: expected the sizes of {model_type} layers, "
            f"found {known}: {reason}; correct it"
        ) from error
    rope_type = config.rope_parameters["rope_type"]
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        raise ModelError(
            f"checkpoint={source!r}: rope_type of its layers: expected one of default, "
            f"{', '.join(sorted(ROPE_INIT_FUNCTIONS))}, found {rope_type!r}; pass a head for text"
        )
    text_config: Any = target.config.get_text_config(decoder=True)
    config._attn_implementation = text_config._attn_implementation
    return config


def _construct(config_class: Any, known: dict[str, Any]) -> Any:
    if "head_dim" not in known or "num_attention_heads" not in known:
        return config_class(**known)
    # LlamaConfig wants hidden_size to be a multiple of the number of heads, even where head_dim
    # says that it need not be. Published heads exist that are not.
    heads = known["num_attention_heads"]
    config = config_class(**{"num_key_value_heads": heads, **known, "num_attention_heads": 1})
    config.num_attention_heads = heads
    return config


def check_fit(source: str, expected: Mapping[str, object], found: Mapping[str, object]) -> None:
    """Raise one ModelError that lists every value in which a head differs from its target."""
    wrong = [name for name in expected if expected[name] != found[name]]
    if wrong:
        listed = ", ".join(
            f"{name}: expected {expected[name]}, found {found[name]}" for name in wrong
        )
        raise ModelError(
            f"checkpoint={source!r}: the head was made for another target: {listed}; pass a head "
            "for this target"
        )
