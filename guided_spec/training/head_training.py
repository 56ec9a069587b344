"""What the algorithms that train a draft head share: the unroll, scored against the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.draft_head import DraftHead
from guided_spec.models.draft_vocabulary import DraftVocabulary
from guided_spec.models.head_export import head_layouts, save_head
from guided_spec.training.algorithm import TrainerKwargs, TrainingOutput
from guided_spec.training.algorithms.options import LossOptions
from guided_spec.training.batch import TargetStates, TrainingBatch
from guided_spec.training.objective import DraftLogits, Objective, measure
from guided_spec.training.target_head import TargetHead
from guided_spec.training.target_rows import TargetRows
from guided_spec.training.unroll import unroll

__all__ = [
    "FrozenTarget",
    "HeadTraining",
    "forward_head",
    "make_trainable",
    "own_tensors",
    "source_of",
    "trainer_kwargs",
]

Head = TypeVar("Head", bound=nn.Module)

FINAL_NORM = -1  # as a hidden layer: the target's last state behind its final norm


class FrozenTarget(NamedTuple):
    """A target and the end of it; a module that keeps them so does not own their parameters."""

    model: PreTrainedModel
    head: TargetHead

    @classmethod
    def of(cls, model: PreTrainedModel) -> FrozenTarget:
        """Raises ModelError for a target whose logits cannot be made from its last states."""
        return cls(model, TargetHead(model))


def source_of(target: PreTrainedModel) -> str:
    """The folder or hub id ``target`` was loaded from. Raises ModelError for one that was not."""
    source: str | None = getattr(target.config, "name_or_path", None)
    if not source:
        raise ModelError("target: expected one loaded from a folder or hub id; load it so")
    return source


def make_trainable(head: Head) -> Head:
    """A head as it was loaded, in place: float32, in train mode, with gradients."""
    return head.float().train().requires_grad_()


def own_tensors(tensors: Mapping[str, Tensor] | None, prefix: str) -> dict[str, Tensor] | None:
    """Of a whole module's state dict the part below ``prefix``; None stays None."""
    if tensors is None:
        return None
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def trainer_kwargs(*, masked: bool = True, **options: Any) -> TrainerKwargs:
    """The objective that the ``LossOptions`` among ``options`` describe, in training and after.

    Raises ConfigError, naming the option, for a value out of range.
    """
    names = {field.name for field in fields(LossOptions)}
    chosen = LossOptions(**{name: value for name, value in options.items() if name in names})
    objective = Objective.parse(
        steps=chosen.ttt_steps, decay=chosen.ttt_step_loss_decay, loss=chosen.loss, masked=masked
    )
    return {"objective": objective}, {"objective": objective}


def forward_head(
    head: DraftHead,
    target: TargetHead,
    batch: TrainingBatch,
    states: TargetStates,
    objective: Objective,
) -> TrainingOutput:
    """Unroll ``head`` over a batch and measure it; only rows of answers are scored."""
    targets = TargetRows.build(batch, states, target, head.vocabulary)
    is_last = head.aux_hidden_layers == (FINAL_NORM,)
    features = target.normed(states.last) if is_last else states.aux.flatten(-2)
    return measure(
        _drafts(head, batch, targets, features, len(objective.weights)), batch, targets, objective
    )


def _drafts(
    head: DraftHead, batch: TrainingBatch, targets: TargetRows, features: Tensor, steps: int
) -> Iterator[DraftLogits]:
    for depth, hidden in enumerate(unroll(head, batch.token_ids, features, steps)):
        places = targets.at_depth(depth) >= 0
        yield DraftLogits(places, head.logits(hidden[places]))


class HeadTraining(nn.Module):
    """A ``DraftAlgorithm`` but for what tells draft heads apart: options, and how one is made.

    A subclass sets ``config_class``, and ``reduced_vocabulary`` where its heads may have one, and
    defines ``make_head``. head: in float32, with gradients; a module and a ``DraftHead``.
    """

    config_class: ClassVar[type[Any]]
    reduced_vocabulary: ClassVar[bool] = False
    get_trainer_kwargs = staticmethod(trainer_kwargs)

    def __init__(self, head: Any, target: FrozenTarget, config: Any) -> None:
        super().__init__()
        self.head = head
        self._target = target
        self._config = config

    @classmethod
    def make_head(
        cls, config: Any, target: PreTrainedModel, vocabulary: DraftVocabulary | None
    ) -> Any:
        """The head to train: a fresh one, or one that ``config`` names."""
        raise NotImplementedError

    @classmethod
    def from_training_args(
        cls,
        verifier_config: Any,
        *,
        target: PreTrainedModel,
        vocabulary: DraftVocabulary | None,
        **options: Any,
    ) -> HeadTraining:
        """See ``DraftAlgorithm``; options: the fields of ``config_class``."""
        del verifier_config
        config = cls.config_class(**options)
        head = cls.make_head(config, target, vocabulary)
        return cls(head, FrozenTarget.of(target), config)

    @property
    def layouts(self) -> tuple[str, ...]:
        """See ``head_layouts``."""
        return head_layouts(self.head)

    @property
    def layers(self) -> nn.ModuleList:
        """The head's decoder layers."""
        layers: nn.ModuleList = self.head.layers
        return layers

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """The layers whose inputs the head reads, but for the last state, which always comes."""
        return tuple(layer for layer in self.head.aux_hidden_layers if layer != FINAL_NORM)

    def forward(
        self, batch: TrainingBatch, states: TargetStates, *, objective: Objective
    ) -> TrainingOutput:
        """See ``forward_head``."""
        return forward_head(self.head, self._target.head, batch, states, objective)

    def export(
        self, folder: Path, *, layout: str, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """See ``save_head``."""
        save_head(
            self.head,
            folder,
            layout=layout,
            target=self._target.model,
            tensors=own_tensors(tensors, "head."),
            speculative_tokens=self._config.ttt_steps,
        )
