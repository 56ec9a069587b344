"""Drafts of block heads: by a policy, or a legal path through the lattice of each request's block.

Under a policy a ``DraftLoop`` has the tokens chosen from left to right. For a path, the likeliest
tokens of every place come to the host in one download, and the draft is a path that the grammar
takes. Its tokens are certain: it is verified as such (``Draft.probs`` is None), which is exact
under either verifier whatever the draft is. So nothing has to be known of the head's own
distribution.

Where every text of the step has a table on the device, the path is found there, and the host
follows it while the target verifies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.core import CarryOn, DecodeBatch, DraftInFlight, FinishedDraft, TargetOutput
from guided_spec.masks.lookahead import Lookahead, Scored
from guided_spec.masks.tables import TabledTexts
from guided_spec.models.heads.block.candidates import (
    Block,
    Candidates,
    Transition,
    choose_candidates,
)
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.host import Download, host_integers, to_device
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.table_rows import CURSOR
from guided_spec.ops.trees.lattice_paths import first_legal_paths
from guided_spec.proposers.draft_loop import DraftAdjustments, DraftLoop
from guided_spec.proposers.drafting import (
    concatenate,
    draft_ends,
    host_draft,
    read_policy,
    used_policies,
)
from guided_spec.types import Accepted, Draft, DraftPolicy

__all__ = ["BlockDrafter", "BlockSource", "Compute", "Lattice"]


class Lattice(NamedTuple):
    """One text's block on the host; see ``Candidates``.

    token_ids: int32 [W, C]; -1 for what is not to be drafted, behind all others. likeliest: of
    these the first few, as lists: of most places no other is asked for. scores: float32 [W, C];
    None where nobody asks for them. gains: float32 [W, C, C]; None where places do not depend on
    one another.
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

    def behind(self, depth: int, previous: int | None) -> Scored | None:
        """See ``guided_spec.masks.lookahead.Options``."""
        if depth >= len(self):
            return None
        return Scored(self.token_ids[depth], self._scores(depth, previous))

    def _scores(self, place: int, previous: int | None) -> NDArray[np.float32]:
        assert self.scores is not None
        scores: NDArray[np.float32] = self.scores[place]
        if self.gains is None:
            return scores
        rows = np.zeros(1, dtype=np.int64)
        if place:
            rows = np.flatnonzero(self.token_ids[place - 1] == previous)
        if len(rows):
            scores = scores + self.gains[place, rows[0]]
        return scores

    def _behind(self, place: int, previous: int | None) -> list[int]:
        order = np.argsort(-self._scores(place, previous), kind="stable")
        return self.token_ids[place, order].tolist()  # type: ignore[no-any-return]


def _is_token(token_id: int) -> bool:
    return token_id >= 0


PATH = "path"  # behind a proposer's name: legal paths
LISTED = 4
CANDIDATES = 256  # of a place: with fewer, drafts starve (docs/lattice.md)
FOLLOWING = 32  # of them where each is scored behind each of the place before

Compute = Callable[[Sequence[int], int], Block]
"""The blocks of some requests, by their rows. So many candidates of a place are wanted, 0 for none,
which may be found along with it."""


class BlockSource(NamedTuple):
    """Where a drafter has its drafts from. loop: drafts some rows under the other policies.
    carry_on: see ``FinishedDraft``."""

    compute: Compute
    loop: Callable[[Sequence[int]], DraftLoop]
    carry_on: CarryOn | None = None


class _Known(NamedTuple):
    """A slot's lattice, behind a text of ``length`` tokens."""

    length: int
    lattice: Lattice


class _Path(NamedTuple):
    """A draft that the device found; see ``DraftInFlight``.

    told: int64 [B, 2 W] on its way to the host: at each place the token, or -1, and whether the
    text is starved there. carry_on: see ``FinishedDraft``.
    """

    draft: Draft
    most: tuple[int, ...]
    lookahead: Lookahead
    told: Download
    carry_on: CarryOn | None

    @property
    def is_walked(self) -> bool:
        return False

    @property
    def is_underway(self) -> bool:
        return True

    @property
    def answer(self) -> None:
        return None

    def finish(self) -> Draft:
        """Nothing was drafted before, so that ``most`` are the drafts' ends too."""
        columns = self.told.wait().T.tolist()
        with self.lookahead.until(self.most):
            for place, (tokens, starved) in enumerate(zip(*[iter(columns)] * 2, strict=True)):
                self.lookahead.accept_ids(tokens, starved, place)
        lengths = host_integers([len(drafted) for drafted in self.lookahead.drafted])
        token_ids = self.draft.token_ids
        return Draft(token_ids, lengths.to(token_ids.device, non_blocking=True))

    def carry(self, accepted: Accepted, output: TargetOutput, packed: Download) -> object | None:
        return None if self.carry_on is None else self.carry_on(accepted, output, packed)


class BlockDrafter:
    """Drafts the requests that ask for no other policy, and leaves the rest to a ``DraftLoop``.

    argument: what stands behind the proposer's name: the draft policy of requests that do not ask
    for one, ``PATH``, or nothing: then "mask", and paths where there are trees.
    has_trees: the lattices are told to the lookahead, and all paths are found on the host.
    vocabulary, transition: see ``choose_candidates``. policy: of requests that do not ask for one;
    None: paths.

    Raises ConfigError for another argument.
    """

    def __init__(
        self,
        argument: str,
        vocabulary: DraftVocabulary | None,
        transition: Transition | None,
        *,
        has_trees: bool = False,
    ) -> None:
        is_path = argument == PATH or (argument == "" and has_trees)
        self.policy: DraftPolicy | None = None if is_path else read_policy(argument, "mask", PATH)
        self._has_trees = has_trees
        self._vocabulary, self._transition = vocabulary, transition
        self._known: dict[int, _Known] = {}

    def begin(
        self,
        batch: DecodeBatch,
        lookahead: Lookahead,
        rows: Sequence[int],
        source: BlockSource,
    ) -> DraftInFlight:
        """The draft of ``rows``."""
        policies = used_policies(batch, self.policy)
        own = [row for row in rows if policies[row] is None]
        others = [row for row in rows if policies[row] is not None]
        if not own:
            return source.loop(others).in_flight(source.carry_on)
        starts = lookahead.lengths
        if not others and not any(starts) and not self._has_trees:
            if not any(batch.constraints[row] for row in own):
                free = DraftLoop(batch, lookahead, "validate", self._vocabulary, rows=own)
                free.take(self._best(batch, own, source.compute))
                return free.in_flight(source.carry_on)
            # Where nobody waits for the host, a chain's turns end as they should: one by one.
            texts = None if lookahead.turns else lookahead.tabled(own, batch.num_draft_tokens)
            if texts is not None and texts.is_alone:
                return self._draft_on_device(batch, lookahead, own, source, texts)
        draft = self._draft(batch, lookahead, own, source.compute)
        if others:
            draft = concatenate(draft, source.loop(others).finish())
        ends = zip(lookahead.lengths, starts, strict=True)
        return FinishedDraft(draft, tuple(end - start for end, start in ends), source.carry_on)

    def compile(self, width: int, device: torch.device) -> None:
        """Have the kernel of paths ready, if the device has one."""
        if device.type == "cuda":
            size = self._num_candidates
            scores = torch.zeros(1, width, size, device=device)
            gains = None if self._transition is None else scores.new_zeros(1, width, size, size)
            cursors = torch.zeros(1, CURSOR, dtype=torch.int64, device=device)
            first_legal_paths(scores.long(), scores, gains, cursors, 1)

    def release(self, slots: Sequence[int]) -> None:
        """Forget the slots' lattices."""
        for slot in slots:
            self._known.pop(slot, None)

    def _best(self, batch: DecodeBatch, rows: Sequence[int], compute: Compute) -> Tensor:
        """int64 [B, W] on the device: the likeliest tokens whatever the grammars say; 0 for others
        than ``rows``. Nothing waits for the host, and no draft holds anything yet."""
        block = self._first_places(batch, rows, compute, 1)
        found = choose_candidates(block, 1, self._vocabulary, self._transition).token_ids[:, :, 0]
        return _spread(found, rows, found.new_zeros(len(batch), found.shape[1]))

    def _draft_on_device(
        self,
        batch: DecodeBatch,
        lookahead: Lookahead,
        rows: Sequence[int],
        source: BlockSource,
        texts: TabledTexts,
    ) -> DraftInFlight:
        """The paths of ``rows`` along their tables; nothing waits for the host, and no draft holds
        anything yet. They are those that ``_draft`` finds."""
        block = self._first_places(batch, rows, source.compute, self._num_candidates)
        found = choose_candidates(block, self._num_candidates, self._vocabulary, self._transition)
        cursors = texts.cursors[list(rows)].to(batch.device, non_blocking=True)
        paths = first_legal_paths(*found, cursors, num_mask_words(batch.vocab_size))
        width = paths.tokens.shape[1]
        told = torch.stack([paths.tokens, paths.starved], 2).flatten(1)
        told = _spread(told, rows, told.new_full((len(batch), told.shape[1]), -1))
        sources = paths.sources.T.contiguous()
        sources = _spread(sources, rows, sources.new_zeros(len(batch), width + 1))
        lookahead.leave(texts, sources.T.contiguous())
        ends = draft_ends(batch, lookahead, rows)
        most = tuple(min(end, width) for end in ends)
        token_ids = told[:, ::2].clamp_min(0)
        lengths = to_device(most, batch.device)
        draft = Draft(token_ids, lengths)
        return _Path(draft, most, lookahead, Download(told), source.carry_on)

    def _first_places(
        self, batch: DecodeBatch, rows: Sequence[int], compute: Compute, count: int
    ) -> Block:
        """Of the blocks of ``rows`` what a draft may hold. count: see ``Compute``."""
        return self._adjusted(batch, [()] * len(batch), rows, compute, count).first(
            batch.num_draft_tokens
        )

    @property
    def counts(self) -> tuple[int, ...]:
        """How many candidates of a place blocks are asked for; none where no request has a path."""
        return (0, 1, self._num_candidates) if self.policy is None else ()

    @property
    def _num_candidates(self) -> int:
        return CANDIDATES if self._transition is None else FOLLOWING

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
            lookahead.options[row] = lattice if self._has_trees else None
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
        count = self._num_candidates
        block = self._adjusted(batch, drafted, missing, compute, count)
        candidates = choose_candidates(block, count, self._vocabulary, self._transition)
        found = _download(candidates, has_scores=self._has_trees)
        lattices = zip(missing, found, strict=True)
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
        compute: Compute,
        count: int,
    ) -> Block:
        """The blocks under the requests' biases, bans and penalties, as they are where they begin.

        count: see ``Compute``; under other logits candidates would be others.
        """
        if batch.adjustments is None:
            return compute(rows, count)
        block = compute(rows, 0)
        adjust = DraftAdjustments(batch, drafted, self._vocabulary)
        index = to_device(rows, batch.device)
        full = block.logits.new_zeros(len(batch), *block.logits.shape[1:])
        full = full.index_copy(0, index, block.logits)
        places = [adjust.apply(place)[index] for place in full.unbind(1)]
        return block.with_logits(torch.stack(places, 1))


def _spread(found: Tensor, rows: Sequence[int], blank: Tensor) -> Tensor:
    """``found`` [R, ...] as the ``rows`` of a batch; others are those of ``blank`` [B, ...]."""
    if len(rows) == len(blank):
        return found
    index = to_device(rows, found.device)
    return blank.index_copy_(0, index, found)


def _download(candidates: Candidates, *, has_scores: bool) -> list[Lattice]:
    """All of it in one piece; waits until it is on the host.

    has_scores: also where places do not depend on one another, so that nobody needs them for paths.
    """
    ids, scores, gains = candidates
    parts = [ids.masked_fill(scores.isneginf(), -1).int()]
    if gains is not None or has_scores:
        parts.append(scores.view(torch.int32))
    if gains is not None:
        parts.append(gains.contiguous().view(torch.int32).flatten(2))
    found = Download(torch.cat(parts, -1)).wait().numpy()
    size = ids.shape[-1]
    token_ids, rest = found[..., :size], found[..., size:].view(np.float32)
    listed = zip(token_ids, token_ids[..., :LISTED].tolist(), strict=True)
    if gains is None:
        scored = zip(listed, rest if has_scores else [None] * len(rest), strict=True)
        return [Lattice(*own, scores) for own, scores in scored]
    gained = rest[..., size:].reshape(gains.shape)
    return [
        Lattice(*own, *scored)
        for own, *scored in zip(listed, rest[..., :size], gained, strict=True)
    ]
