"""The target's distributions at the places of a batch that are trained on.

They are the same at every depth of an unroll, so that they are made once a batch: one row a token
of an answer.

From the target's last hidden states to its logits: final norm, output head, and behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.target import capture_hidden
from guided_spec.ops.bitmask import translate_bitmask, unpack_bitmask
from guided_spec.training.algorithm import TargetStates, TrainingBatch

__all__ = [
    "TargetHead",
    "TargetRows",
    "forbid",
]

TOLERANCE = 0.02  # relative to the largest logit: rounding of half precision, not a forgotten step


class TargetHead:
    """Not a module, so that a draft that keeps one does not own the target's parameters.

    Knows what models do behind their output head: a factor (Cohere), a divisor (Granite), soft
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
        states: Tensor = self._norm(last)
        return states

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [..., V] of what ``normed`` returned, in the target's dtype."""
        scores: Tensor = self._head(normed)
        if self._factor is not None:
            scores = scores * self._factor
        if self._divisor is not None:
            scores = scores / self._divisor
        if self._cap is not None:
            scores = torch.tanh(scores / self._cap) * self._cap
        return scores


@torch.no_grad()
def _check(head: TargetHead, model: Any) -> None:
    decoder = model.get_decoder()
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    with capture_hidden(decoder, [len(decoder.layers)]) as captured:
        expected = model(input_ids=token, use_cache=False).logits.float()
    found = head.logits(head.normed(captured[0])).float()
    if (found - expected).abs().max() > TOLERANCE * expected.abs().max():
        raise ModelError(
            f"model_type={model.config.model_type!r}: it changes its logits behind the output head "
            "in a way that is not known here; this target cannot be trained for"
        )


PIECE = 2048  # rows at a time


@dataclass(frozen=True)
class TargetRows:
    """N rows, one a token of an answer; D draft tokens.

    index: int64 [B, T], the row of the token at a place; -1 where it is not trained on.
    logits: float32 [N, D], the target's, of the draft's tokens, legal or not.
    total: float32 [N], the log of the sum of the exponentials of all V logits that are legal.
    top: int64 [N], the target's likeliest legal token, as a target id.
    token: int64 [N], the document's own token, as a draft id; -1 where the draft does not know it.
    legal: bool [N, D], the draft's tokens that the grammar allows; None where it forbids nothing.
    target_ids: int64 [D], the target id of each draft token; None where they are the same.
    """

    index: Tensor
    logits: Tensor
    total: Tensor
    top: Tensor
    token: Tensor
    legal: Tensor | None
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
        """The rows of ``batch.loss_mask``; the token at place a is predicted from place a - 1."""
        places = batch.loss_mask.clone()
        places[:, 0] = False
        index = places.flatten().cumsum(0).view_as(places) - 1
        before = places.roll(-1, 1)  # nothing stands at place 0, so nothing wraps around
        token, target_ids = batch.token_ids[places], None
        if vocabulary is not None:
            target_ids = vocabulary.target_ids.to(token.device)
            token = vocabulary.columns.to(token.device, torch.int64)[token]
        # A piece at a time: V columns of all rows at once would not fit a device.
        last, masks = states.last[before], batch.mask_rows[places]
        bitmask = None if len(batch.bitmask) == 1 else batch.bitmask  # one row forbids nothing
        pieces = [
            _score(head, last[rows], None if bitmask is None else bitmask[masks[rows]], target_ids)
            for rows in torch.arange(len(last), device=last.device).split(PIECE)
        ]
        logits, total, top = (torch.cat([piece[part] for piece in pieces]) for part in range(3))
        legal = None
        if bitmask is not None:
            known = bitmask if target_ids is None else translate_bitmask(bitmask, target_ids)
            legal = unpack_bitmask(known, logits.shape[-1])[masks]
        return cls(index.where(places, -1), logits, total, top, token, legal, target_ids)

    def at_depth(self, depth: int) -> Tensor:
        """int64 [B, T]: at place p the row of token p + 2 + depth; -1 where there is none."""
        shifted = torch.full_like(self.index, -1)
        offset = 2 + depth
        if offset < self.index.shape[1]:
            shifted[:, :-offset] = self.index[:, offset:]
        return shifted


def forbid(logits: Tensor, legal: Tensor | None) -> Tensor:
    """Float logits [n, D] with the least finite number at tokens that are not ``legal``.

    Finite, because softmax and its gradient are NaN where a row has -inf against -inf.
    """
    if legal is None:
        return logits
    return logits.masked_fill(~legal, torch.finfo(logits.dtype).min)


class _Scores(NamedTuple):
    """Of n rows: logits float32 [n, D], total [n], top [n]; see ``TargetRows``."""

    logits: Tensor
    total: Tensor
    top: Tensor


def _score(
    head: TargetHead, last: Tensor, bitmask: Tensor | None, target_ids: Tensor | None
) -> _Scores:
    """last: [n, H_target]. bitmask: int32 [n, W]; None forbids nothing."""
    logits = head.logits(head.normed(last)).float()
    legal = None if bitmask is None else unpack_bitmask(bitmask, logits.shape[-1])
    allowed = forbid(logits, legal)
    kept = logits if target_ids is None else logits[:, target_ids]
    return _Scores(kept, allowed.logsumexp(-1), allowed.argmax(-1))
