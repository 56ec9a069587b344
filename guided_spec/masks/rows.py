"""The mask rows of a step: filled on the host, read where the model runs.

The host's memory for rows, which forbid nothing while they are untouched, and how they get to a
CUDA device; and the tables there that rows can come from instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.grammar.protocol import RowSource
from guided_spec.grammar.tables.token_table import TokenTable
from guided_spec.home import once_per_process
from guided_spec.masks.batch import RowBatch
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.table_rows import CURSOR, SOURCE, STATE, advance, copy_rows


class TabledTexts(NamedTuple):
    """The texts of a step whose rows the device takes from tables itself.

    stops: by request of the batch, the tokens that end it. cursors: int64 [B, 6] on
    the host, see ``ops.table_rows``; zeros for the others. is_alone: whether nobody else of those
    that draft needs a row of the host's.
    """

    stops: Mapping[int, frozenset[int]]
    cursors: Tensor
    is_alone: bool


class TableStarts(NamedTuple):
    """The texts of a batch that are in one table: which requests, and in which states."""

    requests: list[int]
    states: list[int]


class TableAdvance(NamedTuple):
    """The states of a step's texts in their tables while they are drafted, token by token.

    cursors: int64 [K + 1, R, 6], see ``ops.table_rows``, before each token and after the last;
    zeros for texts without a table. sources: int64 [K + 1, R], see ``Lookahead.leave``.

    Each row of cursors is computed from the one before it, so that a step may be repeated.
    """

    cursors: Tensor
    sources: Tensor

    @classmethod
    def of(cls, length: int, rows: int, device: torch.device) -> TableAdvance:
        """Memory for ``length`` tokens of as many rows."""
        cursors = torch.zeros(length + 1, rows, CURSOR, dtype=torch.int64, device=device)
        return cls(cursors, cursors.new_zeros(length + 1, rows))

    def begin(self, cursors: Tensor) -> None:
        """Start from the cursors of ``TabledTexts``, int64 [B, 6]; further rows have no table."""
        count = len(cursors)
        self.cursors[0, :count].copy_(cursors, non_blocking=True)
        self.cursors[0, count:] = 0
        self.sources[0] = self.cursors[0, :, SOURCE]

    def mask(self, index: int, out: Tensor, *, is_blank: bool = False) -> None:
        """Copy the rows before token ``index`` to ``out``, int32 [B, W]; others' are left alone.

        is_blank: others' forbid nothing.
        """
        copy_rows(self.sources[index, : len(out)], out, is_blank=is_blank)

    def append(self, index: int, token_ids: Tensor) -> None:
        """Token ``index`` of each text is this one, int64 [B] target ids; -1 for none."""
        count = len(token_ids)
        cursors = self.cursors[index + 1, :count].copy_(self.cursors[index, :count])
        advance(token_ids, cursors, self.sources[index + 1, :count])


def launch_table_rows(words: int, device: torch.device) -> None:
    """Launch each kernel of ``TableAdvance`` for rows of ``words``, to compile them ahead.

    A table may come at any time: the texts of that step would wait for the compilation.
    """
    texts = TableAdvance.of(1, 1, device)
    rows = torch.empty(1, words, dtype=torch.int32, device=device)
    for is_blank in (False, True):
        texts.mask(0, rows, is_blank=is_blank)
    texts.append(0, torch.zeros(1, dtype=torch.int64, device=device))


class _Held(NamedTuple):
    """A table on the device: its parts, and a cursor of each state, int64 [N, 6] on the host.

    size: bytes that it counts for.
    """

    size: int
    parts: tuple[Tensor, ...]
    cursors: NDArray[np.int64]


SHARE = 64  # one of so many bytes of a device may hold tables
STEPS_IN_FLIGHT = 2  # whose rows are read at a time


def default_table_bytes(device: torch.device) -> int:
    """What tables may take of a device's memory where nobody says it.

    Of 80 GB that is enough for those of some 600 grammars of JSON documents.
    """
    if device.type != "cuda":
        return 2**28
    total: int = torch.cuda.get_device_properties(device).total_memory
    return total // SHARE


class DeviceTables:
    """The tables that running texts use, in device memory; others are evicted as needed.

    words: W. limit: bytes in all. Texts whose table does not fit next to those in use, or on the
    device, have none.
    prepare: maps a table's rows, int32 [R, W], before they are stored; None: unchanged.
    """

    def __init__(
        self,
        device: torch.device,
        words: int,
        limit: int,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._device, self._words = device, words
        self._left = limit  # bytes
        self._prepare = prepare
        # In the order of their last use. No LRUCache: what this step's texts need must stay.
        self._held: dict[TokenTable, _Held] = {}
        # What went in the last calls of ``find``: steps that are launched still read it.
        self._gone = deque[list[_Held]](maxlen=STEPS_IN_FLIGHT + 1)

    def find(
        self, starts: Mapping[TokenTable, TableStarts], requests: int, *, others: bool
    ) -> TabledTexts | None:
        """Of a batch of ``requests``, those whose tables are there, and from where they go on.

        others: whether any other request drafts under rows of the host's.

        None where there is none. Evicted memory does not change as long as the last
        ``STEPS_IN_FLIGHT`` launched steps may read it.
        """
        self._gone.append([])
        cursors = np.zeros((requests, CURSOR), dtype=np.int64)
        stops = dict[int, frozenset[int]]()
        for table, (texts, states) in starts.items():
            held = self._take(table, starts)
            if held is None:
                others = True
                continue
            cursors[texts] = held.cursors[states]
            stops |= dict.fromkeys(texts, table.stops)
        return TabledTexts(stops, torch.from_numpy(cursors), not others) if stops else None

    def cursor(
        self, table: TokenTable, state: int, in_use: Container[TokenTable]
    ) -> NDArray[np.int64] | None:
        """int64 [6]: a text in a state of a table, see ``ops.table_rows``; None if it cannot fit.

        in_use: tables that must stay.
        """
        held = self._take(table, in_use)
        return None if held is None else held.cursors[state]

    def _take(self, table: TokenTable, wanted: Container[TokenTable]) -> _Held | None:
        held = self._held.pop(table, None)
        if held is None:
            size = table.memory_size_bytes
            if not self._evict(size, wanted):
                return None
            try:
                held = self._hold(table, size)
            except torch.OutOfMemoryError:
                return None
            self._left -= size
        self._held[table] = held
        return held

    def _evict(self, size: int, wanted: Container[TokenTable]) -> bool:
        """Whether so many bytes fit; tables that are not wanted are evicted if that helps."""
        if self._left >= size:
            return True
        spare = [table for table in self._held if table not in wanted]
        if self._left + sum(self._held[table].size for table in spare) < size:
            return False
        for table in spare:
            gone = self._held.pop(table)
            self._left += gone.size
            if self._gone:
                self._gone[-1].append(gone)
            if self._left >= size:
                break
        return True

    def _hold(self, table: TokenTable, size: int) -> _Held:
        assert table.rows.shape[1] == self._words  # else kernels would read out of bounds
        classes, then = self._upload(table.classes), self._upload(table.then)
        rows = self._upload(table.rows)
        if self._prepare is not None:
            rows = self._prepare(rows)
        at = rows.data_ptr() + table.row_of.astype(np.int64) * rows.stride(0) * rows.itemsize
        row_at = self._upload(at)
        count, width = table.then.shape
        cursors = np.empty((count, CURSOR), dtype=np.int64)
        cursors[:, :STATE] = classes.data_ptr(), then.data_ptr(), width, row_at.data_ptr()
        cursors[:, STATE], cursors[:, SOURCE] = np.arange(count), at
        return _Held(size, (classes, then, rows, row_at), cursors)

    def _upload(self, part: NDArray[Any]) -> Tensor:
        """A copy on the device, ordered on the current stream; not waited for.

        Its readers must run on that stream too, or wait for it.
        """
        if self._device.type != "cuda":
            return torch.tensor(part)
        # From other memory the host would wait until the device has done all before. torch keeps
        # this as long as the copy needs it.
        dtype = torch.from_numpy(np.empty(0, part.dtype)).dtype
        own = torch.empty(part.shape, dtype=dtype, pin_memory=True)
        own.numpy()[...] = part
        return own.to(self._device, non_blocking=True)


class MaskBlock:
    """int32 [rows, W], cleared and filled again in every step; row ``rows`` is never filled.

    words: W. is_pinned: whether a CUDA device can copy from it while the host goes on.
    memory: the address of the first row, and the bytes of a row.

    ``clear`` writes nothing: a row that is not filled again is set to all ones when it is read.
    """

    def __init__(self, rows: int, words: int, *, is_pinned: bool) -> None:
        self._rows = torch.full((rows + 1, words), -1, dtype=torch.int32, pin_memory=is_pinned)
        self._array: NDArray[np.int32] = self._rows.numpy()
        # Single words are read in a quarter of the time.
        self._words: memoryview[int] = memoryview(self._array)  # type: ignore[arg-type]
        self.memory = (self._rows.data_ptr(), words * self._rows.element_size())
        self._num_ids = words * 32
        self._is_filled = np.zeros(rows + 1, dtype=np.bool_)
        self._is_stale = np.zeros(rows + 1, dtype=np.bool_)  # holds what an earlier step filled
        self._copies: list[torch.cuda.Event] = []

    def clear(self) -> None:
        """Forget what was filled. Waits for the copies that are still running."""
        for copied in self._copies:
            copied.synchronize()
        self._copies.clear()
        self._is_stale |= self._is_filled
        self._is_filled[:] = False

    def hold(self, copied: torch.cuda.Event) -> None:
        """A copy from here is running: the next ``clear`` waits for its event."""
        self._copies.append(copied)

    def fill(self, matcher: RowSource, row: int) -> None:
        """Fill one row from the matcher's state."""
        self._is_filled[row] = True  # first: a matcher that fails may have written a part of it
        matcher.fill_next_token_bitmask(self._rows, row)

    def fill_many(self, batch: RowBatch, matchers: Sequence[Any], rows: list[int]) -> None:
        """Fill ``rows`` from as many matchers that ``batch`` takes, in one call."""
        self._is_filled[rows] = True
        batch.fill(matchers, self._array, rows)

    def is_filled(self, rows: Sequence[int] | slice) -> bool:
        """Whether any of these rows is filled."""
        return bool(self._is_filled[rows].any())

    def allows(self, row: int, token_id: int) -> bool:
        """Whether a row admits a token; it admits no ids that it has no bit for."""
        if not 0 <= token_id < self._num_ids:
            return False
        if not self._is_filled[row]:
            self._restore(row, row + 1)
        return bool((self._words[row, token_id >> 5] >> (token_id & 31)) & 1)

    def row(self, row: int) -> NDArray[np.int32]:
        """One row, int32 [W]: a view."""
        if self._is_stale[row] and not self._is_filled[row]:
            self._restore(row, row + 1)
        found: NDArray[np.int32] = self._array[row]
        return found

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop - 1``, int32 [stop - start, W]: a view, contiguous."""
        self._restore(start, stop)
        return self._rows[start:stop]

    def gather(self, rows: Sequence[int], out: Tensor | None = None) -> Tensor:
        """A copy of rows in any order, int32 [len(rows), W] on the host; in ``out`` if passed."""
        for row in rows:
            self.row(row)
        return torch.index_select(self._rows, 0, torch.tensor(rows), out=out)

    def _restore(self, start: int, stop: int) -> None:
        is_left = self._is_stale[start:stop] & ~self._is_filled[start:stop]
        if is_left.any():
            self._array[start:stop][is_left] = -1
            self._is_stale[start:stop] &= ~is_left


class Uploaded(NamedTuple):
    """Rows on the device, and the event after which their host memory may change again."""

    rows: Tensor
    copied: torch.cuda.Event


class MaskUpload:
    """Memory for [requests, depths] rows on the device, at a fixed address.

    So a CUDA graph may read from it: the rows of as many requests and depths lie at the same
    address in every step. The next step overwrites it, after everything that was launched on the
    current stream before ``begin``.
    """

    def __init__(self, requests: int, depths: int, words: int, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        shape = (requests * depths, words)
        self._rows = torch.empty(shape, dtype=torch.int32, device=device)
        self._next = torch.empty(requests, words, dtype=torch.int32, device=device)
        self._staged = torch.empty(requests, words, dtype=torch.int32, pin_memory=True)
        self._is_sent = torch.cuda.Event()  # the last copy from ``_staged``
        self._is_read = torch.cuda.Event()  # the last step's readers of ``_rows``

    def begin(self) -> None:
        """Start a step: what was launched so far still reads the last step's rows."""
        self._is_read.record(torch.cuda.current_stream(self._device))

    def verify_buffer(self, requests: int, depths: int) -> Tensor:
        """[requests, depths, W] to be written, where ``verify_rows`` would leave others."""
        return self._rows[: requests * depths].view(requests, depths, -1)

    def blank_next(self, requests: int) -> Tensor:
        """[requests, W] that forbid nothing, where ``next_rows`` would leave others."""
        return self._next[:requests].fill_(-1)

    def verify_rows(self, rows: Tensor, requests: int) -> Uploaded:
        """Pinned int32 [depths * requests, W] to the device, as [requests, depths, W].

        The copy overlaps the forward, on its own stream; the current stream waits for it.
        """
        depths, words = len(rows) // requests, rows.shape[1]
        found = self._rows[: len(rows)].view(requests, depths, words)
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._is_read)
            if requests == 1 or depths == 1:
                found.view_as(rows).copy_(rows, non_blocking=True)
                copied = self._side.record_event()
            else:
                # One contiguous copy, turned round over there: a host that gathers is slower.
                arrived = rows.to(self._device, non_blocking=True)
                copied = self._side.record_event()
                found.copy_(arrived.view(depths, requests, words).transpose(0, 1))
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        return Uploaded(found, copied)

    def stage(self, requests: int) -> Tensor:
        """Pinned int32 [requests, W] to gather rows in, for ``next_rows``."""
        self._is_sent.synchronize()
        return self._staged[:requests]

    def next_rows(self, rows: Tensor) -> Uploaded:
        """Pinned int32 [requests, W] to the device, on the current stream: it waits for them."""
        found = self._next[: len(rows)]
        found.copy_(rows, non_blocking=True)
        copied = torch.cuda.current_stream(self._device).record_event()
        if rows.data_ptr() == self._staged.data_ptr():
            self._is_sent = copied
        return Uploaded(found, copied)


class MaskRows:
    """Rows [requests, depths] of one vocabulary, each int32 [W]; reused from step to step.

    A row that nobody fills in a step reads as all ones: nothing forbidden.

    In memory all requests' rows of one depth lie together, so that both what a drafter asks for
    (one depth) and what the verifier asks for (the first depths) is one contiguous piece. For a
    CUDA device the memory is pinned, the copies do not block the host, and two blocks of it
    alternate: a step begins while the last one's rows may still be copied.

    table_bytes: what the tables of running texts may take on the device, see ``tables``.
    """

    def __init__(
        self,
        requests: int,
        depths: int,
        vocab_size: int,
        device: torch.device,
        table_bytes: int = 0,
    ) -> None:
        self.requests = requests
        self.depths = depths
        self.device = device
        words = num_mask_words(vocab_size)
        self.tables = DeviceTables(device, words, table_bytes)
        is_cuda = device.type == "cuda"
        self._block, *self._blocks = (
            MaskBlock(requests * depths, words, is_pinned=is_cuda) for _ in range(1 + is_cuda)
        )
        self._none = requests * depths  # the row of a block that forbids nothing
        self._upload = MaskUpload(requests, depths, words, device) if is_cuda else None
        self._active = requests
        self._filling: Future[None] | None = None

    def clear(self, requests: int | None = None) -> None:
        """Start a step with this many requests, all of them by default; nothing is filled.

        What ``first`` and ``at_depths`` returned in the step before may change from here on, for
        whatever is launched later.
        """
        self.synchronize()
        self._active = self.requests if requests is None else requests
        assert self._active <= self.requests
        self._blocks.append(self._block)
        self._block = self._blocks.pop(0)
        self._block.clear()
        if self._upload is not None:
            self._upload.begin()

    def synchronize(self) -> None:
        """Wait for the thread that still fills rows of a step that raised."""
        if self._filling is not None:
            self._filling.exception()
            self._filling = None

    def fill_overlapped(self, fill: Callable[[], None]) -> Future[None]:
        """Run ``fill``, which fills rows of this step, on another thread."""
        self._filling = _fill_thread().submit(fill)
        return self._filling

    def fill(self, matcher: RowSource, request: int, depth: int) -> None:
        """Fill one row from the matcher's state."""
        self._block.fill(matcher, depth * self._active + request)

    def fill_many(
        self, batch: RowBatch, matchers: Sequence[Any], cells: Sequence[tuple[int, int]]
    ) -> None:
        """Fill the row at ``cells[i]``, (request, depth), from matcher i, for all i, in one call.

        ``batch`` takes all the matchers.
        """
        rows = [depth * self._active + request for request, depth in cells]
        self._block.fill_many(batch, matchers, rows)

    def allows(self, request: int, depth: int, token_id: int) -> bool:
        """Whether the row admits the token; ids outside the vocabulary are never admitted."""
        return self._block.allows(depth * self._active + request, token_id)

    def words(self, request: int, depth: int) -> NDArray[np.int32]:
        """One row, int32 [W], on the host: a view."""
        return self._block.row(self._at(request, depth))

    def at_depths(self, depths: Sequence[int | None]) -> Tensor:
        """int32 [B, W] on the device: for request b its row at ``depths[b]``; all ones at None.

        On a CUDA device it is the same memory at every call: copy the rows to keep them longer.
        """
        assert len(depths) == self._active
        active = self._active
        asked = [at * active + b for b, at in enumerate(depths) if at is not None]
        if not self._block.is_filled(asked):
            return self._blank_next(len(depths))
        depth = self._common(depths)
        if depth is not None:
            rows = self._block.rows(self._at(0, depth), self._at(0, depth + 1))
            if self._upload is None:
                return rows.clone()
            sent = self._upload.next_rows(rows)
            self._block.hold(sent.copied)
            return sent.rows
        numbers = [self._none if at is None else self._at(b, at) for b, at in enumerate(depths)]
        if self._upload is None:
            return self._block.gather(numbers)
        staged = self._upload.stage(len(depths))
        self._block.gather(numbers, staged)
        return self._upload.next_rows(staged).rows

    def addresses(self, cells: Sequence[tuple[int, int]], count: int) -> list[int]:
        """Where the filled rows at ``cells``, (request, depth), lie on the host: [count].

        By request; 0 for the others, which forbid nothing. They are valid until the second
        ``clear`` from now.
        """
        addresses, start, size = [0] * count, *self._block.memory
        for request, depth in cells:
            addresses[request] = start + (depth * self._active + request) * size
        return addresses

    def first(self, requests: int, depths: int, sources: Tensor | None = None) -> Tensor:
        """int32 [requests, depths, W] on the device: the first rows of the step's requests.

        sources: int64 [D, requests or more] there, addresses of rows that replace the first D; 0
        leaves a row as it is.

        Contiguous; on a CUDA device at the same address for the same two numbers.
        """
        if sources is None:
            return self._sent(requests, depths)
        is_filled = self._block.is_filled(slice(depths * requests))
        if self._upload is None:
            found = self._sent(requests, depths).clone()  # of one request they are the block's own
        elif is_filled:
            found = self._sent(requests, depths)
        else:
            found = self._upload.verify_buffer(requests, depths)
        copy_rows(sources[:depths, :requests].T, found, is_blank=not is_filled)
        return found

    def _sent(self, requests: int, depths: int) -> Tensor:
        """``first`` of what the host filled."""
        assert requests == self._active
        rows = self._block.rows(0, depths * requests)
        if self._upload is None:
            return rows.view(depths, requests, -1).transpose(0, 1).contiguous()
        sent = self._upload.verify_rows(rows, requests)
        self._block.hold(sent.copied)
        return sent.rows

    def _blank_next(self, requests: int) -> Tensor:
        if self._upload is not None:
            return self._upload.blank_next(requests)
        return self._block.gather([self._none] * requests)

    def _at(self, request: int, depth: int) -> int:
        return depth * self._active + request

    def _common(self, depths: Sequence[int | None]) -> int | None:
        """The one depth asked for, if the rows of requests without one are untouched there."""
        asked = {depth for depth in depths if depth is not None}
        if len(asked) != 1:
            return None
        (depth,) = asked
        others = [self._at(b, depth) for b, at in enumerate(depths) if at is None]
        return None if self._block.is_filled(others) else depth


def row_allows(row: NDArray[np.int32], token_id: int) -> bool:
    """Whether a row, int32 [W] on the host, admits the token; it admits no other ids."""
    return 0 <= token_id < len(row) * 32 and bool((int(row[token_id >> 5]) >> (token_id & 31)) & 1)


@once_per_process
def _fill_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="guided-spec-masks")
