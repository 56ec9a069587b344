"""Training of heads that draft blocks: after sampled anchors of whole documents, in one forward.

DFlash (Chen, Liang and Liu, arXiv:2602.06036). A block is [the document's token at its anchor,
mask, mask, ...]. As in drafting, it attends to the target's states of the tokens before the anchor
and to itself. The loss weight of a position is ``ttt_step_loss_decay`` times that of the position
before it. SpecForge's recipes for blocks of 16 have exp(-1 / 7), its code and speculators' a weight
of exp(-depth / gamma).

DSpark (DeepSeek's DeepSpec, and speculators). The Markov head gets the document's token before each
position: the token that the verifier has if it accepts the draft so far. The confidence head learns
the probability that rejection sampling accepts the token of a position, by binary cross-entropy
with the weights of the loss.

P-EAGLE (speculators). A block is the EAGLE-3 head's output at its anchor and at the mask tokens
after it. These attend to the text up to the anchor and to the masks before them. The outputs over
the text are computed anyway: so the first token is trained at all positions, and further ones after
anchors. speculators draws fewer positions for each further depth instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.block.layout import TRAINED_KINDS, BlockLayout
from guided_spec.models.heads.block.model import BlockHead, BlockIndex, Sight
from guided_spec.models.heads.block.transitions import MarkovHead, MarkovShape
from guided_spec.models.heads.draft_head import MASK, DraftVocabulary
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.ops.attention.slot_attention import Window
from guided_spec.training.algorithm import TargetStates, TrainingBatch, TrainingOutput
from guided_spec.training.algorithms.heads import (
    HeadTraining,
    eagle3_layout,
    head_masks,
    head_shape,
    make_trainable,
    shift,
    trained_drafts,
    unroll_mask,
)
from guided_spec.training.algorithms.options import DFlashConfig, DSparkConfig, PEagleConfig
from guided_spec.training.objective import (
    Confidence,
    DraftScorer,
    DraftStates,
    Objective,
    measure,
)
from guided_spec.training.pictures import as_read_by
from guided_spec.training.rows import Positions, pick_rows
from guided_spec.training.target_rows import TargetRows
from guided_spec.types import require_int


class BlockTraining(HeadTraining):
    """A ``HeadTraining`` by anchors; see ``drafts``. Its options have ``anchors``."""

    reduced_vocabulary = True

    def forward(
        self, batch: TrainingBatch, states: TargetStates, *, objective: Objective
    ) -> TrainingOutput:
        """Draft after anchors of the batch and measure it; only rows of responses are scored."""
        batch = as_read_by(self.head, batch)
        targets = TargetRows.build(batch, states, self._target.head, self.head.vocabulary)
        positions = targets.at_depth(0) >= 0
        anchors = Anchors.choose(batch, positions, self._config.anchors, self._seed)
        features, width = states.aux.flatten(-2), len(objective.weights)
        drafts = self.drafts(anchors, targets, features, width)
        return measure(drafts, self.scorer(), batch, targets, objective)

    def drafts(
        self, anchors: Anchors, targets: TargetRows, states: Tensor, width: int
    ) -> Iterator[DraftStates]:
        """What ``scorer`` scores, at ``width`` depths; states: [B, T, layers * H_target]."""
        outputs = self.head.train_blocks(
            *(anchors.tokens, anchors.starts, width, states),
            recompute=self._config.gradient_checkpointing,
        )
        for depth, output in enumerate(outputs.unbind(2)):
            yield anchors.pick(output, targets, depth)

    def scorer(self) -> DraftScorer:
        """How drafts are scored."""
        return DraftScorer.of(self.head.logits, self.head, self.head.layers)

    @property
    def _seed(self) -> int:
        """Another after each step of training, and the same again where a run resumes there.

        So it is a sum over the bits of some weights. While validating it is always the same.
        """
        if not self.training:
            return 0
        bits: Tensor = self.head.norm.weight.detach().view(torch.int32)
        return int(bits.sum(dtype=torch.int64))


class DFlashTraining(BlockTraining):
    """See ``DraftAlgorithm``; made by ``from_training_args``."""

    config_class = DFlashConfig

    @classmethod
    def make_head(
        cls, config: DFlashConfig, target: PreTrainedModel, vocabulary: DraftVocabulary | None
    ) -> BlockHead:
        """A fresh head, or the one of ``init``, whose own draft vocabulary then counts."""
        return _make_block(config, target, vocabulary, None)

    @property
    def layouts(self) -> tuple[str, ...]:
        """Checkpoint formats; z-lab's cannot hold an output head."""
        return ("zlab", "speculators") if self.head.lm_head is None else ("speculators",)


class DSparkTraining(BlockTraining):
    """See ``DraftAlgorithm``; made by ``from_training_args``.

    What is scored are outputs with what w1 makes of the tokens before them, [n, H + rank].
    """

    config_class = DSparkConfig

    @classmethod
    def make_head(
        cls, config: DSparkConfig, target: PreTrainedModel, vocabulary: DraftVocabulary | None
    ) -> BlockHead:
        """A fresh head, or the one of ``init``, whose own draft vocabulary then counts."""
        if not config.confidence_weight >= 0:
            raise ConfigError("confidence_weight", config.confidence_weight, "must be at least 0")
        markov = MarkovShape(config.markov_rank, config.markov_head_type)
        head = _make_block(config, target, vocabulary, markov)
        if head.confidence_head is not None and not config.confidence_weight:
            head.confidence_head.requires_grad_(requires_grad=False)
        return head

    @property
    def layouts(self) -> tuple[str, ...]:
        """Checkpoint formats; DeepSeek's scores all tokens, and a block's first position too."""
        is_own = self.head.vocabulary is None and self.head.layout.from_anchor
        return ("speculators", "deepseek") if is_own else ("speculators",)

    def drafts(
        self, anchors: Anchors, targets: TargetRows, states: Tensor, width: int
    ) -> Iterator[DraftStates]:
        """Outputs joined with w1 of the document's token before them, [n, H + rank] a depth."""
        drafts = super().drafts(anchors, targets, states, width)
        for depth, (positions, hidden) in enumerate(drafts):
            embedded = self._markov.markov_w1(positions.read(shift(anchors.token_ids, 1 + depth)))
            yield DraftStates(positions, torch.cat([hidden, embedded.to(hidden.dtype)], -1))

    def scorer(self) -> DraftScorer:
        """How drafts are scored."""
        head, weight = self.head, self._config.confidence_weight
        confidence = None
        if head.confidence_head is not None and weight > 0:
            confidence = Confidence(head.confidence_head, weight)
        return DraftScorer.of(self._logits, head, head.layers, confidence)

    def _logits(self, joined: Tensor) -> Tensor:
        hidden, embedded = joined.tensor_split([self.head.hidden_size], -1)
        scores: Tensor = self.head.logits(hidden)
        return scores + self._markov.bias(hidden, embedded)

    @property
    def _markov(self) -> MarkovHead:
        markov: MarkovHead = self.head.markov_head
        return markov


class PEagleTraining(BlockTraining):
    """See ``DraftAlgorithm``; made by ``from_training_args``."""

    config_class = PEagleConfig

    @classmethod
    def make_head(
        cls, config: PEagleConfig, target: PreTrainedModel, vocabulary: DraftVocabulary | None
    ) -> Eagle3Head:
        """A fresh head, or the one of ``init``, whose own draft vocabulary then counts."""
        require_int("anchors", config.anchors, low=1)
        if config.init is None:
            layout = eagle3_layout(config, target, vocabulary).with_masks(config.mask_token_id)
            return Eagle3Head.fresh(target, vocabulary=vocabulary, layout=layout)
        head = Eagle3Head.from_checkpoint(Checkpoint.open(config.init, argument="init"), target)
        if head.mask_hidden is None:
            found = f"expected a P-EAGLE head, found one without {MASK}; pass another"
            raise ModelError(f"init={config.init!r}: {found}")
        return make_trainable(head)

    def drafts(
        self, anchors: Anchors, targets: TargetRows, states: Tensor, width: int
    ) -> Iterator[DraftStates]:
        """Outputs [n, H] a depth: at all trained positions for the first, then after anchors."""
        read, masked = read_and_mask(
            *(self.head, anchors.token_ids, anchors.starts, width, states),
            recompute=self._config.gradient_checkpointing,
        )
        yield trained_drafts(read, targets.positions(0))
        for depth, output in enumerate(masked.unbind(2), 1):
            yield anchors.pick(output, targets, depth)


class MaskedOutputs(NamedTuple):
    """Outputs of a P-EAGLE head: read [B, T, H], of the text; masked [B, A, W - 1, H]."""

    read: Tensor
    masked: Tensor


def read_and_mask(
    head: Eagle3Head,
    token_ids: Tensor,
    starts: Tensor,
    width: int,
    states: Tensor,
    *,
    recompute: bool = False,
) -> MaskedOutputs:
    """One forward over whole texts, and over the masks after A positions of each.

    token_ids: int64 [B, T]. starts: int64 [B, A], where the masks begin: each block sees its text
    up to there and itself, causally. states: [B, T, len(aux_hidden_layers) * H_target]. recompute:
    run each layer again in the backward pass; only its input is kept until then.
    """
    assert head.mask_hidden is not None
    assert head.layout.mask_token_id is not None
    length, index = token_ids.shape[1], BlockIndex.of(starts, width - 1)
    masks = torch.full_like(index.position, head.layout.mask_token_id)
    unknown = head.features(head.mask_hidden).expand(*masks.shape, -1)
    text = torch.arange(length, device=starts.device)

    def see(window: int | None) -> Tensor:
        read = unroll_mask(length, 0, window=window, device=starts.device)
        read = functional.pad(read, (0, masks.shape[1])).expand(len(starts), 1, -1, -1)
        sight = Sight(is_causal=True, window=None if window is None else Window(window))
        return torch.cat([read, index.visible(sight, length)], 2)

    hidden = torch.cat([head.features(states), unknown], 1)
    outputs = head.run_layers(
        torch.cat([shift(token_ids, 1), masks], 1),
        hidden,
        torch.cat([text.expand(len(starts), -1), index.position], 1),
        head_masks(head.config, see, hidden),
        recompute=recompute,
    )
    read, masked = outputs.tensor_split([length], 1)
    return MaskedOutputs(read, masked.unflatten(1, (starts.shape[1], width - 1)))


def _make_block(
    config: DFlashConfig,
    target: PreTrainedModel,
    vocabulary: DraftVocabulary | None,
    markov: MarkovShape | None,
) -> BlockHead:
    """markov: of a fresh head. A head of ``init`` has one of its own exactly where this is one."""
    require_int("anchors", config.anchors, low=1)
    if config.init is not None:
        head = BlockHead.from_checkpoint(Checkpoint.open(config.init, argument="init"), target)
        _check_kind(head, config, markov)
        return make_trainable(head)
    layout = BlockLayout.fresh(
        target,
        head_shape(config),
        width=config.ttt_steps,
        aux_hidden_layers=config.aux_layers,
        mask_token_id=config.mask_token_id,
        draft_vocab_size=None if vocabulary is None else len(vocabulary),
    )
    if isinstance(config, DSparkConfig) and markov is not None:
        layout = layout.with_markov(markov, confidence=config.confidence_weight > 0)
    return BlockHead.fresh(target, vocabulary=vocabulary, layout=layout)


def _check_kind(head: BlockHead, config: DFlashConfig, markov: MarkovShape | None) -> None:
    layout, kind = head.layout, "DFlash" if markov is None else "DSpark"
    is_other = (layout.markov is None) != (markov is None)
    others = (layout.selector, layout.conv, layout.prefix, layout.lattice)
    has_other_parts = any(part is not None for part in others)
    is_recurrent = layout.markov is not None and layout.markov.kind not in TRAINED_KINDS
    if is_other or has_other_parts or is_recurrent:
        raise ModelError(
            f"init={config.init!r}: expected a {kind} head, found one of another kind; pass another"
        )
    if config.ttt_steps > layout.width:
        fix = f"must be at most {layout.width}, the tokens of a block of init={config.init!r}"
        raise ConfigError("ttt_steps", config.ttt_steps, fix)


class Anchors(NamedTuple):
    """Positions of B documents after which blocks begin, A of each at most.

    token_ids: int64 [B, T], the documents. chosen: bool [B, T], true at p if token p + 1 is a
    block's first. slot: int64 [B, T], which block of its document that is. tokens, starts: int64
    [B, A], those tokens and their positions; arbitrary after a document's last one.
    """

    token_ids: Tensor
    chosen: Tensor
    slot: Tensor
    tokens: Tensor
    starts: Tensor

    @classmethod
    def choose(cls, batch: TrainingBatch, positions: Tensor, most: int, seed: int) -> Anchors:
        """Draw up to ``most`` of the true ``positions`` bool [B, T] of each document."""
        dice = torch.Generator().manual_seed(_mix(seed, batch.indices.tolist()))
        keys = torch.rand(positions.shape, generator=dice).to(positions.device)
        order = keys.masked_fill(~positions, -1.0).argsort(1, descending=True)
        found = order[:, :most]
        chosen = torch.zeros_like(positions).scatter(1, found, value=True) & positions
        slot = chosen.cumsum(1) - 1
        rows, at = chosen.nonzero(as_tuple=True)
        width = max(1, int(chosen.sum(1).max()))
        starts = batch.token_ids.new_zeros(len(positions), width)
        starts[rows, slot[rows, at]] = at + 1
        return cls(batch.token_ids, chosen, slot, batch.token_ids.gather(1, starts), starts)

    def pick(self, output: Tensor, targets: TargetRows, depth: int) -> DraftStates:
        """The trained ones of the blocks' outputs [B, A, H] at a depth: [n, H]."""
        positions = Positions.of(self.chosen & (targets.at_depth(depth) >= 0))
        rows = positions.at // self.slot.shape[1]
        at = rows * output.shape[1] + positions.read(self.slot)
        return DraftStates(positions, pick_rows(output.flatten(0, 1), at))


def _mix(seed: int, indices: list[int]) -> int:
    for index in indices:
        seed = (seed * 1_000_003 + index + 1) % 2**63
    return seed % 2**63
