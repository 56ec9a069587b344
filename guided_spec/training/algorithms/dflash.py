"""Training of DFlash heads: blocks behind sampled anchors of whole documents, in one forward.

Chen, Liang and Liu, "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv:2602.06036. A
block is [the document's token at its anchor, mask, mask, ...] and sees the target's states of what
stands before the anchor, and itself, as it does when it drafts. The loss of a place weighs
``ttt_step_loss_decay`` of that of the place before; SpecForge's recipes for blocks of 16 have
exp(-1 / 7), its code and speculators' a weight of exp(-depth / gamma).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.block.layout import BlockLayout
from guided_spec.models.heads.block.model import BlockHead
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.training.algorithm import TargetStates, TrainingBatch, TrainingOutput
from guided_spec.training.algorithms.heads import HeadTraining, head_shape, make_trainable
from guided_spec.training.algorithms.options import DFlashConfig
from guided_spec.training.objective import DraftScorer, DraftStates, Objective, measure
from guided_spec.training.registry import register
from guided_spec.training.target_rows import TargetRows
from guided_spec.types import require_int

__all__ = ["DFlashTraining"]


@register("dflash")
class DFlashTraining(HeadTraining):
    """See ``DraftAlgorithm``; made by ``from_training_args``."""

    config_class = DFlashConfig
    reduced_vocabulary = True

    @classmethod
    def make_head(
        cls, config: DFlashConfig, target: PreTrainedModel, vocabulary: DraftVocabulary | None
    ) -> BlockHead:
        """A fresh head, or the one of ``init``, whose own draft vocabulary then counts."""
        require_int("anchors", config.anchors, low=1)
        if config.init is not None:
            head = BlockHead.from_checkpoint(Checkpoint.open(config.init), target)
            _require_plain(head, config)
            return make_trainable(head)
        layout = BlockLayout.fresh(
            target,
            head_shape(config),
            width=config.ttt_steps,
            aux_hidden_layers=config.aux_layers,
            mask_token_id=config.mask_token_id,
            draft_vocab_size=None if vocabulary is None else len(vocabulary),
        )
        return BlockHead.fresh(target, vocabulary=vocabulary, layout=layout)

    @property
    def layouts(self) -> tuple[str, ...]:
        """z-lab's has no place for an output head."""
        return ("zlab", "speculators") if self.head.lm_head is None else ("speculators",)

    def forward(
        self, batch: TrainingBatch, states: TargetStates, *, objective: Objective
    ) -> TrainingOutput:
        """Draft behind anchors of the batch and measure it; only rows of answers are scored."""
        head = self.head
        targets = TargetRows.build(batch, states, self._target.head, head.vocabulary)
        anchors = _Anchors.choose(batch, targets.at_depth(0) >= 0, self._config.anchors, self._seed)
        width = len(objective.weights)
        features = states.aux.flatten(-2)
        outputs = head.train_blocks(anchors.tokens, anchors.starts, width, features)
        scorer = DraftScorer.of(head.logits, head, head.layers)
        return measure(_drafts(outputs, anchors, targets), scorer, batch, targets, objective)

    @property
    def _seed(self) -> int:
        """Another after each step of training, and the same again where a run goes on from there.

        So it is a sum over the bits of some weights. While validating it is always the same.
        """
        if not self.training:
            return 0
        bits: Tensor = self.head.hidden_norm.weight.detach().view(torch.int32)
        return int(bits.sum(dtype=torch.int64))


class _Anchors(NamedTuple):
    """Places of B documents behind which blocks begin, A of each at most.

    chosen: bool [B, T], at p where the token of place p + 1 is a block's first. slot: int64 [B, T],
    which block of its document that is. tokens, starts: int64 [B, A], those tokens and where they
    stand; arbitrary behind a document's last one.
    """

    chosen: Tensor
    slot: Tensor
    tokens: Tensor
    starts: Tensor

    @classmethod
    def choose(cls, batch: TrainingBatch, places: Tensor, most: int, seed: int) -> _Anchors:
        """Up to ``most`` among the true ``places`` bool [B, T] of each document, drawn."""
        dice = torch.Generator().manual_seed(_mix(seed, batch.indices.tolist()))
        keys = torch.rand(places.shape, generator=dice).to(places.device)
        order = keys.masked_fill(~places, -1.0).argsort(1, descending=True)
        found = order[:, :most]
        chosen = torch.zeros_like(places).scatter(1, found, value=True) & places
        slot = chosen.cumsum(1) - 1
        rows, at = chosen.nonzero(as_tuple=True)
        width = max(1, int(chosen.sum(1).max()))
        starts = batch.token_ids.new_zeros(len(places), width)
        starts[rows, slot[rows, at]] = at + 1
        return cls(chosen, slot, batch.token_ids.gather(1, starts), starts)


def _mix(seed: int, indices: list[int]) -> int:
    for index in indices:
        seed = (seed * 1_000_003 + index + 1) % 2**63
    return seed % 2**63


def _drafts(outputs: Tensor, anchors: _Anchors, targets: TargetRows) -> Iterator[DraftStates]:
    for depth in range(outputs.shape[2]):
        places = anchors.chosen & (targets.at_depth(depth) >= 0)
        rows = places.nonzero(as_tuple=True)[0]
        yield DraftStates(places, outputs[rows, anchors.slot[places], depth])


def _require_plain(head: BlockHead, config: DFlashConfig) -> None:
    if head.transition is not None or head.layout.conv is not None:
        raise ModelError(
            f"init={config.init!r}: expected a DFlash head, found one of another kind; pass another"
        )
    if config.ttt_steps > head.layout.width:
        fix = f"must be at most {head.layout.width}, the tokens of a block of init={config.init!r}"
        raise ConfigError("ttt_steps", config.ttt_steps, fix)
