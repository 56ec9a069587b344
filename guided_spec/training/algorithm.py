"""What a training algorithm has to be: one module that a target's states go through.

What a training step works on: documents, and what the target makes of each of their tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.training.data.pictures import BatchPictures


class TrainingBatch(NamedTuple):
    """B documents, padded on the right to T tokens; all on one device.

    token_ids: int64 [B, T]; any valid id at the padding.
    loss_mask: bool [B, T]: whether a token belongs to a response, so that predicting *it* is what
        the draft is trained for. False at the padding and at each document's first token.
    lengths: int64 [B], tokens of each document.
    bitmask: int32 [N, W], rows of legal tokens; row 0 is all ones and forbids nothing.
    mask_rows: int64 [B, T], the row of ``bitmask`` with the tokens that the grammar allows at each
        position; 0 for free text.
    indices: int64 [B], which documents of the dataset these are.
    pictures: of the documents, whose rows ``token_ids`` may have; None where none has any.
    """

    token_ids: Tensor
    loss_mask: Tensor
    lengths: Tensor
    bitmask: Tensor
    mask_rows: Tensor
    indices: Tensor
    pictures: BatchPictures | None = None

    @property
    def written_ids(self) -> Tensor:
        """int64 [B, T], with a placeholder for each row of a picture."""
        return self.token_ids if self.pictures is None else self.pictures.written

    @property
    def contents(self) -> list[str]:
        """[B], what tells the pictures of each document; "" for none."""
        documents = [None] * len(self.lengths) if self.pictures is None else self.pictures.documents
        return ["" if one is None else one.contents for one in documents]

    def to(self, device: object) -> TrainingBatch:
        """The batch on ``device``; from pinned memory the copy does not wait."""
        pictures = None if self.pictures is None else self.pictures.to(device)
        moved = (part.to(device, non_blocking=True) for part in self[:-1])  # type: ignore[call-overload]
        return TrainingBatch(*moved, pictures=pictures)  # type: ignore[misc]


class TargetStates(NamedTuple):
    """Hidden states of the target over one batch, without gradient.

    aux: [B, T, A, H_target], the inputs of the layers that the draft asked for, in its order.
    last: [B, T, H_target], the output of the last layer *before* the final norm.

    Both are arbitrary at the padding. The target's distribution of token p + 1 is made from
    ``last[:, p]``.
    """

    aux: Tensor
    last: Tensor


TrainerKwargs = tuple[dict[str, Any], dict[str, Any]]
"""Keyword arguments of a ``forward``: while training, and while validating."""


@dataclass(frozen=True)
class Metric:
    """A mean that can be added up over batches and processes: scalars float32, no gradient."""

    total: Tensor
    count: Tensor


class TrainingOutput(NamedTuple):
    """What one forward gave.

    output: int64 [steps, B, T], in target ids, the likeliest draft token at each depth: entry p
        drafts token ``p + 2 + depth``; -1 where nothing was trained.
    loss: scalar float32, with gradient.
    metrics: by name. ``loss_{depth}``; ``accept_{depth}``, the share of drafts that agree with the
        target's likeliest tokens up to that depth; ``overlap_{depth}``, the probability that
        rejection sampling accepts so far.
    """

    output: Tensor
    loss: Tensor
    metrics: dict[str, Metric]


class DraftAlgorithm(Protocol):
    """An algorithm that trains drafts; an ``nn.Module`` in practice, see ``register(name)``.

    Its parameters are what is trained, in float32; the target's are not among them.

    config_class: a dataclass of options, every field with a default and a help text; they appear
        on the command line, and reach the two constructors below as keyword arguments.
    reduced_vocabulary: whether the draft may score only some of the target's tokens.
    """

    config_class: ClassVar[type]
    reduced_vocabulary: ClassVar[bool]

    @classmethod
    def from_training_args(
        cls,
        verifier_config: Any,
        *,
        target: PreTrainedModel,
        vocabulary: DraftVocabulary | None,
        **options: Any,
    ) -> DraftAlgorithm:
        """A fresh draft for ``target``, on its device.

        verifier_config: the target's text configuration. vocabulary: None for the target's own.
        """
        ...

    @staticmethod
    def get_trainer_kwargs(**options: Any) -> TrainerKwargs:
        """The keyword arguments of ``forward`` while training, and while validating."""
        ...

    @property
    def layouts(self) -> tuple[str, ...]:
        """The checkpoint formats that ``export`` writes of this draft, the default first."""
        ...

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder layers: what FSDP shards one by one."""
        ...

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target whose inputs go into ``TargetStates.aux``, from 0 to its depth."""
        ...

    def forward(self, batch: TrainingBatch, states: TargetStates, **kwargs: Any) -> TrainingOutput:
        """The loss and metrics of one batch."""
        ...

    def export(
        self, folder: Path, *, layout: str, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write the draft as a checkpoint that serving engines load.

        tensors: the state dict to write instead of the module's own, gathered by a sharded run.
        """
        ...
