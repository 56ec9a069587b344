"""A target's kind of decoder layer, for draft heads that are made of the same."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.errors import ModelError

__all__ = ["TargetLayers", "cut_config"]

NEEDED = ("layers", "norm", "rotary_emb")


class TargetLayers:
    """Not a module, so that a head that keeps one does not own the target's parameters.

    config: the target's configuration of its text layers; not a copy.
    layer_class, norm_class: of its last decoder layer, and of its final norm.
    last: its last decoder layer.
    exact: parts of names of what the target's class keeps in float32: router biases.

    Raises ModelError for a target whose layers cannot be used alone.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        model: Any = target
        decoder = model.get_decoder()
        self.config: Any = model.config.get_text_config(decoder=True)
        lacking = [f"decoder.{name}" for name in NEEDED if not hasattr(decoder, name)]
        lacking += [] if hasattr(self.config, "rms_norm_eps") else ["config.rms_norm_eps"]
        if lacking:
            raise ModelError(
                f"model_type={self.config.model_type!r}: expected decoder layers, RMS norms and "
                f"a rotary embedding for all layers, found no {', '.join(lacking)}; a head of "
                "this kind cannot be made of its layers: use EAGLE-3"
            )
        self.last: nn.Module = decoder.layers[-1]
        self.layer_class: Any = type(self.last)
        self.norm_class: Any = type(decoder.norm)
        self._rotary: Any = decoder.rotary_emb
        self.exact = set(target._keep_in_fp32_modules_strict or ())
        if target.dtype == torch.float16:
            self.exact |= set(target._keep_in_fp32_modules or ())

    def rotate(
        self, hidden: Tensor, position_ids: Tensor, layer_type: str
    ) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions int64 [B, T], in the dtype and on the device of ``hidden``.

        layer_type: of the layer that is to use them, for targets whose layers differ in that.
        """
        if hasattr(self._rotary, "mrope_section"):
            # Time, height and width: the same for text, as the model itself makes them.
            position_ids = position_ids.expand(3, *position_ids.shape)
        rope = getattr(self.config, "rope_parameters", None) or {}
        kind = {"layer_type": layer_type} if layer_type in rope else {}
        cos, sin = self._rotary(hidden, position_ids, **kind)
        return cos, sin

    def copy_last(self, layer: nn.Module) -> bool:
        """Fill ``layer`` with the weights of the target's last, where it has the same ones."""
        own, theirs = layer.state_dict(), self.last.state_dict()
        if own.keys() != theirs.keys():
            return False
        if any(own[name].shape != theirs[name].shape for name in own):
            return False
        layer.load_state_dict(theirs)
        return True


def cut_config(kind: TargetLayers, num_modules: int) -> Any:
    """A copy of the target's text configuration, cut down to ``num_modules`` layers like its last.

    A last layer of linear attention is none that a head can have: it attends to everything.
    """
    config: Any = copy.deepcopy(kind.config)
    # The layers' numbers start at 0 again, where the target's first layers are dense.
    if hasattr(config, "first_k_dense_replace"):
        config.first_k_dense_replace = 0
    if hasattr(config, "mlp_only_layers"):
        has_experts = hasattr(getattr(kind.last, "mlp", None), "experts")
        config.mlp_only_layers = [] if has_experts else [*range(num_modules)]
        config.decoder_sparse_step = 1
    for field in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, field, None)
        if kinds is not None:
            last = "full_attention" if kinds[-1] == "linear_attention" else kinds[-1]
            setattr(config, field, [last] * num_modules)
    config.num_hidden_layers = num_modules
    return config
