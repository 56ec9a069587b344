"""Training of draft heads that draft token by token: EAGLE, EAGLE-3 and multi-token prediction.

A head is run over whole documents as it will run when it drafts: training-time test.

EAGLE-3 (arXiv:2503.01840, section 3.2). At depth s and position p the head reads token p + 1 + s of
the document and its own output of the depth before. It attends to the keys that drafting would find
in the cache: those of the target's states up to p, and its own of position p at depths 1 to s. With
several modules (DeepSeek-V3's report, section 2.2) module s runs at depth s, over keys of its own;
the last one is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache, PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.config import HeadShape
from guided_spec.models.heads.draft_head import DraftHead, DraftVocabulary, LayoutHead
from guided_spec.models.heads.eagle import (
    NORM_FLAGS,
    Eagle3Head,
    Eagle3Layout,
    EagleHead,
    EagleLayout,
)
from guided_spec.models.heads.export import head_layouts, save_head
from guided_spec.models.heads.mtp import MtpHead, QwenMtpHead
from guided_spec.models.pictures.embedding import PictureEmbedding
from guided_spec.models.target import implementing
from guided_spec.training.algorithm import (
    TargetStates,
    TrainerKwargs,
    TrainingBatch,
    TrainingOutput,
)
from guided_spec.training.algorithms.options import (
    Eagle3Config,
    EagleConfig,
    LossOptions,
    MtpConfig,
    ShapeOptions,
)
from guided_spec.training.objective import DraftScorer, DraftStates, Objective, measure
from guided_spec.training.pictures import as_read_by
from guided_spec.training.rows import Positions, pick_rows
from guided_spec.training.target_rows import TargetHead, TargetRows
from guided_spec.training.unroll_attention import UNROLLED, has_kernel


def unroll(
    head: DraftHead,
    token_ids: Tensor,
    states: Tensor,
    steps: int,
    *,
    axes: Tensor | None = None,
    recompute: bool = False,
) -> Iterator[Tensor]:
    """The head's hidden states [B, T, H] at the depths 0 to ``steps - 1``, with gradient.

    token_ids: int64 [B, T], padded on the right. states: [B, T, len(aux_hidden_layers) * H_target],
    what the head's ``features`` takes. State p scores token p + 2 + depth; it is arbitrary where
    the document has no such token. axes: int64 [3, B, T], the positions of a document with
    pictures, where they have three; None: as a text has them. recompute: run each depth again in
    the backward pass; only its states, keys and values are kept until then.
    """
    length = token_ids.shape[1]
    positions = torch.arange(length, device=token_ids.device).unsqueeze(0)
    hidden = head.features(states)
    cache = DynamicCache()
    kept: list[Tensor] = []
    for depth in range(steps):
        module = min(depth, head.num_modules - 1)
        repeats = depth - module

        run_depth = partial(
            _run_depth,
            head,
            shift(token_ids, 1 + depth),
            module=module,
            position_ids=positions + repeats if axes is None else _moved(axes, repeats),
            attention_mask=_depth_mask(head, hidden, length, repeats),
        )
        if recompute:
            again = partial(_run_again, run_depth)
            hidden, *kept = checkpoint(again, hidden, *kept, use_reentrant=False)
        else:
            hidden = run_depth(hidden=hidden, cache=cache)
        yield hidden


def _moved(axes: Tensor, repeats: int) -> Tensor:
    """int64 [3, B, T]: entry p is the position of token ``p + repeats``; text follows the end."""
    after = axes[:, :, -1:] + torch.arange(1, repeats + 1, device=axes.device)
    return torch.cat([axes[:, :, repeats:], after], 2)


def _depth_mask(head: DraftHead, hidden: Tensor, length: int, repeats: int) -> Any:
    """The mask that the head's layers take; None where they need none: ``unroll_attention``."""
    if _attends_unmasked(head, hidden):
        return None

    def see(window: int | None) -> Tensor:
        return unroll_mask(length, repeats, window=window, device=hidden.device)[None, None]

    return head_masks(head.config, see, hidden)


def _attends_unmasked(head: DraftHead, hidden: Tensor) -> bool:
    """Not where layers slide, drop scores, or are the target's, which may do more than attend."""
    config: Any = head.config
    if not isinstance(head, LayoutHead) or config._attn_implementation != "sdpa":
        return False
    is_plain = set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}
    return is_plain and not config.attention_dropout and has_kernel(hidden, config.head_dim)


def _run_depth(head: DraftHead, token_ids: Tensor, **arguments: Any) -> Tensor:
    run: Any = head
    is_masked = arguments["attention_mask"] is not None
    with nullcontext() if is_masked else implementing(head.config, "attn", UNROLLED):
        hidden: Tensor = run(token_ids, **arguments)
    return hidden


def _run_again(run: Callable[..., Tensor], hidden: Tensor, *kept: Tensor) -> list[Tensor]:
    """The next states; then, as ``kept``, keys and values of each layer of the cache with the new.

    Nothing is changed, so that it may be called twice.
    """
    cache: Any = DynamicCache()
    for layer, (keys, values) in enumerate(zip(kept[::2], kept[1::2], strict=True)):
        cache.update(keys, values, layer)
    found: list[Tensor] = [run(hidden=hidden, cache=cache)]
    for part in cache.layers:
        found += [part.keys, part.values]
    return found


def unroll_mask(
    length: int, repeats: int, *, window: int | None = None, device: Any = None
) -> Tensor:
    """Bool [T, (1 + repeats) * T]: which keys the queries of one depth see.

    The first T keys are those of the target's states, each further T those of one depth of drafting
    (the last: their own). Query p has position p + repeats, from which a sliding ``window`` counts.
    """
    index = torch.arange(length, device=device)
    seen = index[None, :] <= index[:, None]
    if window is not None:
        seen = seen & (index[None, :] > index[:, None] + repeats - window)
    own = torch.eye(length, dtype=torch.bool, device=device)
    further = [
        own if window is None or repeats - depth < window else torch.zeros_like(own)
        for depth in range(1, repeats + 1)
    ]
    return torch.cat([seen, *further], 1)


def head_masks(config: Any, see: Callable[[int | None], Tensor], like: Tensor) -> Any:
    """The mask as the head's layers take it: 4-D, or by layer type where some have a window.

    see: what queries see of the keys, bool [B, 1, Q, K], by the window; None is no window. like:
    has the dtype and the device.
    """
    kinds = set(getattr(config, "layer_types", None) or ()) or {"full_attention"}
    masks = {}
    for kind in sorted(kinds):
        seen = see(config.sliding_window if kind == "sliding_attention" else None)
        if config._attn_implementation == "eager":
            seen = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(
                ~seen, torch.finfo(like.dtype).min
            )
        masks[kind] = seen
    return next(iter(masks.values())) if len(masks) == 1 else masks


def shift(token_ids: Tensor, offset: int) -> Tensor:
    """int64 [B, T]: entry p is token ``p + offset``; 0 after the end of the row."""
    shifted = torch.zeros_like(token_ids)
    if offset < token_ids.shape[1]:
        shifted[:, :-offset] = token_ids[:, offset:]
    return shifted


Head = TypeVar("Head", bound=nn.Module)

FINAL_NORM = -1  # as a hidden layer: the target's last state after its final norm


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


def head_shape(options: ShapeOptions) -> HeadShape:
    """The sizes that a run asks for."""
    return HeadShape(**{name: getattr(options, name) for name in HeadShape._fields})


def make_trainable(head: Head) -> Head:
    """Set a loaded head to float32, train mode and gradients; returns it.

    A table of its own has no rows of pictures in training: see ``as_read_by``.
    """
    if isinstance(head, LayoutHead) and isinstance(head.embed_tokens, PictureEmbedding):
        head.embed_tokens = head.embed_tokens.of_tokens()
    return head.float().train().requires_grad_()


def own_tensors(tensors: Mapping[str, Tensor] | None, prefix: str) -> dict[str, Tensor] | None:
    """The part of a module's state dict below ``prefix``, without it; None stays None."""
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
    *,
    recompute: bool = False,
) -> TrainingOutput:
    """Unroll ``head`` over a batch and measure it; only rows of responses are scored.

    recompute: see ``unroll``.
    """
    targets = TargetRows.build(batch, states, target, head.vocabulary)
    is_last = head.aux_hidden_layers == (FINAL_NORM,)
    features = target.normed(states.last) if is_last else states.aux.flatten(-2)
    module: Any = head
    scorer = DraftScorer.of(head.logits, module, module.layers)
    positions = [targets.positions(depth) for depth in range(len(objective.weights))]
    axes = None if batch.pictures is None else batch.pictures.axes
    settings: dict[str, Any] = {"axes": axes, "recompute": recompute}
    unrolled = unroll(head, batch.token_ids, features, len(positions), **settings)
    drafts = map(trained_drafts, unrolled, positions)
    return measure(drafts, scorer, batch, targets, objective)


def trained_drafts(hidden: Tensor, positions: Positions) -> DraftStates:
    """The trained ones of states [B, A, H]: [n, H]."""
    return DraftStates(positions, pick_rows(hidden.flatten(0, 1), positions.at))


class HeadTraining(nn.Module):
    """A ``DraftAlgorithm`` but for what tells draft heads apart: options, and how one is made.

    A subclass sets ``config_class``, of ``HeadOptions``, and ``reduced_vocabulary`` where its heads
    may have one, and defines ``make_head``. head: in float32, with gradients; a module and a
    ``DraftHead``.
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
        """A module with the head that ``options``, the fields of ``config_class``, describe."""
        del verifier_config
        config = cls.config_class(**options)
        head = cls.make_head(config, target, vocabulary)
        return cls(head, FrozenTarget.of(target), config)

    @property
    def layouts(self) -> tuple[str, ...]:
        """The checkpoint formats that can hold this head, the default first."""
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
        """Unroll the head over one batch; returns its loss and metrics, see ``forward_head``."""
        recompute: bool = self._config.gradient_checkpointing
        head, batch = self._target.head, as_read_by(self.head, batch)
        return forward_head(self.head, head, batch, states, objective, recompute=recompute)

    def export(
        self, folder: Path, *, layout: str, tensors: Mapping[str, Tensor] | None = None
    ) -> None:
        """Write the head to ``folder`` as a checkpoint of ``layout``; see ``save_head``."""
        save_head(
            self.head,
            folder,
            layout=layout,
            target=self._target.model,
            tensors=own_tensors(tensors, "head."),
            speculative_tokens=self._config.ttt_steps,
        )


class EagleTraining(HeadTraining):
    """EAGLE, arXiv:2401.15077, by EAGLE-3's training-time test.

    The paper regresses the target's next hidden state; drafting needs the distribution only, and
    the unroll trains the head on its own states, which the regression was there for.
    """

    config_class = EagleConfig

    @classmethod
    def make_head(
        cls, config: EagleConfig, target: PreTrainedModel, vocabulary: DraftVocabulary | None
    ) -> EagleHead:
        """A fresh head, or the one of ``init``; ``vocabulary`` has to be None."""
        del vocabulary
        if config.init is not None:
            return make_trainable(
                EagleHead.from_checkpoint(Checkpoint.open(config.init, argument="init"), target)
            )
        layout = EagleLayout.fresh(target, HeadShape(num_layers=config.num_layers))
        return EagleHead.fresh(target, layout=layout)


def eagle3_layout(
    config: Eagle3Config, target: PreTrainedModel, vocabulary: DraftVocabulary | None
) -> Eagle3Layout:
    """The layout of the fresh head that a run asks for."""
    return Eagle3Layout.fresh(
        target,
        head_shape(config),
        config.layer_type,
        config.aux_layers,
        None if vocabulary is None else len(vocabulary),
        **{name: getattr(config, name) for name in NORM_FLAGS},
    )


class Eagle3Training(HeadTraining):
    """EAGLE-3: training-time test, arXiv:2503.01840."""

    config_class = Eagle3Config
    reduced_vocabulary = True

    @classmethod
    def make_head(
        cls, config: Eagle3Config, target: PreTrainedModel, vocabulary: DraftVocabulary | None
    ) -> Eagle3Head:
        """A fresh head, or the one of ``init``, whose own draft vocabulary then counts."""
        if config.init is not None:
            return make_trainable(
                Eagle3Head.from_checkpoint(Checkpoint.open(config.init, argument="init"), target)
            )
        layout = eagle3_layout(config, target, vocabulary)
        return Eagle3Head.fresh(target, vocabulary=vocabulary, layout=layout)


# Targets by model_type whose own modules use DeepSeek's equations.
DEEPSEEK = ("deepseek_v3", "deepseek_v32", "glm4_moe")


class MtpTraining(HeadTraining):
    """Multi-token prediction modules, DeepSeek-V3's report, section 2.2.

    A single module is repeated when it drafts, and trained so: FastMTP, arXiv:2509.18362. Its
    attention follows what drafting leaves in the cache, as EAGLE-3's training-time test does.
    """

    config_class = MtpConfig

    @classmethod
    def make_head(
        cls, config: MtpConfig, target: PreTrainedModel, vocabulary: DraftVocabulary | None
    ) -> MtpHead | QwenMtpHead:
        """Fresh modules, or those of ``init``; ``vocabulary`` has to be None."""
        del vocabulary
        is_deepseek = config.form == "deepseek"
        if config.form == "auto":
            is_deepseek = target.config.model_type in DEEPSEEK
        kind = MtpHead if is_deepseek else QwenMtpHead
        if config.init is None:
            return kind.fresh(target, config.num_modules, initialize=config.initialize)
        source = source_of(target) if config.init == "target" else config.init
        return make_trainable(kind.from_checkpoint(Checkpoint.open(source), target))
