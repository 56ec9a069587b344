"""Drafts of block heads: a legal path through the lattice of each request's block.

One forward gives the scores of all places of a block. The likeliest tokens of every place come to
the host in one download, and the draft is a path that the grammar takes. Its tokens are certain: it
is verified as such (``Draft.probs`` is None), which is exact under either verifier whatever the
draft is. So nothing has to be known of the head's own distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, FinishedDraft
from guided_spec.masks.lookahead import Lookahead
from guided_spec.models.heads.block.candidates import (
    Block,
    Candidates,
    Transition,
    choose_candidates,
)
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.host import Download
from guided_spec.proposers.draft_loop import DraftAdjustments, DraftLoop
from guided_spec.proposers.drafting import (
    concatenate,
    draft_ends,
    host_draft,
    read_policy,
    used_policies,
)
from guided_spec.types import Draft, DraftPolicy

__all__ = ["BlockDrafter", "Compute", "Lattice"]


class Lattice(NamedTuple):
    """One text's block on the host; see ``Candidates``.

    token_ids: int32 [W, C]; -1 for what is not to be drafted, behind all others. likeliest: of
    these the first few, as lists: of most places no other is asked for. scores: float32 [W, C].
    gains: float32 [W, C, C]; both are None where places do not depend on one another.
    """

    token_ids: NDArray[np.int32]
    likeliest: Sequence[Sequence[int]]
    scores: NDArray[np.float32] | None = None
    gains: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def options(self, place: int, previous: int | None) -> Iterator[int]:
        """The candidate tokens of a place behind ``previous``, the best first.

        previous: the draft's token before; None: the text's own last one, at place 0. One that is
        no candidate of the place before changes nothing.
        """
        if self.gains is not None:
            yield from takewhile(_is_token, self._behind(place, previous))
            return
        first = self.likeliest[place]
        yield from takewhile(_is_token, first)
        yield from takewhile(_is_token, self.token_ids[place, len(first) :].tolist())

    def first_paths(self, place: int, drafted: Sequence[int]) -> Iterator[Iterator[int]]:
        """The tokens to try at each place from ``place`` on, the best first, as they are asked for.

        drafted: where whoever asks appends the one that it took.
        """
        for at in range(place, len(self)):
            previous = drafted[-1] if at else None
            yield self.options(at, previous)

    def _behind(self, place: int, previous: int | None) -> list[int]:
        assert self.gains is not None
        assert self.scores is not None
        rows, scores = np.zeros(1, dtype=np.int64), self.scores[place]
        if place:
            rows = np.flatnonzero(self.token_ids[place - 1] == previous)
        if len(rows):
            scores = scores + self.gains[place, rows[0]]
        order = np.argsort(-scores, kind="stable")
        return self.token_ids[place, order].tolist()  # type: ignore[no-any-return]


def _is_token(token_id: int) -> bool:
    return token_id >= 0


LISTED = 4
CANDIDATES = 256  # of a place: with fewer, drafts starve (docs/lattice.md)
FOLLOWING = 32  # of them where each is scored behind each of the place before

Compute = Callable[[Sequence[int]], Block]
"""The blocks of some requests, by their rows."""


class _Known(NamedTuple):
    """A slot's lattice, behind a text of ``length`` tokens."""

    length: int
    lattice: Lattice


class BlockDrafter:
    """Drafts the requests that ask for no other policy, and leaves the rest to a ``DraftLoop``.

    argument: what stands behind the proposer's name: the draft policy of requests that do not ask
    for one, or nothing for paths.
    vocabulary, transition: see ``choose_candidates``. policy: of requests that do not ask for one;
    None: paths.

    Raises ConfigError for another argument.
    """

    def __init__(
        self,
        argument: str,
        vocabulary: DraftVocabulary | None,
        transition: Transition | None,
    ) -> None:
        self.policy: DraftPolicy | None = read_policy(argument, None)
        self._vocabulary, self._transition = vocabulary, transition
        self._known: dict[int, _Known] = {}

    def begin(
        self,
        batch: DecodeBatch,
        lookahead: Lookahead,
        rows: Sequence[int],
        compute: Compute,
        loop: Callable[[Sequence[int]], DraftLoop],
    ) -> DraftInFlight:
        """The draft of ``rows``; loop: what drafts some of them under the other policies."""
        policies = used_policies(batch, self.policy)
        own = [row for row in rows if policies[row] is None]
        others = [row for row in rows if policies[row] is not None]
        if not own:
            return loop(others).in_flight()
        starts = lookahead.lengths
        if not others and not any(starts) and not any(batch.constraints[row] for row in own):
            free = DraftLoop(batch, lookahead, "validate", self._vocabulary, rows=own)
            free.take(self._best(batch, own, compute))
            return free.in_flight()
        draft = self._draft(batch, lookahead, own, compute)
        if others:
            draft = concatenate(draft, loop(others).finish())
        ends = zip(lookahead.lengths, starts, strict=True)
        return FinishedDraft(draft, tuple(end - start for end, start in ends))

    def release(self, slots: Sequence[int]) -> None:
        """Forget the slots' lattices."""
        for slot in slots:
            self._known.pop(slot, None)

    def _best(self, batch: DecodeBatch, rows: Sequence[int], compute: Compute) -> Tensor:
        """int64 [B, W] on the device: the likeliest tokens whatever the grammars say; 0 for others
        than ``rows``. Nothing waits for the host, and no draft holds anything yet."""
        block = self._adjusted(batch, [()] * len(batch), rows, compute(rows))
        count = batch.num_draft_tokens
        block = Block(block.logits[:, :count], block.hidden[:, :count], block.last)
        found = choose_candidates(block, 1, self._vocabulary, self._transition).token_ids[:, :, 0]
        if len(rows) == len(batch):
            return found
        index = torch.tensor(rows).to(batch.device, non_blocking=True)
        return found.new_zeros(len(batch), found.shape[1]).index_copy_(0, index, found)

    def _draft(
        self, batch: DecodeBatch, lookahead: Lookahead, rows: Sequence[int], compute: Compute
    ) -> Draft:
        """The paths of ``rows``, behind what the drafts hold; others draft nothing."""
        self._find(batch, lookahead.drafted, rows, compute)
        starts = [len(drafted) for drafted in lookahead.drafted]
        ends = draft_ends(batch, lookahead, rows)
        options: list[Iterator[Iterator[int]]] = [iter(()) for _ in range(len(batch))]
        for row in rows:
            lattice, drafted = self._known[batch.slots[row]].lattice, lookahead.drafted[row]
            options[row] = lattice.first_paths(starts[row], drafted)
        with lookahead.until(ends):
            return host_draft(batch, lookahead.extend_path(options))

    def _find(
        self,
        batch: DecodeBatch,
        drafted: Sequence[Sequence[int]],
        rows: Sequence[int],
        compute: Compute,
    ) -> None:
        """The lattices of ``rows``, one forward and one download for those that are not known."""
        missing = [row for row in rows if not self._is_known(batch, row)]
        if not missing:
            return
        block = self._adjusted(batch, drafted, missing, compute(missing))
        count = CANDIDATES if self._transition is None else FOLLOWING
        candidates = choose_candidates(block, count, self._vocabulary, self._transition)
        lattices = zip(missing, _download(candidates), strict=True)
        for row, lattice in lattices:
            self._known[batch.slots[row]] = _Known(len(batch.contexts[row]), lattice)

    def _is_known(self, batch: DecodeBatch, row: int) -> bool:
        known = self._known.get(batch.slots[row])
        return known is not None and known.length == len(batch.contexts[row])

    def _adjusted(
        self,
        batch: DecodeBatch,
        drafted: Sequence[Sequence[int]],
        rows: Sequence[int],
        block: Block,
    ) -> Block:
        """The block under the requests' biases, bans and penalties, as they are where it begins."""
        if batch.adjustments is None:
            return block
        adjust = DraftAdjustments(batch, drafted, self._vocabulary)
        index = torch.tensor(rows).to(batch.device, non_blocking=True)
        full = block.logits.new_zeros(len(batch), *block.logits.shape[1:])
        full = full.index_copy(0, index, block.logits)
        places = [adjust.apply(place)[index] for place in full.unbind(1)]
        return block._replace(logits=torch.stack(places, 1))


def _download(candidates: Candidates) -> list[Lattice]:
    """All of it in one piece; waits until it is on the host."""
    ids, scores, gains = candidates
    parts = [ids.masked_fill(scores.isneginf(), -1).int()]
    if gains is not None:
        parts += [scores.view(torch.int32), gains.contiguous().view(torch.int32).flatten(2)]
    found = Download(torch.cat(parts, -1)).wait().numpy()
    size = ids.shape[-1]
    token_ids, rest = found[..., :size], found[..., size:].view(np.float32)
    listed = zip(token_ids, token_ids[..., :LISTED].tolist(), strict=True)
    if gains is None:
        return [Lattice(*parts) for parts in listed]
    gained = rest[..., size:].reshape(gains.shape)
    return [
        Lattice(*own, *scored)
        for own, *scored in zip(listed, rest[..., :size], gained, strict=True)
    ]
