"""What the config.json of an EAGLE-3 head says, in the two dialects that are written.

SafeAILab and SpecForge describe the layer at the top level, with an optional ``eagle_config``;
speculators in ``transformer_layer_config``, with its flags at the top level. ``eagle3_layout_for``
says the same of a head that is yet to be made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.head_config import (
    CLASSES,
    HeadShape,
    build_head_config,
    check_fit,
    derive_head_config,
)

__all__ = ["LAYER_IDS", "Eagle3Layout", "Eagle3Options", "eagle3_layout_for", "read_layout"]

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


class Eagle3Layout(NamedTuple):
    """An EAGLE-3 head without its weights.

    config: transformers configuration of its layers. aux_hidden_layers: see ``DraftHead``.
    target_hidden_size: width of one of these hidden states. draft_vocab_size: D.
    use_aux_hidden_state: whether there is an ``fc``; else the head is fed as EAGLE is.
    norm_before_fc: one norm over all that ``fc`` reads. fc_norm: one for each hidden state.
    norm_before_residual: whether the residual stream starts behind ``hidden_norm``.
    norm_output: whether what is recycled is behind the final norm.
    """

    config: Any
    aux_hidden_layers: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    use_aux_hidden_state: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_before_residual: bool
    norm_output: bool


class Eagle3Options(NamedTuple):
    """What a new EAGLE-3 head is like; see ``Eagle3Layout`` for the flags.

    shape: sizes of its layers. model_type: their kind, "llama" or "qwen3". aux_hidden_layers: None
    is (2, n // 2, n - 3) of the target's n, as all runtimes have it, or what a shallow target has
    of these. draft_vocab_size: D; None is the target's vocabulary.
    """

    shape: HeadShape = HeadShape()
    model_type: str = "llama"
    aux_hidden_layers: tuple[int, ...] | None = None
    draft_vocab_size: int | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


def eagle3_layout_for(
    target: PreTrainedModel,
    options: Eagle3Options = Eagle3Options(),  # noqa: B008 - a tuple, never changed
) -> Eagle3Layout:
    """The layout of a new EAGLE-3 head for ``target``, as wide as it.

    Raises ConfigError, naming the option, for what cannot be made.
    """
    text_config: Any = target.config.get_text_config(decoder=True)
    if options.model_type not in CLASSES:
        fix = f"must be one of {', '.join(sorted(CLASSES))}"
        raise ConfigError("model_type", options.model_type, fix)
    if options.norm_before_fc and options.fc_norm:
        raise ConfigError(
            "fc_norm", options.fc_norm, "excludes norm_before_fc: choose one of the two"
        )
    size, largest = options.draft_vocab_size, text_config.vocab_size
    if size is not None and not 1 <= size <= largest:
        fix = f"must be 1 to {largest}, the size of the target's vocabulary"
        raise ConfigError("draft_vocab_size", size, fix)
    return Eagle3Layout(
        config=derive_head_config(target, options.model_type, options.shape),
        aux_hidden_layers=_choose_layers(options, text_config.num_hidden_layers),
        target_hidden_size=text_config.hidden_size,
        draft_vocab_size=size or largest,
        use_aux_hidden_state=True,
        norm_before_fc=options.norm_before_fc,
        fc_norm=options.fc_norm,
        norm_before_residual=options.norm_before_residual,
        norm_output=options.norm_output,
    )


def _choose_layers(options: Eagle3Options, depth: int) -> tuple[int, ...]:
    """Ascending, as checkpoints are read: index i is the input of layer i."""
    if options.aux_hidden_layers is None:
        wanted = (2, depth // 2, depth - 3)
        return tuple(sorted({min(max(index, 1), depth) for index in wanted}))
    chosen = tuple(sorted(set(options.aux_hidden_layers)))
    is_distinct = len(chosen) == len(options.aux_hidden_layers)
    if not chosen or not is_distinct or chosen[0] < 0 or chosen[-1] > depth:
        fix = f"must be different hidden states, 0 to {depth}: i is the input of layer i"
        raise ConfigError("aux_hidden_layers", options.aux_hidden_layers, fix)
    return chosen


def read_layout(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: PreTrainedModel,
    source: str,
) -> Eagle3Layout:
    """Read config.json; ``tensors`` say how many hidden states ``fc`` takes.

    Raises ModelError, naming ``source``, for layers of another kind and for another target.
    """
    eagle = config.get("eagle_config") or {}
    layer = config.get("transformer_layer_config")
    if layer is None:
        # Much of such a config.json is often copied from the target: the layer is Llama's whatever
        # model_type says, and attends to everything whatever layer_types says.
        values, model_type = {"num_hidden_layers": 1, **config, "layer_types": None}, "llama"
    else:
        values, model_type = layer, layer.get("model_type", "qwen3")
    head = build_head_config(values, model_type, target, source)
    text_config: Any = target.config.get_text_config(decoder=True)
    target_hidden_size = config.get("target_hidden_size") or head.hidden_size
    found = {"target_hidden_size": target_hidden_size, "vocab_size": head.vocab_size}
    expected = {"target_hidden_size": text_config.hidden_size, "vocab_size": text_config.vocab_size}
    check_fit(source, expected, found)
    flags = {
        name: bool(eagle.get(name, config.get(name, name == "use_aux_hidden_state")))
        for name in Eagle3Layout._fields[4:]
    }
    aux_hidden_layers: tuple[int, ...] = (-1,)
    if flags["use_aux_hidden_state"]:
        depth, width = text_config.num_hidden_layers, tensors.get("fc.weight")
        count = 3 if width is None else width.shape[-1] // target_hidden_size
        aux_hidden_layers = _read_layer_ids(config, count, depth, source)
    return Eagle3Layout(
        config=head,
        aux_hidden_layers=aux_hidden_layers,
        target_hidden_size=target_hidden_size,
        draft_vocab_size=config.get("draft_vocab_size") or head.vocab_size,
        **flags,
    )


def _read_layer_ids(
    config: Mapping[str, Any], count: int, depth: int, source: str
) -> tuple[int, ...]:
    """The ``count`` layers whose inputs ``fc`` takes, ascending, as all runtimes collect them.

    At the top level (speculators, vLLM) id i is the input of layer i; in ``eagle_config``
    (SpecForge, SGLang, ModelOpt) it is the output of layer i, one further.
    """
    ids = config.get(LAYER_IDS)
    if not ids:
        ids = [index + 1 for index in (config.get("eagle_config") or {}).get(LAYER_IDS) or ()]
    ids = sorted(ids or (2, depth // 2, depth - 3))
    if len(ids) == count + 1 and ids[-1] == depth:
        ids.pop()  # the verifier's last layer: speculators trained against it, fc never sees it
    if len(ids) != count or ids[0] < 0 or ids[-1] > depth:
        raise ModelError(
            f"checkpoint={source!r}: {LAYER_IDS}: expected the {count} hidden states that "
            f"fc.weight takes, from 0 to {depth}, found {ids}; pass a head for this target"
        )
    return tuple(ids)
