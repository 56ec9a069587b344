"""A target's kind of decoder layer, for draft heads that are made of the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

__all__ = ["TargetLayers"]


class TargetLayers:
    """Not a module, so that a head that keeps one does not own the target's parameters.

    config: the target's configuration of its text layers; not a copy.
    layer_class, norm_class: of its last decoder layer, and of its final norm.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        model: Any = target
        decoder = model.get_decoder()
        self.config: Any = model.config.get_text_config(decoder=True)
        self.layer_class: Any = type(decoder.layers[-1])
        self.norm_class: Any = type(decoder.norm)
        self._rotary: Any = decoder.rotary_emb
        self._device, self._dtype = target.device, target.dtype
        self._exact = set(target._keep_in_fp32_modules_strict or ())
        if self._dtype == torch.float16:
            self._exact |= set(target._keep_in_fp32_modules or ())

    def rotate(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) of positions int64 [B, T], in the dtype and on the device of ``hidden``."""
        if hasattr(self._rotary, "mrope_section"):
            # Time, height and width: the same for text, as the model itself makes them.
            position_ids = position_ids.expand(3, *position_ids.shape)
        cos, sin = self._rotary(hidden, position_ids)
        return cos, sin

    def allocate(self, head: nn.Module) -> None:
        """Put a head built on the meta device into fresh memory on the target's device.

        Everything is in the target's dtype but for what the target's class keeps in float32:
        router biases. It takes no gradient. All of it has to be loaded, buffers too.
        """
        head.to(self._dtype).to_empty(device=self._device)
        for name, tensor in [*head.named_parameters(), *head.named_buffers()]:
            tensor.requires_grad = False
            if any(part in name for part in self._exact):
                tensor.data = tensor.data.float()
