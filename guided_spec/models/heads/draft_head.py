"""What a learned draft head has to be: a module that maps (next token, hidden state) to the next.

Every head follows one rule: position p pairs the target's hidden state of token p with the
embedding of token p + 1, and its output predicts token p + 2.

A head may have a smaller vocabulary of its own: EAGLE-3 heads score only the D most frequent of the
target's V tokens. Their checkpoints hold ``d2t`` int64 [D], offsets: draft id i is target id
``i + d2t[i]`` (SafeAILab/EAGLE, SpecForge and speculators all store it so).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, ClassVar, Protocol, Self, TypedDict, Unpack

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.config import start_head
from guided_spec.models.heads.weights import fill_head, match_biases, read_tensors
from guided_spec.models.linear_layer import product
from guided_spec.models.pictures.embedding import seeing
from guided_spec.models.target import TargetEnds

MASK = "mask_hidden"  # P-EAGLE's, for a state that is not known; stored in any shape


class DraftVocabulary:
    """Which target token each draft token is.

    target_ids: int64 [D], on the device of the head; distinct ids below ``target_size``.
    columns: int32 [V], the inverse: which draft token each target token is, -1 for none.
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
                f"{source}: d2t: expected int64 [{draft_size}], found {found}; a head "
                f"with {draft_size} of {text_config.vocab_size} tokens has to say which ones"
            )
        return cls.from_offsets(offsets.to(target.device), text_config.vocab_size, source)

    def to(self, device: torch.device) -> DraftVocabulary:
        """The same vocabulary on ``device``."""
        return DraftVocabulary(self.target_ids.to(device), self.target_size)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors of a checkpoint, on its device: ``d2t``, see the module's docstring, and ``t2d``,
        bool [V], which target tokens are scored."""
        target_ids = self.target_ids
        scored = torch.zeros(self.target_size, dtype=torch.bool, device=target_ids.device)
        scored[target_ids] = True
        offsets = target_ids - torch.arange(len(self), device=target_ids.device)
        return {"d2t": offsets, "t2d": scored}

    def __len__(self) -> int:
        return len(self.target_ids)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids int64 [...] to target ids."""
        return self.target_ids[draft_ids]


class HeadArguments(TypedDict):
    """The positions of a head's pass in a text.

    module: which of the modules runs. position_ids: int64 [B, T]. attention_mask: what
    ``MaskBuilder`` makes. cache: a ``SlotCache`` after ``begin``; layer i of ``config`` is its
    layer i.
    """

    module: int
    position_ids: Tensor
    attention_mask: Any
    cache: Any


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
        self, token_ids: Tensor, hidden: Tensor, **arguments: Unpack[HeadArguments]
    ) -> Tensor:
        """One pass: tokens int64 [B, T] and hidden [B, T, H] to the recycled hidden [B, T, H].

        token_ids: the tokens after the positions, in target-vocabulary ids. hidden: what
        ``features`` gave for these positions, or what an earlier pass returned.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Recycled hidden states [..., H] to draft logits [..., D]."""
        ...


def layer_run(layer: nn.Module, *, recompute: bool) -> Callable[..., Tensor]:
    """How to call a layer. recompute: keep only what goes in, and run it again when gradients of
    it are asked for; it must not change a cache.
    """
    return partial(checkpoint, layer, use_reentrant=False) if recompute else layer


def product_input(states: Tensor, weight: Tensor) -> Tensor:
    """``states`` in the dtype of ``weight``; as they are where they have that of autocast."""
    kind = states.device.type
    if torch.is_autocast_enabled(kind) and states.dtype == torch.get_autocast_dtype(kind):
        return states
    return states.to(weight.dtype)


class LayoutHead(nn.Module):
    """A ``DraftHead`` that its config.json describes; made by ``from_checkpoint`` or ``fresh``.

    layout: ``config``, ``aux_hidden_layers``, ``draft_vocab_size``, and what else a subclass wants.
    names: the tensors of the checkpoint; an embedding, and an output head, that are not among them
    are the target's where the sizes allow it, and no parameters. Biases exist where there are
    tensors for them: what configurations say about them cannot be relied on. vocabulary: None where
    it is the target's.

    The parameters are on torch's current default device, with weights not yet set.

    layout_class: its ``read`` makes the layout of a config.json and its tensors, for a target,
    from a source to be named in errors. ignored: how the names of tensors begin that
    checkpoints hold for training or for other runtimes. trains_output: whether a fresh head has an
    output head of its own though its vocabulary is the target's. fresh_biases: what a fresh head
    has of biases.
    """

    layout_class: ClassVar[Any]
    ignored: ClassVar[tuple[str, ...]] = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")
    trains_output: ClassVar[bool] = False
    fresh_biases: ClassVar[tuple[str, ...]] = ()
    num_modules = 1

    def __init__(
        self,
        layout: Any,
        names: Collection[str],
        vocabulary: DraftVocabulary | None,
        target: PreTrainedModel,
    ) -> None:
        super().__init__()
        config: Any = layout.config
        self.layout, self.config, self.vocabulary = layout, config, vocabulary
        self.hidden_size: int = config.hidden_size
        self.aux_hidden_layers: tuple[int, ...] = layout.aux_hidden_layers
        self._target = TargetEnds(target)
        text_config: Any = target.config.get_text_config(decoder=True)
        fits = text_config.hidden_size == self.hidden_size
        self.embed_tokens: nn.Embedding | None = None
        if "embed_tokens.weight" in names or not fits:
            self.embed_tokens = nn.Embedding(config.vocab_size, self.hidden_size)
        self.lm_head: nn.Linear | None = None
        if "lm_head.weight" in names or not fits or vocabulary is not None:
            self.lm_head = nn.Linear(self.hidden_size, layout.draft_vocab_size)
        rotary_class = self._build()
        match_biases(self, names)
        with torch.device(target.device):
            self.rotary_emb: nn.Module = rotary_class(config)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, target: PreTrainedModel) -> Self:
        """Load a head on the target's device and in its dtype, for inference.

        The target is not changed; its embedding and output head are used as they are where the
        checkpoint has no other. Raises ModelError, listing what was expected and what was found,
        for a checkpoint of another kind of head or for another target.
        """
        source = checkpoint.source
        kept = [name for name in sorted(checkpoint.names) if not name.startswith(cls.ignored)]
        read = read_tensors(checkpoint, {name: cls._own_name(name) for name in kept}, target.dtype)
        shaped = {name: cls._own_shape(name, tensor) for name, tensor in read.items()}
        tensors = TargetEnds(target).without_copies(shaped, output=not cls.trains_output)
        layout = cls.layout_class.read(checkpoint.config, tensors, target, source)
        offsets = tensors.pop("d2t", None)
        vocabulary = DraftVocabulary.of_checkpoint(offsets, layout.draft_vocab_size, target, source)
        head = fill_head(lambda: cls(layout, tensors, vocabulary, target), tensors, target, source)
        if head.embed_tokens is not None:
            head.embed_tokens = seeing(head.embed_tokens, target)
        return head

    @classmethod
    def fresh(
        cls, target: PreTrainedModel, *, vocabulary: DraftVocabulary | None = None, layout: Any
    ) -> Self:
        """A new head to be trained, on the target's device, in float32 and in train mode.

        vocabulary: which target tokens it scores; None is all. Its output head, if it has one,
        starts as the target's rows of these tokens; the embedding is the target's, and no
        parameter. There are no biases but ``fresh_biases``. Other weights are ``start_head``'s.
        """
        names = (*cls.fresh_biases, *(("lm_head.weight",) if cls.trains_output else ()))
        known = None if vocabulary is None else vocabulary.to(target.device)
        std = layout.config.initializer_range
        head = start_head(lambda: cls(layout, names, known, target), target, std)
        ids = None if known is None else known.target_ids
        if head.lm_head is not None:
            rows = head._target.output_rows(ids, head.hidden_size)
            if rows is not None:
                head.lm_head.weight.data.copy_(rows)
        return head

    @classmethod
    def _own_name(cls, name: str) -> str:
        return name

    @classmethod
    def _own_shape(cls, name: str, tensor: Tensor) -> Tensor:
        return tensor.flatten() if name == MASK else tensor

    def _build(self) -> Any:
        """Make all modules but the ends; returns the class of the rotary embedding."""
        raise NotImplementedError

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids int64 [...] to [..., H]."""
        embed: Any = self._target.embed if self.embed_tokens is None else self.embed_tokens
        embedded: Tensor = embed(token_ids)
        return embedded

    def score(self, normed: Tensor) -> Tensor:
        """Outputs of the last norm, [..., H], to logits [..., D]."""
        if self.lm_head is None:
            return self._target.logits(normed)
        return product(self.lm_head, normed)
