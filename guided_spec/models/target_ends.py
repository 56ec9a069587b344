"""The two ends of a target that its draft heads share: token embedding and output head."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

__all__ = ["TargetEnds"]


class TargetEnds:
    """Not a module, so that a head that keeps one does not own the target's parameters."""

    def __init__(self, target: PreTrainedModel) -> None:
        model: Any = target
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [...] to rows of the embedding [..., H], on the device of the ids."""
        if type(self._embedding).forward is nn.Embedding.forward:
            embedded: Tensor = self._embedding(token_ids)
        else:
            # Gemma scales in its embedding; heads are trained on a copy of the bare rows.
            weight: Any = self._embedding.weight
            embedded = functional.embedding(token_ids.to(weight.device), weight)
        return embedded.to(token_ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V], on the device of the hidden states."""
        scores: Tensor = self._head(hidden)
        return scores.to(hidden.device)
