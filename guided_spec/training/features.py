"""Hidden states of the frozen target, computed as they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from guided_spec.models.hidden_capture import capture_hidden
from guided_spec.training.batch import TargetStates, TrainingBatch

__all__ = ["Features", "OnlineFeatures"]

Features = Callable[[TrainingBatch], TargetStates]
"""Where the target's states of a batch come from: the model itself, or files."""


class OnlineFeatures:
    """Runs the target's decoder over each batch; not its output head.

    target: on the device of the batches; it is not changed.
    layers: hidden states for ``TargetStates.aux``: index i is the input of layer i, n the output of
        the last layer. May be empty.
    """

    def __init__(self, target: PreTrainedModel, layers: tuple[int, ...]) -> None:
        model: Any = target
        self._decoder: Any = model.get_decoder()
        self._layers = (*layers, model.config.get_text_config(decoder=True).num_hidden_layers)

    @torch.no_grad()
    def __call__(self, batch: TrainingBatch) -> TargetStates:
        """The states of ``batch``, in the target's dtype. Raises ModelError for an unknown layer.

        Not in inference mode: the draft's backward pass has to keep these tensors.
        """
        token_ids = batch.token_ids
        place = torch.arange(token_ids.shape[1], device=token_ids.device)
        mask = place < batch.lengths[:, None]
        with capture_hidden(self._decoder, self._layers) as captured:
            self._decoder(input_ids=token_ids, attention_mask=mask.long(), use_cache=False)
            *aux, last = captured
        if not aux:
            return TargetStates(last.new_empty(*last.shape[:2], 0, last.shape[2]), last)
        return TargetStates(torch.stack(aux, 2), last)
