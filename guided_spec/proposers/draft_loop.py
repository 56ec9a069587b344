"""The loop that drafts with a model, for every proposer that has one, under two policies.

- ``mask``: at each depth the grammar's mask goes to the device, and what was drawn under it comes
  back. Every draft token is legal; each depth waits for the host once.
- ``validate``: the model drafts freely. The host walks the draft afterwards, in one download; the
  first illegal token stays in it, and the verifier refuses it exactly.

Under each, the drafter's logits are adjusted like the target's (``ops.sampling.adjust``).

Which one a request gets changes how much is accepted, never the distribution of the text: a draft
sampled under a mask is verified with its masked probabilities, and one sampled freely with those.

The adjustments of a batch, applied to a drafter's own logits as its draft grows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, FinishedDraft
from guided_spec.masks.lookahead import Lookahead
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.host import Download, host_integers
from guided_spec.ops.sampling.adjust import Adjustments
from guided_spec.ops.sampling.noise import DraftNoise
from guided_spec.proposers.draft_chooser import DraftChooser
from guided_spec.proposers.drafting import host_draft, used_policies
from guided_spec.proposers.masked_walk import MaskedDraft, MaskedWalk
from guided_spec.types import Accepted, Draft, DraftPolicy

__all__ = [
    "DraftAdjustments",
    "DraftLoop",
    "draft_autoregressively",
]

NO_TOKEN = -1


class DraftAdjustments:
    """Biases, bans and penalties behind each request's draft so far. Costs nothing without any.

    drafted: [B] tokens that the requests' drafts hold already.
    vocabulary: what the drafter's logits score; None: the target's own V tokens.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        drafted: Sequence[Sequence[int]],
        vocabulary: DraftVocabulary | None,
    ) -> None:
        self._adjustments = batch.adjustments
        self._vocabulary = vocabulary
        if self._adjustments is None:
            return
        lengths = [len(row) for row in drafted]
        width = max(lengths) + batch.num_draft_tokens
        padded = [[*row, *[NO_TOKEN] * (width - len(row))] for row in drafted]
        tokens = torch.tensor(padded, dtype=torch.int64).view(len(batch), width)
        self._tokens = tokens.to(batch.device, non_blocking=True)
        self._lengths = torch.tensor(lengths).to(batch.device, non_blocking=True)

    def apply(self, logits: Tensor) -> Tensor:
        """Logits [B, D] of the next token to such logits, in float32 where anything is adjusted."""
        if self._adjustments is None:
            return logits
        if self._vocabulary is None:
            return self._apply(self._adjustments, logits)
        # In target ids there and back: the rules name target tokens.
        target_ids = self._vocabulary.target_ids
        full = logits.new_full((len(logits), self._vocabulary.target_size), float("-inf"))
        full = full.index_copy(1, target_ids, logits)
        return self._apply(self._adjustments, full)[:, target_ids]

    def append(self, token_ids: Tensor) -> None:
        """One more drafted token for each request, int64 [B] target ids; -1 for none."""
        if self._adjustments is None:
            return
        self._tokens.scatter_(1, self._lengths.unsqueeze(1), token_ids.unsqueeze(1))
        self._lengths = self._lengths + 1

    def _apply(self, adjustments: Adjustments, logits: Tensor) -> Tensor:
        return adjustments.apply(logits.unsqueeze(1), self._tokens, self._lengths).squeeze(1)


def draft_autoregressively(
    first_logits: Tensor,
    forward: Callable[[Tensor], Tensor],
    batch: DecodeBatch,
    lookahead: Lookahead,
    policy: DraftPolicy = "mask",
    vocabulary: DraftVocabulary | None = None,
) -> Draft:
    """Draft up to K tokens a request with any model that maps a token to logits.

    first_logits: [B, D] after each request's context and its draft so far; a request whose row is
        -inf throughout drafts nothing.
    forward: int64 [B] target ids just drafted -> [B, D] logits after them. Launched before the host
        looks at these tokens: it may turn out that nobody wants its logits. Not called for the
        last.
    policy: of the requests that do not ask for one.
    vocabulary: what the logits score; None: the target's own V tokens.

    Greedy requests draft the largest logit, others sample from the warped draft distribution.
    Where no legal token is in the draft vocabulary, the only legal token is drafted if there is
    just one, and the request's draft ends otherwise.
    """
    loop = DraftLoop(batch, lookahead, policy, vocabulary)
    loop.run(first_logits, forward)
    return loop.finish()


class _Place(NamedTuple):
    """One position of the draft.

    tokens: int64 [B] target ids, -1 where there is none. readable: the same with 0 there.
    probs: float32 [B, D]; None when nothing is sampled.
    rescued: int64 [B] the only legal token where the draft vocabulary lacks it, else -1; None
        without a reduced vocabulary.
    """

    tokens: Tensor
    readable: Tensor
    probs: Tensor | None
    rescued: Tensor | None


class _Unwalked(NamedTuple):
    """A loop's draft on its way to the host; see ``DraftInFlight``."""

    draft: Draft
    loop: DraftLoop
    later: Download | None

    @property
    def is_walked(self) -> bool:
        return False

    def finish(self) -> Draft:
        return self.loop.walk_as(self.draft, self.later)

    def carry(self, accepted: Accepted, hidden_states: Tensor | None, packed: Download) -> None:
        """A model of its own has nothing to read before it is told the tokens."""


class DraftLoop:
    """What is drafted in one step, and how each request keeps to its grammar.

    ``run``, ``take`` or ``take_masked`` once, then ``finish`` or ``in_flight`` once. The arguments
    are those of ``draft_autoregressively``.
    chooser: kept by the drafter from step to step, made with the target ids of ``vocabulary``; None
        launches every choice by itself.
    """

    def __init__(
        self,
        batch: DecodeBatch,
        lookahead: Lookahead,
        policy: DraftPolicy,
        vocabulary: DraftVocabulary | None,
        chooser: DraftChooser | None = None,
    ) -> None:
        target_ids = None if vocabulary is None else vocabulary.target_ids
        self._chooser = chooser or DraftChooser(target_ids)
        self._batch, self._lookahead, self._vocabulary = batch, lookahead, vocabulary
        masked = [one == "mask" for one in used_policies(batch, policy)]
        # Free requests go with the masked ones where there are any: their download comes anyway.
        is_waiting = any(
            one and constraint is not None
            for one, constraint in zip(masked, batch.constraints, strict=True)
        )
        self._starts = [len(drafted) for drafted in lookahead.drafted]
        self._was_open = lookahead.is_open
        self._is_later = [not (is_waiting and one) for one in masked]
        self._rooms = [
            limit - start if is_open and later else 0
            for limit, start, is_open, later in zip(
                batch.limits, self._starts, self._was_open, self._is_later, strict=True
            )
        ]
        self._sampling = batch.sampling
        self._noise = None if self._sampling.all_greedy else self._keys()
        self._places: list[_Place] = []
        self._drawn: Download | None = None
        self._running: MaskedDraft | None = None
        self._adjustments = DraftAdjustments(batch, lookahead.drafted, vocabulary)

    def run(self, first_logits: Tensor, forward: Callable[[Tensor], Tensor]) -> None:
        """Draw token after token; the last may still be on its way to the host."""
        logits = first_logits
        with self._lookahead.holding(self._is_later):
            for depth in range(self._batch.num_draft_tokens):
                self._settle()
                if not self._goes_on(depth):
                    break
                self._draw(logits, depth)
                if depth + 1 == self._batch.num_draft_tokens or not self._may_go_on(depth + 1):
                    break
                logits = forward(self._places[-1].readable)

    def take(self, best: Tensor) -> None:
        """Every request's best tokens, int64 [B, K] target ids."""
        self._places += [_Place(tokens, tokens, None, None) for tokens in best.unbind(1)]

    def take_masked(self, walk: MaskedWalk, slots: Sequence[int]) -> None:
        """Tokens under masks, drawn while the host walks; for a batch that ``drafts_masked``."""
        drawing = (self._sampling, self._noise)
        self._running = walk.begin(slots, self._batch, self._lookahead, *drawing)
        # The device works on while whoever reads the draft launches what comes behind it.
        self._running.walk(self._lookahead, 1)
        for depth in range(self._batch.num_draft_tokens):
            ids, probs, rescued = self._running.room.at(depth)
            self._places.append(_Place(ids, ids, probs, rescued))

    def finish(self) -> Draft:
        """The draft, once the host has walked it."""
        rows = self._walk(self._download())
        draft = host_draft(self._batch, rows)
        return self._with_probs(draft)

    def in_flight(self) -> DraftInFlight:
        """The draft as the target may read it at once."""
        if not self._places:
            return FinishedDraft(self.finish())
        ids = torch.stack([place.readable for place in self._places], 1)
        most = torch.full_like(ids[:, 0], ids.shape[1])
        return _Unwalked(Draft(ids, most), self, self._download())

    def walk_as(self, draft: Draft, later: Download | None) -> Draft:
        """``draft`` with the lengths that the grammars leave it. later: what the host sees."""
        lengths = host_integers([len(row) for row in self._walk(later)])
        lengths = lengths.to(draft.token_ids.device, non_blocking=True)
        return self._with_probs(Draft(draft.token_ids, lengths))

    def _goes_on(self, depth: int) -> bool:
        """Whether any request may draft another token."""
        return self._lookahead.has_room(1) or depth < max(self._rooms)

    def _may_go_on(self, depth: int) -> bool:
        """``_goes_on`` as far as it can be told before ``_settle``."""
        return self._lookahead.has_room(2) or depth < max(self._rooms)

    def _draw(self, logits: Tensor, depth: int) -> None:
        """One token for each request from logits [B, D]; ``_settle`` follows."""
        logits = self._adjustments.apply(logits)
        mask = None if all(self._is_later) else self._lookahead.next_mask()
        chosen = self._chooser.choose(depth, logits, mask, self._sampling, self._noise)
        place = _Place(chosen.tokens, chosen.readable, chosen.probs, chosen.rescued)
        self._places.append(place)
        self._adjustments.append(chosen.tokens)
        if not all(self._is_later):
            self._drawn = Download(chosen.report[:2])

    def _settle(self) -> None:
        """The masked requests walk what was drawn; waits until that is on the host."""
        if self._running is not None:
            self._running.walk(self._lookahead)
            self._running = None
        if self._drawn is not None:
            tokens, starved = self._drawn.wait().tolist()
            self._lookahead.accept_ids(tokens, starved)
            self._drawn = None

    def _download(self) -> Download | None:
        """What the host has to see of the tokens that it walks later."""
        if not any(self._rooms) or not self._places:
            return None
        return Download(torch.stack([place.tokens for place in self._places], 1))

    def _walk(self, later: Download | None) -> list[list[int]]:
        """Walk what the host has not seen yet; returns every request's own tokens."""
        with self._lookahead.holding(self._is_later):
            self._settle()
        if later is not None:
            self._lookahead.extend(self._own(later.wait().tolist()))
        drafted, refused = self._lookahead.drafted, self._lookahead.refused
        rows = []
        for request, start in enumerate(self._starts):
            row = drafted[request][start:]
            found = refused[request] if self._was_open[request] else None
            # Dropping an illegal token that was sampled would bias the text: the verifier has to
            # refuse it.
            rows.append(row if found is None else [*row, found])
        return rows

    def _keys(self) -> DraftNoise:
        """Which noise the first token is drawn with."""
        pairs = zip(self._batch.contexts, self._starts, strict=True)
        positions = [len(context) + start for context, start in pairs]
        return self._batch.draft_keys(
            torch.tensor(positions).to(self._batch.device, non_blocking=True)
        )

    def _own(self, rows: list[list[int]]) -> list[list[int]]:
        """[B] lists: the tokens of the requests that are walked now, as far as there are any."""
        return [
            list(takewhile(lambda token: token >= 0, row)) if room else []
            for row, room in zip(rows, self._rooms, strict=True)
        ]

    def _with_probs(self, draft: Draft) -> Draft:
        """The draft and what its tokens were drawn from; as it is where all are certain."""
        if self._sampling.all_greedy or not self._places:
            return draft
        drawn_from = [place.probs for place in self._places if place.probs is not None]
        columns = is_certain = None
        if self._vocabulary is not None:
            columns = self._vocabulary.columns
            rescued = [place.rescued for place in self._places if place.rescued is not None]
            is_certain = torch.stack(rescued, 1) >= 0
        whole = draft._replace(
            probs=torch.stack(drawn_from, 1), columns=columns, is_certain=is_certain
        )
        return whole.cut(draft.token_ids.shape[1])
