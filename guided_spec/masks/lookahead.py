"""Forks that advance through one step's drafts, and the mask rows they produce.

The mask of draft position i and the mask of target row i are the same row: filled once, used twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.grammar.tables.token_table import TokenTable
from guided_spec.masks.constraint import Constraint, Fork
from guided_spec.masks.filler import RequestDraft, RowFiller
from guided_spec.masks.rows import MaskRows, TabledTexts, TableStarts
from guided_spec.types import Draft

# From this many rows on they are filled on another thread while the forward is launched. Fewer are
# filled by this thread once it is launched, which a GPU does not wait for.
ROWS_WORTH_A_THREAD = 256
Pause = Callable[[int], bool]


class Turn(NamedTuple):
    """Where several proposers share a draft: whose tokens stand from ``starts[request]`` on.

    The next turn ends it. Tokens that the grammar refuses are in nobody's turn.
    """

    proposer: str
    starts: Sequence[int]


class Lookahead:
    """One step's forks. Made by ``fork``, thrown away after ``finish``.

    A proposer either asks ``next_mask`` and answers with ``accept``, depth by depth, or hands whole
    token lists to ``extend``; both may alternate. ``drafted`` is what the draft holds so far: a
    proposer continues from there.
    """

    def __init__(
        self, drafts: list[RequestDraft], rows: MaskRows, constraints: Sequence[Constraint | None]
    ) -> None:
        self._drafts = drafts
        self._rows = rows
        self._filler = RowFiller(rows)
        self._constraints = constraints
        self._fork_of: Callable[[Constraint], Fork] | None = None  # as they were taken
        self._filling: Future[None] | None = None  # on another thread
        self._is_constrained = any(constraint is not None for constraint in constraints)
        self._pause: Pause | None = None
        self._sources: Tensor | None = None  # of rows that the device takes from tables
        self.forced: list[list[int]] = [[] for _ in drafts]
        self.turns: list[Turn] = []  # none where one proposer makes the whole draft
        self.fill_seconds = 0.0

    @classmethod
    def fork(
        cls, constraints: Sequence[Constraint | None], rows: MaskRows, limits: Sequence[int]
    ) -> Lookahead:
        """Every request's fork, from where its text ends; the originals are not touched.

        The forks go there when they are first needed, which may be while the target runs.

        constraints: B of them, None for a free request. limits: B, draft tokens at most; never
        more than ``rows.depths - 1``, since the last row belongs to the token after the draft.
        """
        rows.clear(len(constraints))
        most = rows.depths - 1
        drafts = [RequestDraft(at, None, min(limit, most)) for at, limit in enumerate(limits)]
        for draft, constraint in zip(drafts, constraints, strict=True):
            if constraint is not None and constraint.is_terminated:
                draft.end()
        return cls(drafts, rows, constraints)

    @property
    def drafted(self) -> list[list[int]]:
        """[B] lists of the legal draft tokens so far. Read only."""
        return [draft.drafted for draft in self._drafts]

    @property
    def is_open(self) -> list[bool]:
        """[B]: whether more tokens may be drafted for the request.

        False from its limit on, after an end-of-text token and after an illegal token, and inside
        of ``until`` and ``pausing`` from where its turn ends.
        """
        return [draft.is_drafting for draft in self._drafts]

    def can_draft(self, count: int) -> bool:
        """Whether any open request may draft ``count`` tokens more, 1 or above."""
        return any(
            draft.is_drafting and draft.until - len(draft.drafted) >= count
            for draft in self._drafts
        )

    @property
    def refused(self) -> list[int | None]:
        """[B]: the illegal token that ended the request's draft, None where there was none."""
        return [draft.refused for draft in self._drafts]

    @property
    def starved(self) -> list[int]:
        """[B]: positions at which the drafter's own vocabulary had no legal token."""
        return [draft.starved for draft in self._drafts]

    @property
    def tokens(self) -> list[list[int]]:
        """[B] lists: the tokens of the draft so far, the illegal one among them. Read only."""
        return [
            draft.drafted if draft.refused is None else [*draft.drafted, draft.refused]
            for draft in self._drafts
        ]

    @property
    def lengths(self) -> list[int]:
        """[B]: tokens of the draft so far, the illegal one among them."""
        return [len(draft.drafted) + (draft.refused is not None) for draft in self._drafts]

    @property
    def num_rows(self) -> list[int]:
        """[B]: mask rows that there are, from the first one on."""
        return [draft.num_rows if draft.is_tabled else draft.filled for draft in self._drafts]

    @property
    def is_tabled(self) -> list[bool]:
        """[B]: whether the device took the request's rows from a table, see ``leave``."""
        return [draft.is_tabled for draft in self._drafts]

    @contextmanager
    def until(self, ends: Sequence[int]) -> Iterator[None]:
        """Inside, a request counts as closed from ``ends`` [B] draft tokens on.

        So one proposer's turn ends, and requests that are advanced later wait.
        """
        before = [draft.until for draft in self._drafts]
        for draft, end in zip(self._drafts, ends, strict=True):
            draft.until = min(end, draft.until)
        try:
            yield
        finally:
            for draft, end in zip(self._drafts, before, strict=True):
                draft.until = end

    @contextmanager
    def pausing(self, pause: Pause | None) -> Iterator[None]:
        """Inside, a request's turn ends after a token where ``pause(request)`` is true.

        So another proposer takes over in a draft. None: no turn ends so.
        """
        before, self._pause = self._pause, pause
        try:
            yield
        finally:
            self._pause = before
            if before is None:
                for draft in self._drafts:
                    draft.is_paused = False

    def tabled(self, requests: Sequence[int], ahead: int) -> TabledTexts | None:
        """Of the requests that draft next, those whose rows the device can take from tables.

        requests: nothing is drafted of them yet. ahead: tokens of a draft at most. None where there
        is none.
        """
        starts = dict[TokenTable, TableStarts]()
        others, constraints = False, self._constraints
        for at in requests:
            constraint = constraints[at]
            if constraint is None:
                continue
            place = constraint.table_state(ahead)
            if place is None:
                others = True
                continue
            texts = starts.get(place.table)
            if texts is None:
                starts[place.table] = texts = TableStarts([], [])
            texts.requests.append(at)
            texts.states.append(place.state)
        return self._rows.tables.find(starts, len(self._drafts), others=others)

    def leave(self, texts: TabledTexts, sources: Tensor) -> None:
        """The device takes the rows of these texts from tables: none of theirs is filled here.

        sources: int64 [depths, B or more] there, where their rows lie once the draft is made; 0 for
        others, and for rows after the end of a text. ``peek`` is not allowed for these rows.
        """
        self._sources = sources
        for request, stops in texts.stops.items():
            self._drafts[request].stops = stops

    def keep_sources(self) -> None:
        """Copy the sources of ``leave``: the next draft may overwrite them."""
        if self._sources is not None:
            self._sources = self._sources.clone()

    def next_mask(self) -> Tensor | None:
        """int32 [B, W] on the device: what may come after each request's draft so far.

        None when no request is constrained. Rows of free and closed requests forbid nothing, and
        rows that the device takes from tables are not there yet: the caller of ``leave`` may write
        them into what is returned.
        """
        if not self._is_constrained:
            return None
        return self._rows.at_depths(self._next_depths(self._drafts))

    def next_rows(self, count: int, depth: int) -> list[int]:
        """Where the rows of ``next_mask`` lie on the host, [count]: addresses, 0 for a row that
        forbids nothing.

        count: B or more; those after the batch's own are 0. depth: so are those of requests whose
        drafts hold another number of tokens. The rows do not change until the step after the next
        one.
        """
        filled = self._fill_next([draft for draft in self._drafts if len(draft.drafted) == depth])
        return self._rows.addresses([(draft.request, depth) for draft in filled], count)

    def _next_depths(self, drafts: Sequence[RequestDraft]) -> list[int | None]:
        """Fill what comes next in these drafts; returns where those rows are, None for others."""
        depths: list[int | None] = [None] * len(self._drafts)
        for draft in self._fill_next(drafts):
            depths[draft.request] = len(draft.drafted)
        return depths

    def _fill_next(self, drafts: Sequence[RequestDraft]) -> list[RequestDraft]:
        """Fill the next row of each draft that goes on under a row of the host's; returns these."""
        constraints = self._constraints
        drafting = [
            draft
            for draft in drafts
            if draft.stops is None and draft.is_drafting and constraints[draft.request] is not None
        ]
        if drafting and self._fork_of is not Constraint.fork:
            self._wake()  # some may turn out to be over
            drafting = [draft for draft in drafting if draft.is_drafting]
        if drafting:
            self._fill(drafting)
        return drafting

    def accept(self, token_ids: Tensor, starved: Tensor | None = None) -> None:
        """Append one drafted token, int64 [B], to every open request; one download.

        -1 closes the request: nothing more is drafted. So does a token that its mask forbids; it
        may stand in the draft all the same, where the verifier refuses it.
        starved: bool [B], where the drafter's own vocabulary had no legal token; counted.
        """
        rows = [token_ids] if starved is None else [token_ids, starved.to(token_ids.dtype)]
        self.accept_ids(*torch.stack(rows).tolist())

    def accept_ids(
        self,
        token_ids: Sequence[int],
        starved: Sequence[int] | None = None,
        depth: int | None = None,
    ) -> None:
        """``accept`` of what the host has already; starved: [B] 0 or 1.

        depth: requests whose drafts hold another number of tokens are left alone; None: nobody is.
        """
        self._wake()
        for draft in self._drafts:
            if not draft.is_drafting or depth not in (None, len(draft.drafted)):
                continue
            if starved is not None:
                draft.starved += starved[draft.request]
            token_id = token_ids[draft.request]
            if token_id < 0:
                draft.is_open = False
            elif not self._is_refused(draft, token_id) and draft.append(token_id):
                if self._pause is not None:
                    self._check_pause(draft)
            else:
                draft.refuse(token_id)

    def accept_drawn(
        self,
        token_ids: Sequence[Sequence[int]],
        starved: Sequence[Sequence[int]],
        starts: Sequence[int],
    ) -> None:
        """Append what a device drew without a mask of the host's, [K] depths of [B] each.

        Of texts whose rows it took from tables, of free texts, and of those that it drew freely:
        their drafts end at the first illegal token, as in ``extend``.

        starts: [B] the position in each draft of the first token drawn.
        """
        self._wake()
        for draft in self._drafts:
            if not draft.is_drafting:
                continue
            row, first = draft.request, len(draft.drafted) - starts[draft.request]
            tokens = [at_depth[row] for at_depth in token_ids[first:]]
            if draft.is_tabled or (draft.fork is None and self._pause is None):
                looked = draft.append_drawn(tokens)
                draft.starved += sum(at_depth[row] for at_depth in starved[first : first + looked])
            else:  # without a mask, no position is starved
                self._extend_one(draft, [(token,) for token in tokens])

    def extend(self, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Append a list of tokens to each request; returns what was legal of each.

        Cut at the first illegal token and at the request's limit; -1 closes the request, as it does
        for ``accept``. Rows are not filled yet: that can wait until the target runs.
        """
        return self.extend_best([[(token,) for token in draft] for draft in drafts])

    def extend_best(self, options: Sequence[Iterable[Sequence[int]]]) -> list[list[int]]:
        """``extend`` by the first legal one of several tokens at each position.

        options: [B] with, for each position, tokens in the order of preference; a request's draft
            stops at an empty one. A position is asked for when ``drafted`` holds what was taken at
            the one before it.
        """
        self._wake()
        legal: list[list[int]] = []
        for draft, positions in zip(self._drafts, options, strict=True):
            start = len(draft.drafted)
            assert not (draft.is_tabled and positions)  # nobody has asked whether they are legal
            self._extend_one(draft, positions)
            legal.append(draft.drafted[start:])
        return legal

    def _extend_one(self, draft: RequestDraft, positions: Iterable[Sequence[int]]) -> None:
        for token_ids in positions:
            if not draft.is_drafting or not token_ids:
                return
            if token_ids[0] < 0:
                draft.is_open = False
                return
            if not any(map(draft.append, token_ids)):
                draft.refuse(token_ids[0])
                return
            self._check_pause(draft)

    def extend_forced(self, drafts: Sequence[Sequence[int]]) -> list[list[int]]:
        """``extend``, and the tokens count as forced by the grammar in the statistics."""
        starts = [len(draft.drafted) for draft in self._drafts]
        legal = self.extend(drafts)
        for positions, start, tokens in zip(self.forced, starts, legal, strict=True):
            positions.extend(range(start, start + len(tokens)))
        return legal

    def fork_of(self, request: int) -> Fork | None:
        """The fork of one request, at the end of its draft so far; None if free or closed.

        The caller must return it to the state it was in before any other call.
        """
        self._wake()
        draft = self._drafts[request]
        assert not draft.is_tabled
        return draft.fork if draft.is_open else None

    def peek(self, request: int) -> NDArray[np.int32] | None:
        """The mask row after one request's draft so far, [W] on the host; None if free or closed.

        Read only. It is the row that ``next_mask`` and ``finish`` hand out: it is not filled twice.
        """
        self._wake()
        draft = self._drafts[request]
        assert not draft.is_tabled
        if draft.fork is None or not draft.is_open:
            return None
        if draft.num_missing:
            self._fill([draft])
        return self._rows.words(request, len(draft.drafted))

    def fill_next(self) -> None:
        """Fill what ``peek`` reads of every open request, which costs less than one by one."""
        self._next_depths(self._drafts)

    def advance(self, draft: Draft, starts: Sequence[int] | None = None) -> Draft:
        """The draft to verify, advanced now if it was not, and cut where a request's turn ends.

        An illegal token stays in it, where the verifier refuses it.

        starts: ``lengths`` before it was made; None: nothing had been drafted.
        """
        starts = [0] * len(self._drafts) if starts is None else list(starts)
        if draft.token_ids.shape[1] == 0 or self.lengths != starts:
            return draft
        rows = zip(draft.token_ids.tolist(), draft.num_tokens.tolist(), strict=True)
        self.extend([row[:length] for row, length in rows])
        lengths = [now - start for now, start in zip(self.lengths, starts, strict=True)]
        device = draft.num_tokens.device
        return draft.cut(max(lengths))._replace(num_tokens=torch.tensor(lengths, device=device))

    def start(self) -> None:
        """Begin to fill the rows that are still missing, overlapped with what runs next."""
        if self._fork_of is None:  # nothing is drafted: one row each
            missing = len(self._drafts)
        else:
            missing = sum(draft.num_missing for draft in self._drafts)
        if self._is_constrained and missing >= ROWS_WORTH_A_THREAD:
            self._filling = self._rows.fill_overlapped(lambda: self._fill(self._drafts))

    def finish(self, num_draft: int) -> Tensor | None:
        """int32 [B, num_draft + 1, W] on the device: the mask of every target row.

        None when no request is constrained. Rows after the end of the text, after an illegal draft
        token and past a shorter draft's own last row forbid nothing; no such row is ever drawn
        from, or what is drawn there is dropped.
        """
        if not self._is_constrained:
            return None
        if self._filling is None:
            self._fill(self._drafts)
        else:
            self._filling.result()
        return self._rows.first(len(self._drafts), num_draft + 1, self._sources)

    def _is_refused(self, draft: RequestDraft, token_id: int) -> bool:
        """Whether the mask of the draft's next position lacks a token.

        The verifier goes by the mask, and a matcher's ``accept_token`` may admit more.
        """
        if draft.fork is None or draft.stops is not None:
            return False
        depth = len(draft.drafted)
        if draft.filled <= depth:
            self._fill([draft])
        return not self._rows.allows(draft.request, depth, token_id)

    def _check_pause(self, draft: RequestDraft) -> None:
        if self._pause is not None and draft.is_drafting:
            draft.is_paused = self._pause(draft.request)

    def _wake(self) -> None:
        """Something may be drafted, perhaps after all."""
        if self._fork_of is not Constraint.fork:
            self._take(Constraint.fork)

    def _take(self, fork_of: Callable[[Constraint], Fork]) -> None:
        """Take what the constraints draft with, or what fills the rows of a step without drafts."""
        self._fork_of = fork_of
        for draft, constraint in zip(self._drafts, self._constraints, strict=True):
            if constraint is not None and not draft.is_tabled:
                draft.take(fork_of(constraint))

    def _fill(self, drafts: Sequence[RequestDraft]) -> None:
        if self._fork_of is None:  # the draft is over, and nothing is in it
            self._take(Constraint.undrafted)
        started = time.perf_counter()
        self._filler.fill(drafts)
        self.fill_seconds += time.perf_counter() - started
