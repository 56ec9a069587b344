"""The two ends of a target that its draft heads share: token embedding and output head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

__all__ = ["TargetEnds"]


class TargetEnds:
    """Not a module, so that a head that keeps one does not own the target's parameters."""

    def __init__(self, target: PreTrainedModel) -> None:
        model: Any = target
        self._dtype = target.dtype
        self._embedding: nn.Module = model.get_input_embeddings()
        self._head: nn.Module = model.get_output_embeddings()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [...] to rows of the embedding [..., H], on the device of the ids.

        No gradient reaches the embedding.
        """
        if type(self._embedding).forward is nn.Embedding.forward:
            embedded: Tensor = self._embedding(token_ids)
        else:
            # Gemma scales in its embedding; heads are trained on a copy of the bare rows.
            weight: Any = self._embedding.weight
            embedded = functional.embedding(token_ids.to(weight.device), weight)
        return embedded.detach().to(token_ids.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., H] to logits [..., V], on the device of the hidden states.

        They are in the target's dtype, whatever that of the hidden states is.
        """
        scores: Tensor = self._head(hidden.to(self._dtype))
        return scores.to(hidden.device)

    def output_rows(self, token_ids: Tensor | None, width: int) -> Tensor | None:
        """A copy of the output head's rows of ``token_ids`` int64 [D], float32 [D, width].

        token_ids: None is all. None where the head has no plain weights of that width.
        """
        weight = getattr(self._head, "weight", None)
        return _plain_rows(weight, token_ids, width)

    def without_copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of a head, but for an ``embed_tokens.weight`` that is the target's own.

        It may be rounded to another dtype. What a head was trained with, and shares, needs no
        memory of its own.
        """
        kept, own = dict(tensors), getattr(self._embedding, "weight", None)
        copy = kept.get("embed_tokens.weight")
        if copy is None or not isinstance(own, Tensor) or own.shape != copy.shape:
            return kept
        if torch.equal(own.detach().to(copy.dtype), copy.to(own.device)):
            del kept["embed_tokens.weight"]
        return kept

    def embedding_rows(self, width: int) -> Tensor | None:
        """A copy of the embedding, float32 [V, width], or None as of ``output_rows``."""
        return _plain_rows(getattr(self._embedding, "weight", None), None, width)


def _plain_rows(weight: Any, token_ids: Tensor | None, width: int) -> Tensor | None:
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return None
    if weight.dim() != 2 or weight.shape[1] != width:
        return None
    rows = weight.detach()
    return rows.float().clone() if token_ids is None else rows[token_ids.to(rows.device)].float()
