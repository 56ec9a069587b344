"""What a learned draft head has to be: a module that maps (next token, hidden state) to the next.

Every head follows one rule: position p pairs the target's hidden state of token p with the
embedding of token p + 1, and its output predicts token p + 2.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from guided_spec.models.draft_vocabulary import DraftVocabulary

__all__ = ["DraftHead"]


class DraftHead(Protocol):
    """A learned draft head; an ``nn.Module`` in practice.

    config: a transformers configuration of the head's own decoder layers: ``num_hidden_layers``,
        layer types, attention implementation ("sdpa" or "eager").
    hidden_size: H, the width of what ``forward`` takes and returns.
    aux_hidden_layers: hidden states of the target it is fed with: index i is the input of layer i,
        n (the number of layers) the output of the last layer, -1 that output after the final norm.
    num_modules: how many modules predict at successive depths; 1 for all but some MTP checkpoints.
    vocabulary: the reduced draft vocabulary; None when it is the target's.
    """

    config: Any
    hidden_size: int
    aux_hidden_layers: tuple[int, ...]
    num_modules: int
    vocabulary: DraftVocabulary | None

    def features(self, hidden_states: Tensor) -> Tensor:
        """Target hidden states [..., len(aux_hidden_layers) * H_target] to head inputs [..., H]."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        *,
        module: int,
        position_ids: Tensor,
        attention_mask: Any,
        past_key_values: Any,
    ) -> Tensor:
        """One pass: tokens int64 [B, T] and hidden [B, T, H] to the recycled hidden [B, T, H].

        token_ids: the tokens after the positions, in target-vocabulary ids. hidden: what
        ``features`` gave for these positions, or what an earlier pass returned. module: which of
        the modules runs. position_ids: int64 [B, T]. attention_mask: what ``MaskBuilder`` makes.
        past_key_values: a ``SlotCache`` after ``begin``; layer i of ``config`` is its layer i.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Recycled hidden states [..., H] to draft logits [..., D]."""
        ...
