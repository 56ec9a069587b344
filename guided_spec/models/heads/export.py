"""Draft heads written as checkpoints, which ``load_head`` reads, in the layouts that engines load.

docs/draft_heads.md says which engine loads which, and docs/train_a_drafter.md what that was tested
with.

Of EAGLE and EAGLE-3, SafeAILab's layout describes the layer at the top level of config.json;
speculators' in ``transformer_layer_config``. So it is with z-lab's and speculators' of DFlash, and
with DeepSeek's and speculators' of DSpark.

Of multi-token prediction, "deepseek" and "qwen" have the target's own config.json, with the number
of modules in it, and only the tensors of the modules: as a folder of its own, or to be added to the
target's. speculators' own layout is not written: no engine loads it before its modules are put back
into the target.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, cast, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.heads.block.layout import BlockLayout
from guided_spec.models.heads.block.model import BlockHead
from guided_spec.models.heads.draft_head import MASK, DraftHead
from guided_spec.models.heads.eagle import LAYER_IDS, NORM_FLAGS, Eagle3Head, EagleHead
from guided_spec.models.heads.loading import forget_head
from guided_spec.models.heads.mtp import OWN_NAMES, MtpHead, QwenMtpHead
from guided_spec.models.heads.weights import check_tensors, split_experts
from guided_spec.models.target import TargetEnds, TargetLayers
from guided_spec.types import require_int

Embedding = Literal["auto", "omit", "copy"]

# The release whose files these are.
SPECULATORS_VERSION = "0.9.0"


class HeadFiles(NamedTuple):
    """config: of config.json. tensors: of model.safetensors, by the names of the layout.

    exact: parts of names of tensors that keep their dtype.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    exact: frozenset[str] = frozenset()


@dataclass(frozen=True)
class SaveOptions:
    """How a head is written.

    dtype: of its weights. speculative_tokens: how many to draft, which layouts of speculators pass
    to the engine. embedding: "copy" writes what the head borrows of the target, its embedding and
    where the layout has a tensor for it the output head; "omit" leaves it out, which is smaller;
    "auto" writes it where the layout's own loader does not take it from the target.

    Raises ConfigError, naming the option, for a value that cannot be.
    """

    dtype: torch.dtype = torch.bfloat16
    speculative_tokens: int = 5
    embedding: Embedding = "auto"

    def __post_init__(self) -> None:
        if not self.dtype.is_floating_point or self.dtype.itemsize < 2:
            fix = "must be torch.bfloat16, torch.float16 or torch.float32"
            raise ConfigError("dtype", self.dtype, fix)
        require_int("speculative_tokens", self.speculative_tokens, low=1)
        if self.embedding not in get_args(Embedding):
            raise ConfigError("embedding", self.embedding, "must be 'auto', 'omit' or 'copy'")


class SaveKeywords(TypedDict, total=False):
    """The fields of ``SaveOptions`` as keyword arguments."""

    dtype: torch.dtype
    speculative_tokens: int
    embedding: Embedding


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in config.json, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def architectures_of(target: PreTrainedModel) -> list[str]:
    """The class names in the target's config.json."""
    found: list[str] | None = target.config.architectures
    return found or [type(target).__name__]


def rope_fields(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A rotary embedding as transformers 5 reads it, and as earlier releases and engines do.

    parameters: ``rope_parameters`` of a configuration, the same for all layers.
    """
    kept = dict(parameters)
    scaling = {name: value for name, value in kept.items() if name != "rope_theta"}
    is_plain = scaling.get("rope_type", "default") == "default"
    return {
        "rope_parameters": kept,
        "rope_theta": kept.get("rope_theta", 10000.0),
        "rope_scaling": None if is_plain else scaling,
    }


def speculators_config(
    target: PreTrainedModel, options: SaveOptions, algorithm: str
) -> dict[str, Any]:
    """The two keys by which speculators and vLLM know how to draft, and for which target.

    Raises ConfigError for a target that was not loaded from a folder or the hub.
    """
    path = getattr(target.config, "name_or_path", None)
    if not path:
        fix = (
            "must have been loaded from a folder or a hub id, which this layout names; load it "
            "so, or set target.config.name_or_path"
        )
        raise ConfigError("target.config.name_or_path", path, fix)
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": options.speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": str(path), "architectures": architectures_of(target)},
        },
    }


Tensors = Mapping[str, Tensor]
ENDS = ("embed_tokens.weight", "lm_head.weight")

SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "vocab_size",
)
WINDOWS = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")
SLIDING = "sliding_attention"
NUM_ANCHORS = 512  # DeepSpec's class asks for it, and only trains by it


def eagle_safeailab(
    head: EagleHead, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """``fc``, ``layers.{i}`` and perhaps ``embed_tokens``; config.json of a Llama."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        **_layer_fields(head.config, tensors),
        "bias": "fc.bias" in tensors,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(options.dtype),
    }
    return HeadFiles(config, _complete(head, tensors, target, options, ENDS[:1]))


def eagle3_safeailab(
    head: Eagle3Head, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """``midlayer``, ``d2t`` as offsets, ``t2d``; the hidden states under the keys of both dialects.

    Raises ModelError for a head that is not one plain layer of Llama: the engines that read this
    layout take any for one, and SGLang looks at no flag of its norms.
    """
    layout, kind = head.layout, head.config.model_type
    if kind != "llama":
        raise _refusal("safeailab", f"layers of Llama, found {kind}", "speculators")
    if SLIDING in (getattr(head.config, "layer_types", None) or ()):
        raise _refusal("safeailab", "layers without windows, found sliding ones", "speculators")
    if head.config.num_hidden_layers > 1:
        found = f"one layer, found {head.config.num_hidden_layers}"
        raise _refusal("safeailab", found, "speculators")
    on = [name for name in NORM_FLAGS if getattr(layout, name)]
    if on:
        raise _refusal("safeailab", f"a head without {' and '.join(on)}", "speculators")
    named: dict[str, Any] = {}
    eagle: dict[str, Any] = {"use_aux_hidden_state": layout.use_aux_hidden_state}
    if layout.use_aux_hidden_state:
        # Here SGLang and SpecForge count the outputs of layers; at the top level vLLM their inputs.
        eagle[LAYER_IDS] = [index - 1 for index in layout.aux_hidden_layers]
        named[LAYER_IDS] = [*layout.aux_hidden_layers]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_fields(head.config, tensors),
        "draft_vocab_size": layout.draft_vocab_size,
        "target_hidden_size": layout.target_hidden_size,
        **named,
        "eagle_config": eagle,
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(options.dtype),
    }
    if layout.mask_token_id is not None:
        config["ptd_token_id"] = layout.mask_token_id
    complete = _complete(head, _with_mask(tensors), target, options)
    renamed = {name.replace("layers.0.", "midlayer."): t for name, t in complete.items()}
    return HeadFiles(config, renamed)


def eagle3_speculators(
    head: Eagle3Head, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """What ``Eagle3DraftModel.from_pretrained`` of speculators 0.9 reads.

    Embedding and output head are always there. speculators takes those that are missing from the
    verifier only if their uninitialized memory happens to hold a NaN. Raises ModelError
    for a head that speculators has no words for, and for embedding="omit".
    """
    layout = head.layout
    if options.embedding == "omit":
        raise ModelError(
            "embedding='omit': speculators does not reliably take them from the verifier; pass "
            "'auto', or layout='safeailab'"
        )
    if not layout.use_aux_hidden_state:
        raise _refusal("speculators", "a head with an fc, found none", "safeailab")
    if layout.target_hidden_size != head.hidden_size:
        found = f"{head.hidden_size} of {layout.target_hidden_size}"
        raise _refusal("speculators", f"a head as wide as its target, found {found}", "safeailab")
    if any(name.endswith(".bias") for name in tensors):
        raise _refusal("speculators", "a head without biases, found some", "safeailab")
    fields: dict[str, Any] = {}
    kind, name = "eagle3", "Eagle3DraftModel"
    if layout.mask_token_id is not None:
        kind, name, fields = "peagle", "PEagleDraftModel", {"mask_token_id": layout.mask_token_id}
    fields |= {"architectures": [name], **{flag: getattr(layout, flag) for flag in NORM_FLAGS}}
    layer = {**_layer_fields(head.config, tensors), "tie_word_embeddings": False}
    layer["num_aux_hidden_states"] = len(
        layout.aux_hidden_layers
    )  # vLLM takes 3 where none is said
    fields |= {"embed_requires_grad": False, "transformer_layer_config": layer}
    fields[LAYER_IDS] = [*layout.aux_hidden_layers]
    return _speculators(head, tensors, target, options, kind, fields)


def _speculators(
    head: Eagle3Head | BlockHead,
    tensors: Tensors,
    target: PreTrainedModel,
    options: SaveOptions,
    kind: str,
    fields: Mapping[str, Any],
) -> HeadFiles:
    """With what speculators says of every head of a ``kind``, and with both ends."""
    config = {
        "speculators_model_type": kind,
        **speculators_config(target, options, kind),
        "draft_vocab_size": head.layout.draft_vocab_size,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": dtype_name(options.dtype),
        **fields,
    }
    complete = replace(options, embedding="copy")
    return HeadFiles(config, _complete(head, _with_mask(tensors), target, complete))


def _with_mask(tensors: Tensors) -> dict[str, Tensor]:
    """P-EAGLE's state of a mask in the shape in which it is published."""
    return {name: t.view(1, 1, -1) if name == MASK else t for name, t in tensors.items()}


def block_zlab(
    head: BlockHead, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """Keys of a Qwen3 configuration and ``dflash_config``; embedding and output head stay out.

    Raises ModelError for a head that scores only some tokens, or has more than DFlash's parts.
    """
    del target
    layout = _plain_block(head, "zlab")
    if layout.from_anchor or layout.markov is not None:
        raise _refusal("zlab", "a DFlash head, found one of DSpark", "speculators")
    if head.vocabulary is not None or "lm_head.weight" in tensors:
        raise _refusal("zlab", "the target's own output head, found another", "speculators")
    config = {
        "architectures": ["DFlashDraftModel"],
        **_block_fields(head, tensors),
        "block_size": layout.block_size,
        "dflash_config": {
            "mask_token_id": layout.mask_token_id,
            "target_layer_ids": [index - 1 for index in layout.aux_hidden_layers],
        },
        "dtype": dtype_name(options.dtype),
    }
    return HeadFiles(config, dict(tensors))


def block_speculators(
    head: BlockHead, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """What speculators' classes of DFlash and DSpark read; they want the output head."""
    layout = _plain_block(head, "speculators")
    fields: dict[str, Any] = {}
    kind, name = "dflash", "DFlashDraftModel"
    if layout.markov is not None:
        kind, name, fields = "dspark", "DSparkDraftModel", _dspark_fields(layout)
    fields |= {
        "architectures": [name],
        "aux_hidden_state_layer_ids": [*layout.aux_hidden_layers],
        "block_size": layout.block_size,
        "mask_token_id": layout.mask_token_id,
        "sample_from_anchor": layout.from_anchor,
        "transformer_layer_config": _block_fields(head, tensors),
    }
    if SLIDING in head.config.layer_types:  # vLLM takes what is written for layers of any kind
        fields["sliding_window_non_causal"] = layout.is_causal is False
    return _speculators(head, tensors, target, options, kind, fields)


def block_deepseek(
    head: BlockHead, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """What ``Qwen3DSparkModel`` of DeepSeek's DeepSpec reads, with embedding and output head.

    Raises ModelError for a head that scores only some tokens, or drafts after its first position.
    """
    layout = _plain_block(head, "deepseek")
    if head.vocabulary is not None:
        raise _refusal("deepseek", "all tokens of the target, found some", "speculators")
    if not layout.from_anchor or layout.is_causal is False or layout.markov is None:
        raise _refusal("deepseek", "a DSpark head, found another", "speculators")
    text_config: Any = target.config.get_text_config(decoder=True)
    config = {
        "architectures": ["Qwen3DSparkModel"],
        **_block_fields(head, tensors),
        **_dspark_fields(layout),
        "block_size": layout.block_size,
        "mask_token_id": layout.mask_token_id,
        "num_anchors": NUM_ANCHORS,
        "num_target_layers": text_config.num_hidden_layers,
        "target_layer_ids": [index - 1 for index in layout.aux_hidden_layers],
        "dtype": dtype_name(options.dtype),
    }
    complete = replace(options, embedding="copy")
    return HeadFiles(config, _complete(head, tensors, target, complete))


def _dspark_fields(layout: BlockLayout) -> dict[str, Any]:
    assert layout.markov is not None
    return {
        "markov_rank": layout.markov.rank,
        "markov_head_type": layout.markov.kind,
        "enable_confidence_head": layout.confidence_width > 0,
        "confidence_head_with_markov": layout.confidence_width > layout.config.hidden_size,
    }


def _block_fields(head: BlockHead, tensors: Tensors) -> dict[str, Any]:
    types = {"layer_types": head.config.layer_types, "tie_word_embeddings": False}
    return {**types, **_layer_fields(head.config, tensors)}


def _plain_block(head: BlockHead, name: str) -> BlockLayout:
    """Raises ModelError for what neither layout is written with here."""
    layout = head.layout
    plain = layout._replace(embedding_scale=1.0, logit_scale=1.0, softcap=0.0)
    if (
        layout != plain._replace(conv=None, selector=None, prefix=None, lattice=None)
        or layout.is_causal
    ):
        problem = "it needs a DFlash or DSpark head, found other parts, scales or a causal block"
        raise ModelError(f"layout={name!r}: {problem}; train a fresh one")
    return layout


def _layer_fields(config: Any, tensors: Tensors) -> dict[str, Any]:
    """What ``config.build_head_config`` reads, and what engines ask about biases."""
    fields = {name: getattr(config, name) for name in SIZES}
    if SLIDING in (getattr(config, "layer_types", None) or ()):
        fields |= {name: getattr(config, name) for name in WINDOWS if hasattr(config, name)}
    has_bias = any(name.endswith("self_attn.q_proj.bias") for name in tensors)
    rope = rope_fields(config.rope_parameters)
    return {**fields, **rope, "attention_bias": has_bias, "mlp_bias": False}


def _complete(
    head: EagleHead | Eagle3Head | BlockHead,
    tensors: Tensors,
    target: PreTrainedModel,
    options: SaveOptions,
    names: Sequence[str] = ENDS,
) -> dict[str, Tensor]:
    """With the draft vocabulary and, where ``options`` ask for it, the ``names`` that lack."""
    complete = dict(tensors)
    if options.embedding == "copy":
        missing = [name for name in names if name not in complete]
        complete |= _borrow(target, head.hidden_size, missing)
    if head.vocabulary is not None:
        complete |= head.vocabulary.tensors()
    return complete


def _borrow(target: PreTrainedModel, width: int, names: Sequence[str] = ENDS) -> dict[str, Tensor]:
    """Copies of the target's embedding and output head, or one of them."""
    ends = TargetEnds(target)
    rows = {ENDS[0]: ends.embedding_rows(width), ENDS[1]: ends.output_rows(None, width)}
    found = {name: rows[name] for name in names}
    if lacking := [name for name, tensor in found.items() if tensor is None]:
        raise ModelError(
            f"embedding='copy': expected plain weights of the target as {', '.join(lacking)}, "
            "found others; pass embedding='omit', in a layout that takes it"
        )
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _refusal(layout: str, problem: str, other: str) -> ModelError:
    return ModelError(f"layout={layout!r}: it needs {problem}; save it as {other!r}")


# Of a whole model as it was loaded; a head is none of that.
DROPPED = ("_name_or_path", "quantization_config", "transformers_version")


def mtp_deepseek(
    head: MtpHead, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """``model.layers.{N + i}.*`` of a target of N layers, experts one by one.

    With embedding="copy" each module has its ``embed_tokens`` and ``shared_head.head``, as
    published ones have.
    """
    kind = TargetLayers(target)
    first: int = kind.config.num_hidden_layers
    own = {inner: outer for outer, inner in OWN_NAMES.items()}
    named = {}
    for name, tensor in split_experts(dict(tensors)).items():
        _, number, rest = name.split(".", 2)
        prefix = next((inner for inner in own if rest.startswith(inner)), "mtp_block.")
        stem = own.get(prefix, "") + rest.removeprefix(prefix)
        named[f"model.layers.{first + int(number)}.{stem}"] = tensor
    if options.embedding == "copy":
        ends = _borrow(target, head.hidden_size)
        for module in range(head.num_modules):
            layer = f"model.layers.{first + module}."
            named[f"{layer}embed_tokens.weight"] = ends["embed_tokens.weight"]
            named[f"{layer}shared_head.head.weight"] = ends["lm_head.weight"]
    config = _target_config(target, options, "num_nextn_predict_layers", head.num_modules)
    return HeadFiles(config, named, frozenset(kind.exact))


def mtp_qwen(
    head: QwenMtpHead, tensors: Tensors, target: PreTrainedModel, options: SaveOptions
) -> HeadFiles:
    """``mtp.*``, experts one by one.

    With embedding="copy" the target's ``model.embed_tokens`` and ``lm_head`` are there too.
    """
    named = {f"mtp.{name}": tensor for name, tensor in split_experts(dict(tensors)).items()}
    if options.embedding == "copy":
        ends = _borrow(target, head.hidden_size)
        named["model.embed_tokens.weight"] = ends["embed_tokens.weight"]
        named["lm_head.weight"] = ends["lm_head.weight"]
    config = _target_config(target, options, "mtp_num_hidden_layers", head.num_modules)
    return HeadFiles(config, named, frozenset(TargetLayers(target).exact))


def _target_config(
    target: PreTrainedModel, options: SaveOptions, count: str, num_modules: int
) -> dict[str, Any]:
    config = {
        **_plain(target.config),
        "architectures": architectures_of(target),
        "dtype": dtype_name(options.dtype),
    }
    config.get("text_config", config)[count] = num_modules
    return config


def _plain(config: Any) -> dict[str, Any]:
    """What config.json says of a model whose weights are not quantized."""
    values = {name: v for name, v in config.to_diff_dict().items() if name not in DROPPED}
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" in rope:  # not one for each type of layer
        values |= rope_fields(rope)
    return {"model_type": config.model_type, **values}


Describe = Callable[[Any, Tensors, PreTrainedModel, SaveOptions], HeadFiles]

# The first is the one to choose where nothing speaks for another.
LAYOUTS: dict[type[nn.Module], dict[str, Describe]] = {
    EagleHead: {"safeailab": eagle_safeailab},
    Eagle3Head: {"speculators": eagle3_speculators, "safeailab": eagle3_safeailab},
    BlockHead: {
        "speculators": block_speculators,
        "zlab": block_zlab,
        "deepseek": block_deepseek,
    },
    MtpHead: {"deepseek": mtp_deepseek},
    QwenMtpHead: {"qwen": mtp_qwen},
}


def head_layouts(head: DraftHead) -> tuple[str, ...]:
    """The layouts that heads of this kind can be written in, the usual one first.

    Raises ModelError for a head of another package.
    """
    return tuple(_find_layouts(head))


def save_head(
    head: DraftHead,
    folder: str | Path,
    *,
    layout: str,
    target: PreTrainedModel,
    tensors: Mapping[str, Tensor] | None = None,
    **options: Unpack[SaveKeywords],
) -> Path:
    """Write config.json and model.safetensors into ``folder``, which is made; returns it.

    head: of this package; not changed. layout: one of ``head_layouts``. target: what the head was
        made for; its config and, where ``options`` ask for it, its embedding are written.
    tensors: the state dict to write instead of the head's own, under the same names, in any dtype
        and on any device: gathered from a run that spreads the head over devices.
    options: fields of ``SaveOptions``: ``speculative_tokens``, ``dtype``, ``embedding``.

    Router biases stay float32. Raises ConfigError for a layout that this kind of head does not
    have and for a target without a name where the layout wants one; ModelError for tensors that
    do not fit the head, listing them, and for what a layout cannot say of this head.
    """
    layouts, module = _find_layouts(head), cast(nn.Module, head)
    if layout not in layouts:
        fix = f"must be {' or '.join(map(repr, layouts))} for {type(head).__name__}"
        raise ConfigError("layout", layout, fix)
    chosen, expected = SaveOptions(**options), module.state_dict()
    stored = expected if tensors is None else dict(tensors)
    check_tensors(expected, stored, "tensors=")
    files = layouts[layout](head, stored, target, chosen)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: _store(name, tensor, files, chosen) for name, tensor in files.tensors.items()},
        path / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.dumps(files.config, indent=2, sort_keys=True)
    (path / "config.json").write_text(f"{config}\n", encoding="utf-8")
    forget_head(path, target)
    return path


def _find_layouts(head: DraftHead) -> dict[str, Describe]:
    for kind, layouts in LAYOUTS.items():
        if isinstance(head, kind):
            return layouts
    known = ", ".join(kind.__name__ for kind in LAYOUTS)
    raise ModelError(f"head={type(head).__name__}: expected one of {known}; write it yourself")


def _store(name: str, tensor: Tensor, files: HeadFiles, options: SaveOptions) -> Tensor:
    """A copy on the CPU in memory of its own, as safetensors wants it."""
    is_exact = any(fragment in name for fragment in files.exact)
    dtype = tensor.dtype
    if tensor.is_floating_point():
        dtype = torch.float32 if is_exact else options.dtype
    stored = torch.empty(tensor.shape, dtype=dtype)
    return stored.copy_(tensor.detach())
