"""The target's distributions at the trained positions of a batch.

They are the same at every depth of an unroll, so that they are made once a batch: one row for each
token of a response.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.loading import has_layers, without_layers
from guided_spec.ops.bitmask import translate_bitmask, unpack_bitmask
from guided_spec.ops.mask_words import BITS
from guided_spec.training.algorithm import TargetStates, TrainingBatch
from guided_spec.training.compiled import compiled_on_cuda
from guided_spec.training.rows import Positions

TOLERANCE = 0.02  # relative to the largest logit: rounding of half precision, not a forgotten step


class TargetHead:
    """Not a module, so that a draft that keeps one does not own the target's parameters.

    Knows what models do after their output head: a factor (Cohere), a divisor (Granite), soft
    capping (Gemma). Runs one token through the target to see that nothing else happens there.

    Raises ModelError when the logits made here are not those of the target's own forward.
    """

    def __init__(self, target: PreTrainedModel) -> None:
        model: Any = target
        config: Any = model.config.get_text_config(decoder=True)
        self._norm: Any = getattr(model.get_decoder(), "norm", None)
        self._head: Any = model.get_output_embeddings()
        self._factor: float | None = getattr(config, "logit_scale", None)
        self._divisor: float | None = getattr(config, "logits_scaling", None)
        self._cap: float | None = getattr(config, "final_logit_softcapping", None)
        if self._norm is None or self._head is None:
            raise ModelError(
                f"model_type={config.model_type!r}: expected a final norm and an output head; "
                "this target cannot be trained for"
            )
        _check(self, model)

    def normed(self, last: Tensor) -> Tensor:
        """What the final norm makes of ``TargetStates.last`` [..., H], in its dtype."""
        return _run(self._norm, last)

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., V] of what ``normed`` returned, in the target's dtype."""
        scores = _run(self._head, normed)
        if self._factor is not None:
            scores = scores * self._factor
        if self._divisor is not None:
            scores = scores / self._divisor
        if self._cap is not None:
            scores = torch.tanh(scores / self._cap) * self._cap
        return scores


def _run(module: nn.Module, states: Tensor) -> Tensor:
    """Where the module is, which a device map decides; the result is where ``states`` are."""
    device = next(module.parameters(), states).device
    found: Tensor = module(states.to(device))
    return found.to(states.device)


@torch.no_grad()
def _check(head: TargetHead, model: Any) -> None:
    """By one token; through no layer of a model that has none: they are not what is checked."""
    decoder, captured = model.get_decoder(), []
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    hook = decoder.norm.register_forward_pre_hook(lambda _, states: captured.append(states[0]))
    with nullcontext() if has_layers(model) else without_layers(decoder):
        expected = model(input_ids=token, use_cache=False).logits.float()
    hook.remove()
    found = head.logits(head.normed(captured[0])).float()
    if (found - expected).abs().max() > TOLERANCE * expected.abs().max():
        raise ModelError(
            f"model_type={model.config.model_type!r}: it changes its logits after the output head "
            "in a way that is not known here; this target cannot be trained for"
        )


@dataclass(frozen=True)
class TargetRows:
    """N rows, one a token of a response; D draft tokens.

    Their scores are V wide, and are made for some rows at a time: ``score``.

    index: int64 [B, T], the row of each token; -1 where it is not trained on.
    last: [N, H_target], the target's last hidden states that predict the tokens.
    masks: int64 [N], the rows of ``bitmask`` that say what is legal.
    token: int64 [N], the document's own token, as a draft id; -1 where the draft does not know it.
    bitmask: int32 [M, ceil(V / 32)], the target's tokens that are legal; None forbids nothing.
    known: int32 [M, ceil(D / 32)], the draft's tokens that are; None with ``bitmask``.
    target_ids: int64 [D], the target id of each draft token; None where they are the same.
    """

    head: TargetHead
    index: Tensor
    last: Tensor
    masks: Tensor
    token: Tensor
    bitmask: Tensor | None
    known: Tensor | None
    target_ids: Tensor | None

    @classmethod
    @torch.no_grad()
    def build(
        cls,
        batch: TrainingBatch,
        states: TargetStates,
        head: TargetHead,
        vocabulary: DraftVocabulary | None,
    ) -> TargetRows:
        """The rows of ``batch.loss_mask``; state a - 1 predicts token a."""
        positions = batch.loss_mask.clone()
        positions[:, 0] = False
        index = positions.flatten().cumsum(0).view_as(positions) - 1
        trained = Positions.of(positions)
        token, target_ids = trained.read(batch.token_ids), None
        if vocabulary is not None:
            target_ids = vocabulary.target_ids.to(token.device)
            token = vocabulary.columns.to(token.device, torch.int64)[token]
        bitmask = None if len(batch.bitmask) == 1 else batch.bitmask  # one row forbids nothing
        known = bitmask
        if bitmask is not None and target_ids is not None:
            known = translate_bitmask(bitmask, target_ids)
        return cls(
            head,
            index.where(positions, -1),
            states.last.flatten(0, 1)[trained.at - 1],  # token 0 is never trained on
            trained.read(batch.mask_rows),
            token,
            bitmask,
            known,
            target_ids,
        )

    def at_depth(self, depth: int) -> Tensor:
        """int64 [B, T]: entry p is the row of token p + 2 + depth; -1 where there is none."""
        shifted = torch.full_like(self.index, -1)
        offset = 2 + depth
        if offset < self.index.shape[1]:
            shifted[:, :-offset] = self.index[:, offset:]
        return shifted

    def positions(self, depth: int) -> Positions:
        """Where ``at_depth`` has a row. Waits for the device."""
        return Positions.of(self.at_depth(depth) >= 0)

    @torch.no_grad()
    def score(self, rows: Tensor) -> TargetScores:
        """The scores of ``rows``, int64 [n]; makes logits [n, V] for them."""
        logits, masks = self.head.logits(self.head.normed(self.last[rows])), self.masks[rows]
        own = (None if words is None else words[masks] for words in (self.bitmask, self.known))
        ids = None if self.target_ids is None else self.target_ids.unsqueeze(0)
        return TargetScores(*_read(logits, ids, *own), self.token[rows])

    def has_legal(self, draft_size: int) -> Tensor:
        """Bool [N]: whether any of the draft's D tokens is legal."""
        if self.known is None:
            return torch.ones_like(self.masks, dtype=torch.bool)
        words = self.known.clone()
        if draft_size % BITS:  # the bits after it are undefined
            words[:, -1] &= (1 << draft_size % BITS) - 1
        return (words != 0).any(-1)[self.masks]


class TargetScores(NamedTuple):
    """The target's scores of n rows.

    logits: [n, D], in the target's dtype, of the draft's tokens, legal or not.
    total: float32 [n], the log of the sum of the exponentials of all V logits that are legal.
    top: int64 [n], the target's likeliest legal token, as a target id.
    legal: bool [n, D], the draft's tokens that the grammar allows; None where it forbids nothing.
    token: int64 [n], the document's own, see ``TargetRows``.
    """

    logits: Tensor
    total: Tensor
    top: Tensor
    legal: Tensor | None
    token: Tensor


@compiled_on_cuda
def _read(
    logits: Tensor, target_ids: Tensor | None, bitmask: Tensor | None, known: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """``TargetScores`` but for the token.

    target_ids: int64 [1, D]. bitmask, known: int32, rows of ``TargetRows``'.
    """
    kept = logits if target_ids is None else logits[:, target_ids[0]]
    scores, legal = logits.float(), None
    if bitmask is not None and known is not None:
        scores = forbid(scores, unpack_bitmask(bitmask, scores.shape[-1]))
        legal = unpack_bitmask(known, kept.shape[-1])
    return kept, _log_sum(scores), scores.argmax(-1), legal


def _log_sum(scores: Tensor) -> Tensor:
    """``logsumexp(-1)`` of finite scores, as softmax has it: compiled it is one pass, not two."""
    highest = scores.amax(-1, keepdim=True)
    total = (scores - highest).exp().sum(-1, keepdim=True)
    return (total.log() + highest).squeeze(-1)


def forbid(logits: Tensor, legal: Tensor | None) -> Tensor:
    """Float logits [n, D] with the least finite number at tokens that are not ``legal``.

    Finite, because softmax and its gradient are NaN where a row has -inf against -inf.
    """
    if legal is None:
        return logits
    return logits.masked_fill(~legal, torch.finfo(logits.dtype).min)
