"""Distillation of a small stock language model that drafts for the target.

Its loss at a token is a head's at depth 0. It computes further draft tokens by the same function,
so that one forward trains all depths.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from guided_spec.errors import VocabularyMismatchError
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.loading import load_model
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.training.algorithm import (
    TargetStates,
    TrainerKwargs,
    TrainingBatch,
    TrainingOutput,
)
from guided_spec.training.algorithms.heads import (
    FrozenTarget,
    own_tensors,
    source_of,
    trainer_kwargs,
)
from guided_spec.training.algorithms.options import DraftModelConfig
from guided_spec.training.objective import DraftScorer, DraftStates, Objective, measure
from guided_spec.training.rows import pick_rows
from guided_spec.training.target_rows import TargetHead, TargetRows


class DraftModelTraining(nn.Module):
    """Trains a small language model that drafts; made by ``from_training_args``."""

    config_class = DraftModelConfig
    layouts = ("transformers",)
    reduced_vocabulary = False

    def __init__(self, draft: PreTrainedModel, target: FrozenTarget) -> None:
        super().__init__()
        self.draft = draft
        self._target = target
        self._draft_head = TargetHead(draft)

    @classmethod
    def from_training_args(
        cls,
        verifier_config: Any,
        *,
        target: PreTrainedModel,
        vocabulary: DraftVocabulary | None,
        **options: Any,
    ) -> DraftModelTraining:
        """A fresh Llama of the sizes in ``options``, or the model of ``init``.

        ``vocabulary`` has to be None. Raises VocabularyMismatchError for an ``init`` whose logits
        are not as wide as the target's.
        """
        del vocabulary
        config = DraftModelConfig(**options)
        if config.init is None:
            draft = _fresh(config, verifier_config, target)
        else:
            draft = load_model(
                config.init, dtype=torch.float32, device=target.device, argument="init"
            )
            _check_width(config.init, draft, verifier_config.vocab_size)
        draft.train()
        return cls(draft, FrozenTarget.of(target))

    @staticmethod
    def get_trainer_kwargs(**options: Any) -> TrainerKwargs:
        """All of the loss at depth 0, and the acceptance at every depth."""
        kwargs, _ = trainer_kwargs(**options)
        objective: Objective = kwargs["objective"]
        weights = (1.0, *[0.0] * (len(objective.weights) - 1))
        kwargs = {"objective": Objective(weights, objective.loss, objective.masked)}
        return kwargs, kwargs

    @property
    def layers(self) -> nn.ModuleList:
        """The model's decoder layers."""
        model: Any = self.draft
        layers: nn.ModuleList = model.get_decoder().layers
        return layers

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """None: it reads the text alone."""
        return ()

    def forward(
        self, batch: TrainingBatch, states: TargetStates, *, objective: Objective
    ) -> TrainingOutput:
        """The loss of every token of a response, predicted from the text before it."""
        model: Any = self.draft
        targets = TargetRows.build(batch, states, self._target.head, None)
        token_ids = batch.written_ids  # as it reads pictures when it drafts
        index = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
        mask = (index < batch.lengths[:, None]).long()
        decoder = model.get_decoder()
        hidden = decoder(
            input_ids=token_ids, attention_mask=mask, use_cache=False
        ).last_hidden_state
        positions = targets.positions(0)
        # Entry p drafts token p + 2 from state p + 1; the last entries draft nothing.
        drafts = [DraftStates(positions, pick_rows(hidden.flatten(0, 1), positions.at + 1))]
        scorer = DraftScorer.of(self._draft_head.logits, self.draft, self.layers)
        return measure(drafts, scorer, batch, targets, objective)

    def export(
        self, folder: Path, *, layout: str, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write an ordinary transformers model in bf16, with the target's tokenizer."""
        del layout
        model: Any = self.draft
        state = own_tensors(tensors, "draft.") or model.state_dict()
        halved = {
            name: tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
            for name, tensor in state.items()
        }
        model.config.dtype = torch.bfloat16
        model.save_pretrained(folder, state_dict=halved)
        load_tokenizer(source_of(self._target.model)).save_pretrained(str(folder))


def _fresh(
    config: DraftModelConfig, verifier_config: Any, target: PreTrainedModel
) -> PreTrainedModel:
    shape = LlamaConfig(
        vocab_size=verifier_config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        max_position_embeddings=verifier_config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=verifier_config.bos_token_id,
        eos_token_id=verifier_config.eos_token_id,
        pad_token_id=verifier_config.pad_token_id,
    )
    draft = LlamaForCausalLM(shape).to(target.device)  # type: ignore[arg-type]
    draft.generation_config = GenerationConfig.from_model_config(shape)
    assert isinstance(draft, PreTrainedModel)
    return draft


def _check_width(name: str, draft: PreTrainedModel, expected: int) -> None:
    found = draft.config.get_text_config(decoder=True).vocab_size
    if found != expected:
        raise VocabularyMismatchError(
            f"init={name!r}: expected a model of the target's {expected} tokens, found {found}; "
            "choose a model with the target's tokenizer"
        )
