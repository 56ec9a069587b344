"""What one forward of a block says: the likeliest tokens of each place, and how they follow."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from guided_spec.models.heads.draft_head import DraftVocabulary

__all__ = ["Block", "Candidates", "Transition", "choose_candidates"]


class Block(NamedTuple):
    """The W places behind R texts, as one forward has them.

    logits: [R, W, D], of each place by itself. hidden: [R, W, H], what they were made from. last:
    int64 [R], target ids of the texts' last tokens.
    """

    logits: Tensor
    hidden: Tensor
    last: Tensor


class Transition(Protocol):
    """How the token of a place depends on the one before it; all ids are the target's."""

    def step(self, logits: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [R, D] of a place by itself to float32 [R, D] behind ``previous``, int64 [R].

        hidden: [R, H], of the place.
        """
        ...

    def pairs(self, hidden: Tensor, previous: Tensor, token_ids: Tensor) -> Tensor:
        """float32 [R, W, P, C]: what ``token_ids`` int64 [R, W, C] gain behind ``previous``.

        hidden: [R, W, H]. previous: int64 [R, W, P], of the places before.
        """
        ...


class Candidates(NamedTuple):
    """The C likeliest tokens of each place, the best first.

    token_ids: int64 [R, W, C], target ids. scores: float32 [R, W, C], logs of probabilities, of
    each place by itself; -inf: not to be drafted. gains: float32 [R, W, C, C], [r, w, p, c] is what
    candidate c of place w gains behind candidate p of the place before; at place 0 every p is the
    text's last token. None where places do not depend on one another.
    """

    token_ids: Tensor
    scores: Tensor
    gains: Tensor | None


def choose_candidates(
    block: Block,
    count: int,
    vocabulary: DraftVocabulary | None = None,
    transition: Transition | None = None,
) -> Candidates:
    """The candidates of a block; C is ``count``, or D where there are fewer.

    vocabulary: what the logits score; None: the target's own tokens. With a ``transition``, the
    candidates of a place are the likeliest ones behind the best candidate of the place before.
    """
    logits = block.logits.float()
    count = min(count, logits.shape[-1])
    if transition is None:
        scores, found = logits.log_softmax(-1).topk(count)
        return Candidates(_to_target(found, vocabulary), scores, None)
    chosen, kept, previous = list[Tensor](), list[Tensor](), block.last
    for place in range(logits.shape[1]):
        alone = logits[:, place]
        behind = transition.step(alone, block.hidden[:, place], previous)
        best, found = behind.topk(count)
        # What the transition rules out stays out, whatever comes before it.
        own = alone.gather(1, found).masked_fill(best.isneginf(), -torch.inf)
        kept.append(own - behind.logsumexp(-1, keepdim=True))
        chosen.append(_to_target(found, vocabulary))
        previous = chosen[-1][:, 0]
    token_ids = torch.stack(chosen, 1)
    before = block.last[:, None, None].expand(-1, 1, count)
    gains = transition.pairs(block.hidden, torch.cat([before, token_ids[:, :-1]], 1), token_ids)
    return Candidates(token_ids, torch.stack(kept, 1), gains)


def _to_target(draft_ids: Tensor, vocabulary: DraftVocabulary | None) -> Tensor:
    return draft_ids if vocabulary is None else vocabulary.to_target(draft_ids)
