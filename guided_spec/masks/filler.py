"""Fills the mask rows of a step: draft by draft, or many drafts on several threads.

``RequestDraft`` is one request's draft: its fork, the tokens so far, and whether more may come.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import Any

from guided_spec.home import once_per_process
from guided_spec.masks.batch import RowBatch
from guided_spec.masks.constraint import Fork
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.host import named_range


class RequestDraft:
    """One request's draft in one step.

    request: its index in the batch. fork: None for a free text, and until it is needed.
    drafted: the legal draft tokens so far. filled: mask rows 0 to filled - 1 are filled.
    has_ended: the draft's last token ended the text, or the text was over from the start.
    is_open: nothing has ended the draft. limit: its tokens at most. until: the same for the
    proposer that drafts now. is_paused: another proposer goes on. refused: the illegal token that
    ended the draft. starved: positions at which the drafter knew none of the legal tokens.
    stops: where the device takes its rows from a table, the tokens that end a text there; no fork
    is needed then, since each token is drawn under its row. See ``Lookahead.leave``.
    """

    __slots__ = (
        "drafted",
        "filled",
        "fork",
        "has_ended",
        "is_open",
        "is_paused",
        "limit",
        "refused",
        "request",
        "starved",
        "stops",
        "until",
    )

    def __init__(self, request: int, fork: Fork | None, limit: int) -> None:
        self.request = request
        self.fork = fork
        self.limit = self.until = limit
        self.drafted: list[int] = []
        self.filled = 0
        self.has_ended = fork is not None and fork.text.is_terminated()
        self.is_open = limit > 0 and not self.has_ended
        self.is_paused = False
        self.stops: frozenset[int] | None = None
        self.refused: int | None = None
        self.starved = 0

    @property
    def is_tabled(self) -> bool:
        """Whether the device takes its rows from a table."""
        return self.stops is not None

    @property
    def num_rows(self) -> int:
        """Mask rows of the draft so far; there is none after a complete text."""
        return len(self.drafted) + (not self.has_ended)

    @property
    def num_missing(self) -> int:
        """Those of them that the host has to fill, and has not."""
        if self.fork is None or self.stops is not None:
            return 0
        missing = len(self.drafted) + (not self.has_ended) - self.filled
        return missing if missing > 0 else 0  # a third of the time of ``max``

    @property
    def is_drafting(self) -> bool:
        """Whether a token may be appended now."""
        return self.is_open and not self.is_paused and len(self.drafted) < self.until

    def append(self, token_id: int) -> bool:
        """Append a token; False, and no change, where the fork refuses it."""
        fork = self.fork
        if self.stops is not None:
            self.has_ended = token_id in self.stops
        elif fork is not None:
            if not fork.text.accept_token(token_id):
                return False
            self.has_ended = fork.text.is_terminated()
        self.drafted.append(token_id)
        self.is_open = not self.has_ended and len(self.drafted) < self.limit
        return True

    def append_drawn(self, token_ids: Sequence[int]) -> int:
        """Append tokens that nobody has to judge: of a free text, or drawn under a table's rows.

        Up to the first -1, which ends the draft. Returns how many were looked at.
        """
        drafted, stops, looked = self.drafted, self.stops or frozenset(), 0
        for token_id in token_ids[: self.until - len(drafted)]:
            looked += 1
            if token_id < 0:
                self.is_open = False
                break
            drafted.append(token_id)
            if token_id in stops:
                self.end()
                break
        self.is_open = self.is_open and len(drafted) < self.limit
        return looked

    def take(self, fork: Fork) -> None:
        """From here on the fork goes with the draft, of which there is nothing yet."""
        self.fork = fork
        if fork.text.is_terminated():  # it disagrees with its text, which fails at the commit
            self.end()

    def end(self) -> None:
        """The text is complete: the draft ends."""
        self.has_ended, self.is_open = True, False

    def refuse(self, token_id: int) -> None:
        """An illegal token ends the draft."""
        self.is_open, self.refused = False, token_id


# Seconds, in all and for each draft that is done, after which other threads help with those that
# are left. Most rows cost a few microseconds, and then waking threads costs more than they gain,
# however many rows there are: so this goes by time, not by the number of rows (``python -m
# benchmarks.masks.walks``).
PATIENCE = 0.003
SLOW_DRAFT = 0.00005
DRAFTS_AT_ONCE = 16  # before the first look at the clock; twice as many before each further one
# Seconds of a text's part of a step that are long. Where the rows of one depth are filled together,
# they may take so much, and some more for each, before each of their texts counts as a long one.
LONG = 0.02
LONG_ROW = 0.0003
# Walks that are worth a native call for the rows of one depth together.
DRAFTS_TOGETHER = 8
# More threads than this only wait for each other: between two native calls each needs the
# interpreter. Nor are there more than half the cores: where those are busy, one thread that has to
# wait for its turn holds up all the others, and that costs far more than the threads gain.
MOST_THREADS = 8


class RowFiller:
    """Fills the rows that the drafts of one step still lack.

    The rows are always the same: each draft's rows are filled by one thread, in order.
    """

    def __init__(self, rows: MaskRows) -> None:
        self._rows = rows
        self._batches = [RowBatch()]  # of each thread; the first of the one that calls ``fill``

    def fill(self, drafts: Sequence[RequestDraft], *, threads: int | None = None) -> None:
        """Fill every missing row of these drafts, up to the one after the last token so far.

        threads: that fill at once, this one among them; None: by what the rows turn out to cost.

        The forks end where they were before, at the ends of the drafts.
        """
        missing = [draft for draft in drafts if draft.num_missing]
        if not missing:
            return
        with named_range("fill masks"):
            if threads is None and len(missing) <= DRAFTS_AT_ONCE:
                self._fill_here(missing)
            elif threads is None:
                self._fill_patiently(missing)
            elif threads > 1:
                self._fill_apart(missing, threads)
            else:
                self._fill_here(missing)

    def _fill_patiently(self, drafts: Sequence[RequestDraft]) -> None:
        began = time.perf_counter()
        start, count = 0, DRAFTS_AT_ONCE
        while start < len(drafts):
            left = drafts[start:]
            threads = min(MOST_THREADS, cores() // 2, len(left))
            if threads > 1 and time.perf_counter() - began > max(PATIENCE, SLOW_DRAFT * start):
                self._fill_apart(left, threads)
                return
            self._fill_here(left[:count])
            start, count = start + count, 2 * count

    def _fill_here(self, drafts: Sequence[RequestDraft]) -> None:
        self._fill_share(drafts, self._batches[0])

    def _fill_apart(self, drafts: Sequence[RequestDraft], threads: int) -> None:
        """Deal the drafts out; this thread takes its share too."""
        self._batches += (RowBatch() for _ in range(len(self._batches), threads))
        own, *others = (drafts[start::threads] for start in range(threads))
        running: list[Future[None]] = [
            _pool().submit(self._fill_share, share, batch)
            for share, batch in zip(others, self._batches[1:], strict=False)
        ]
        try:
            self._fill_share(own, self._batches[0])
        finally:
            wait(running)  # whatever happens: nobody may write into the next step's rows
        for share in running:
            share.result()

    def _fill_share(self, drafts: Sequence[RequestDraft], batch: RowBatch) -> None:
        """One by one where they are few, or where it counts what each of them takes."""
        alone = [draft for draft in drafts if draft.fork is not None and draft.fork.is_timed]
        together = [draft for draft in drafts if draft not in alone] if alone else drafts
        if len(together) < DRAFTS_TOGETHER:
            alone, together = list(drafts), ()
        if together:
            self._fill_together(together, batch)
        if not alone:
            return
        cpu_began = time.thread_time()
        longest = max(map(self._fill_alone, alone), default=0.0)
        if longest > LONG and time.thread_time() - cpu_began > longest / 2:
            for draft in alone:
                if draft.fork is not None and draft.fork.seconds >= longest:
                    draft.fork.cpu_seconds = draft.fork.seconds

    def _fill_alone(self, draft: RequestDraft) -> float:
        """Returns the seconds that it took."""
        fork = draft.fork
        assert fork is not None
        began = fork.now()
        # Tokens may have been appended unfilled: back to the first missing row, and up again.
        if len(draft.drafted) > draft.filled:
            fork.rollback_to(draft.filled)
        for depth in range(draft.filled, len(draft.drafted)):
            self._rows.fill(fork.row_source, draft.request, depth)
            fork.text.accept_token(draft.drafted[depth])
            draft.filled = depth + 1
        if draft.num_missing:
            self._rows.fill(fork.row_source, draft.request, len(draft.drafted))
            draft.filled += 1
        seconds = fork.now() - began
        fork.seconds += seconds
        return seconds

    def _fill_together(self, drafts: Sequence[RequestDraft], batch: RowBatch) -> None:
        """Every draft's next missing row, then the row after that, ..."""
        for draft in drafts:
            if draft.fork is not None and len(draft.drafted) > draft.filled:
                draft.fork.rollback_to(draft.filled)
        while drafts:
            began = time.perf_counter()
            self._fill_level(batch, drafts)
            left: list[RequestDraft] = []
            for draft in drafts:
                at, draft.filled = draft.filled, draft.filled + 1
                if at < len(draft.drafted) and draft.fork is not None:
                    draft.fork.text.accept_token(draft.drafted[at])
                    if draft.num_missing:
                        left.append(draft)
            seconds = time.perf_counter() - began
            if seconds > LONG + LONG_ROW * len(drafts):  # one of them takes long
                for draft in drafts:
                    if draft.fork is not None:
                        draft.fork.seconds += seconds
            drafts = left

    def _fill_level(self, batch: RowBatch, drafts: Sequence[RequestDraft]) -> None:
        """One row of each draft: those that ``batch`` takes in one call, others one by one."""
        matchers: list[Any] = []
        cells: list[tuple[int, int]] = []
        restricted: list[RequestDraft] = []
        for draft in drafts:
            fork = draft.fork
            assert fork is not None
            matcher = fork.text.own_matcher if fork.kept is None else None
            if not batch.takes(matcher):
                self._rows.fill(fork.row_source, draft.request, draft.filled)
                continue
            matchers.append(matcher)
            cells.append((draft.request, draft.filled))
            if fork.text.is_restricted:
                restricted.append(draft)
        if matchers:
            self._rows.fill_many(batch, matchers, cells)
        for draft in restricted:
            assert draft.fork is not None
            draft.fork.text.restrict(self._rows.words(draft.request, draft.filled))


@cache
def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@once_per_process
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS - 1, thread_name_prefix="guided-spec-rows")
