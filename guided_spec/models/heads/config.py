"""The configuration of a draft head's own decoder layers, and whether it suits a target.

The first weights of a draft head that is made from nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.pictures.axes import NUM_AXES
from guided_spec.models.target import TargetLayers, find_decoder
from guided_spec.types import require_int

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
# Rotary embeddings that are made for a text's length as it grows, or for one head_dim, stay the
# target's own; a head has the plain one then.
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
SECTIONS = ("mrope_section", "mrope_interleaved")  # of positions of three axes
ROPE_EXTRAS = ("partial_rotary_factor", *SECTIONS)
WINDOW_FIELDS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")


class HeadShape(NamedTuple):
    """The sizes of a new head's decoder layers; None is the target's.

    num_layers: at least 1. num_attention_heads, num_key_value_heads: the first is a multiple of the
    second. head_dim: width of one; even. intermediate_size: of the feed-forward part.
    """

    num_layers: int = 1
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None


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
            f"{source}: model_type of its layers: expected one of "
            f"{', '.join(sorted(CLASSES))}, found {model_type!r}; pass a head of such layers"
        )
    fields = FIELDS + (WINDOW_FIELDS if values.get("layer_types") else ())
    known = {name: values[name] for name in fields if values.get(name) is not None}
    sections = _take_sections(known)
    try:
        config = _construct(CLASSES[model_type], known)
    except Exception as error:  # transformers validates with several classes of exception
        reason = " ".join(str(error).split())
        raise ModelError(
            f"{source}: config.json: expected the sizes of {model_type} layers, "
            f"found {known}: {reason}; correct it"
        ) from error
    rope_type = config.rope_parameters["rope_type"]
    if rope_type != "default" and rope_type not in ROPE_INIT_FUNCTIONS:
        raise ModelError(
            f"{source}: rope_type of its layers: expected one of default, "
            f"{', '.join(sorted(ROPE_INIT_FUNCTIONS))}, found {rope_type!r}; pass a head for text"
        )
    parts, half = sections.get(SECTIONS[0], []), config.head_dim // 2
    if len(parts) == NUM_AXES and sum(parts) == half:
        config.rope_parameters |= {key: sections[key] for key in SECTIONS if key in sections}
    elif "mrope" in sections.values():  # else a part of a head turns, which these layers ignore
        expected = f"expected {NUM_AXES} parts of a half head's {half} numbers"
        raise ModelError(f"{source}: {SECTIONS[0]}: {expected}, found {parts}; correct it")
    text_config: Any = target.config.get_text_config(decoder=True)
    config._attn_implementation = text_config._attn_implementation
    return config


def _take_sections(known: dict[str, Any]) -> dict[str, Any]:
    """The rotary embedding among the fields, if it says what turns with which of three axes.

    No class of layers knows that: what is left in the fields is that of a text's positions.
    """
    for name in ("rope_parameters", "rope_scaling"):
        rope = known.get(name)
        if isinstance(rope, dict) and isinstance(rope.get(SECTIONS[0]), list):
            plain = {key: value for key, value in rope.items() if key not in SECTIONS}
            known[name] = {k: "default" if v == "mrope" else v for k, v in plain.items()}
            return rope
    return {}


def _construct(config_class: Any, known: dict[str, Any]) -> Any:
    if "head_dim" not in known or "num_attention_heads" not in known:
        return config_class(**known)
    # LlamaConfig wants hidden_size to be a multiple of the number of heads, even where head_dim
    # says that it need not be. Published heads exist that are not.
    heads = known["num_attention_heads"]
    config = config_class(**{"num_key_value_heads": heads, **known, "num_attention_heads": 1})
    config.num_attention_heads = heads
    return config


def derive_head_config(target: PreTrainedModel, model_type: str, shape: HeadShape) -> Any:
    """A transformers configuration of full-attention layers for a new head of ``target``.

    model_type: "llama" or "qwen3". What ``shape`` leaves open, and the rotary embedding, is the
    target's. A target whose keys are compressed (DeepSeek) has no such heads: as many as fit into
    the hidden state are made, as wide as its values, of which up to eight have keys.

    Raises ConfigError for sizes that do not go together.
    """
    text_config: Any = target.config.get_text_config(decoder=True)
    for name, value in shape._asdict().items():
        if value is not None:
            require_int(name, value, low=1)
    values: dict[str, Any] = _layer_sizes(text_config, shape)
    heads, pairs = values["num_attention_heads"], values["num_key_value_heads"]
    if heads % pairs:
        fix = f"must divide num_attention_heads={heads}"
        raise ConfigError("num_key_value_heads", pairs, fix)
    if values["head_dim"] % 2:
        raise ConfigError("head_dim", values["head_dim"], "must be even, for rotary embeddings")
    kept = ("vocab_size", "max_position_embeddings")
    values |= {name: getattr(text_config, name) for name in kept}
    eps = getattr(text_config, "rms_norm_eps", None) or 1e-6
    rope = _plain_rope(text_config)
    values |= {"rms_norm_eps": eps, "rope_parameters": rope}
    config = build_head_config(values, model_type, target, "a new head")
    config.initializer_range = getattr(text_config, "initializer_range", None) or 0.02
    return config


def _layer_sizes(text_config: Any, shape: HeadShape) -> dict[str, int]:
    hidden, heads = text_config.hidden_size, text_config.num_attention_heads
    pairs = getattr(text_config, "num_key_value_heads", None) or heads
    width = getattr(text_config, "head_dim", None) or hidden // heads
    if getattr(text_config, "kv_lora_rank", None):
        width = text_config.v_head_dim
        heads = max(1, hidden // width)
        pairs = next(count for count in range(min(8, heads), 0, -1) if heads % count == 0)
    elif shape.num_attention_heads is not None and shape.num_attention_heads % pairs:
        pairs = shape.num_attention_heads
    inner: Any = getattr(text_config, "intermediate_size", None) or 3 * hidden
    own = {
        "hidden_size": hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": pairs,
        "head_dim": width,
        "intermediate_size": inner if isinstance(inner, int) else inner[-1],  # one a layer
    }
    chosen = {name: value for name, value in shape._asdict().items() if value is not None}
    return {name: chosen.get(name, value) for name, value in own.items()}


def _plain_rope(text_config: Any) -> dict[str, Any]:
    """The target's rotary embedding as far as layers of Llama have it; of its full attention."""
    found = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    rope: dict[str, Any] = dict(found.get("full_attention", nested[0]) if nested else found)
    theta = rope.get("rope_theta") or getattr(text_config, "rope_theta", None) or 10000.0
    if rope.get("rope_type", "default") not in ROPE_TYPES:
        rope = {}
    kept = {name: value for name, value in rope.items() if name not in ROPE_EXTRAS}
    return {"rope_type": "default", **kept, "rope_theta": theta}


def check_fit(source: str, target: PreTrainedModel, found: Mapping[str, int]) -> None:
    """Raise one ModelError that lists every value in which a head differs from its target.

    found: fields of the target's text configuration, perhaps with "target_" before them.
    """
    text_config: Any = target.config.get_text_config(decoder=True)
    expected = {name: getattr(text_config, name.removeprefix("target_")) for name in found}
    wrong = [name for name in expected if expected[name] != found[name]]
    if wrong:
        listed = ", ".join(
            f"{name}: expected {expected[name]}, found {found[name]}" for name in wrong
        )
        raise ModelError(
            f"{source}: the head was made for another target: {listed}; pass a head for this target"
        )


Head = TypeVar("Head", bound=nn.Module)
Initialize = Literal["target", "random"]


@torch.no_grad()
def start_head(build: Callable[[], Head], target: PreTrainedModel, std: float) -> Head:
    """A head of layers of Llama or Qwen3, on the target's device, in float32 and in train mode.

    build: makes the head on torch's default device. Weights of ``Linear`` and ``Embedding`` come
    from normal(0, std), biases are zero, norms stay ones, as transformers has it: drawn from
    torch's own generator of the device, in the order of the head's modules.
    """
    with torch.device(target.device):
        head = build().float()
    for module in head.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return head


@torch.no_grad()
def start_modules(build: Callable[[], Head], target: PreTrainedModel) -> Head:
    """A head of the target's own kind of layer, on its device, in float32 and in train mode.

    build: makes the head on torch's default device. Its weights start as the target's class starts
    its own: routers, experts, norms that scale by 1 + w. They are drawn from torch's own generator
    of the device, in the order of the head's modules.

    Raises ModelError for layers that do not run outside their model; one token is tried.
    """
    try:
        with torch.device(target.device):
            head = build().float()
        # The layers' own class: what puts an output head on those of pictures is of another.
        rule: Any = find_decoder(target)
        rule = rule if isinstance(rule, PreTrainedModel) else target
        for module in head.modules():
            rule._init_weights(module)
        _run_once(head, target)
    except (ModelError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a layer that was meant for its model alone may raise
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model_type={target.config.model_type!r}: expected decoder layers that run alone, "
            f"found that they fail ({reason}); use EAGLE-3 for this target"
        ) from error
    return head


def _run_once(head: Any, target: PreTrainedModel) -> None:
    token = torch.zeros(1, 1, dtype=torch.int64, device=target.device)
    masks = {
        "eager": torch.zeros(1, 1, 1, 1, device=target.device),
        "sdpa": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=target.device),
    }
    head(
        token,
        torch.zeros(1, 1, head.hidden_size, device=target.device),
        module=0,
        position_ids=token,
        attention_mask=masks.get(head.config._attn_implementation),
        cache=None,
    )


def copy_layers(layers: Iterable[nn.Module], kind: TargetLayers, start: Initialize) -> None:
    """Start decoder layers as the target's last one, or leave them as they are.

    A last layer with other weights, of linear attention or quantized, is not copied. Raises
    ConfigError for another ``start`` than "target" and "random".
    """
    if start not in ("target", "random"):
        raise ConfigError("initialize", start, "must be 'target' or 'random'")
    if start == "target":
        for layer in layers:
            kind.copy_last(layer)
