"""What a learned draft head has to be: a module that maps (next token, hidden state) to the next.

Every head follows one rule: position p pairs the target's hidden state of token p with the
embedding of token p + 1, and its output predicts token p + 2.

A head may have a smaller vocabulary of its own: EAGLE-3 heads score only the D most frequent of the
target's V tokens. Their checkpoints hold ``d2t`` int64 [D], offsets: draft id i is target id
``i + d2t[i]`` (SafeAILab/EAGLE, SpecForge and speculators all store it so).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ModelError

__all__ = [
    "DraftHead",
    "DraftVocabulary",
    "VocabularyTensors",
]


class VocabularyTensors(NamedTuple):
    """A draft vocabulary as checkpoints hold it.

    d2t: int64 [D], offsets: draft id i is target id ``i + d2t[i]``.
    t2d: bool [V], which target tokens the draft scores.
    """

    d2t: Tensor
    t2d: Tensor


class DraftVocabulary:
    """Which target token each draft token is.

    target_ids: int64 [D], on the device of the head; distinct ids below ``target_size``.
    columns: int32 [V] beside them: which draft token each target token is, -1 for none.
    """

    def __init__(self, target_ids: Tensor, target_size: int) -> None:
        self.target_ids = target_ids
        self.target_size = target_size
        order = torch.arange(len(target_ids), dtype=torch.int32, device=target_ids.device)
        self.columns = torch.full((target_size,), -1, dtype=torch.int32, device=order.device)
        self.columns[target_ids] = order

    @classmethod
    def from_offsets(cls, offsets: Tensor, target_size: int, source: str) -> DraftVocabulary:
        """From the ``d2t`` tensor of a checkpoint, int64 [D].

        source: what to name in the error. Raises ModelError for offsets that are no integers, that
        leave the target's vocabulary, or that name a target token twice.
        """
        if offsets.dim() != 1 or offsets.is_floating_point() or not len(offsets):
            found = f"{offsets.dtype} {list(offsets.shape)}"
            raise ModelError(f"{source}: d2t: expected int64 [D], found {found}")
        target_ids = offsets.long() + torch.arange(len(offsets), device=offsets.device)
        low, high = int(target_ids.min()), int(target_ids.max())
        if low < 0 or high >= target_size:
            raise ModelError(
                f"{source}: d2t: expected offsets to target ids in [0, {target_size}), "
                f"found {low} to {high}; the head belongs to another target"
            )
        if len(target_ids.unique()) < len(target_ids):
            raise ModelError(
                f"{source}: d2t: expected {len(target_ids)} different target tokens, found some "
                "twice; d2t has to hold offsets (target id minus draft id), not target ids"
            )
        return cls(target_ids, target_size)

    @classmethod
    def of_checkpoint(
        cls, offsets: Tensor | None, draft_size: int, target: PreTrainedModel, source: str
    ) -> DraftVocabulary | None:
        """The vocabulary of a head of ``draft_size`` tokens; None where it is the target's.

        offsets: its ``d2t``, None where it has none. Raises ModelError, besides what
        ``from_offsets`` raises, where they do not say which tokens they are.
        """
        text_config: Any = target.config.get_text_config(decoder=True)
        if draft_size == text_config.vocab_size and (offsets is None or not offsets.any()):
            return None
        if offsets is None or offsets.shape != (draft_size,):
            found = "none" if offsets is None else list(offsets.shape)
            raise ModelError(
                f"checkpoint={source!r}: d2t: expected int64 [{draft_size}], found {found}; a head "
                f"with {draft_size} of {text_config.vocab_size} tokens has to say which ones"
            )
        return cls.from_offsets(offsets.to(target.device), text_config.vocab_size, source)

    def tensors(self) -> VocabularyTensors:
        """The tensors that ``from_offsets`` and other runtimes read, on the vocabulary's device."""
        target_ids = self.target_ids
        scored = torch.zeros(self.target_size, dtype=torch.bool, device=target_ids.device)
        scored[target_ids] = True
        offsets = target_ids - torch.arange(len(self), device=target_ids.device)
        return VocabularyTensors(offsets, scored)

    def __len__(self) -> int:
        return len(self.target_ids)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids int64 [...] to target ids."""
        return self.target_ids[draft_ids]


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
        cache: Any,
    ) -> Tensor:
        """One pass: tokens int64 [B, T] and hidden [B, T, H] to the recycled hidden [B, T, H].

        token_ids: the tokens after the positions, in target-vocabulary ids. hidden: what
        ``features`` gave for these positions, or what an earlier pass returned. module: which of
        the modules runs. position_ids: int64 [B, T]. attention_mask: what ``MaskBuilder`` makes.
        cache: a ``SlotCache`` after ``begin``; layer i of ``config`` is its layer i.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Recycled hidden states [..., H] to draft logits [..., D]."""
        ...
