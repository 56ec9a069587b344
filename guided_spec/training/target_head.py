"""From the target's last hidden states to its logits: final norm, output head, and behind it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.hidden_capture import capture_hidden

__all__ = ["TargetHead"]

TOLERANCE = 0.02  # relative to the largest logit: rounding of half precision, not a forgotten step


class TargetHead:
    """Not a module, so that a draft that keeps one does not own the target's parameters.

    Knows what models do behind their output head: a factor (Cohere), a divisor (Granite), soft
    capping (Gemma). Runs one token through the target to see that nothing else happens there.

    Raises ModelError when the logits made here are not those of the target's own forward.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        model: Any = target
        config: Any = model.config.get_text_config(decoder=True)
        self._norm: Any = getattr(model.get_decoder(), "norm", None)
        self._head: Any = model.get_output_embeddings()
        self._factor: float | None = getattr(config, "logit_scale", None)
        self._divisor: float | None = getattr(config, "logits_scaling", None)
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        if self._norm is None or self._head is None:
            raise ModelError(
                f"model_type={config.model_type!r}: expected a final norm and an output head; "
                "this target cannot be trained for"
            )
        _check(self, model)

    def normed(self, last: Tensor) -> Tensor:
        """What the final norm makes of ``TargetStates.last`` [..., H], in its dtype."""
        states: Tensor = self._norm(last)
        return states

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., V] of what ``normed`` returned, in the target's dtype."""
        scores: Tensor = self._head(normed)
        if self._factor is not None:
            scores = scores * self._factor
        if self._divisor is not None:
            scores = scores / self._divisor
        if self._cap is not None:
            scores = torch.tanh(scores / self._cap) * self._cap
        return scores


@torch.no_grad()
def _check(head: TargetHead, model: Any) -> None:
    decoder = model.get_decoder()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with capture_hidden(decoder, [len(decoder.layers)]) as captured:
        expected = model(input_ids=token, use_cache=False).logits.float()
    found = head.logits(head.normed(captured[0])).float()
    if (found - expected).abs().max() > TOLERANCE * expected.abs().max():
        raise ModelError(
            f"model_type={model.config.model_type!r}: it changes its logits behind the output head "
            "in a way that is not known here; this target cannot be trained for"
        )
