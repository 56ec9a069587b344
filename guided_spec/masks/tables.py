"""Tables of grammars where drafts are made, and the rows of a step that come from there."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.grammar.tables.token_table import TableState, TokenTable
from guided_spec.ops.table_rows import CURSOR, SOURCE, STATE, advance, copy_rows

__all__ = ["DeviceTables", "TableWalk", "TabledTexts"]


class TabledTexts(NamedTuple):
    """The texts of a step whose rows the device takes from tables itself.

    requests: which of the batch. cursors: int64 [B, 6] on the host, see ``ops.table_rows``; zeros
    for the others. is_alone: whether nobody else of those that draft needs a row of the host's.
    """

    requests: Sequence[int]
    cursors: Tensor
    is_alone: bool


class TableWalk(NamedTuple):
    """Where the texts of a step go along their tables while they are drafted, token by token.

    cursors: int64 [K + 1, R, 6], see ``ops.table_rows``, before each token and behind the last;
    zeros for texts without a table. sources: int64 [K + 1, R], see ``Lookahead.leave``.

    Each place is written from the one before it, so that a step may be done again.
    """

    cursors: Tensor
    sources: Tensor

    @classmethod
    def of(cls, length: int, rows: int, device: torch.device) -> TableWalk:
        """Memory for ``length`` tokens of as many rows."""
        cursors = torch.zeros(length + 1, rows, CURSOR, dtype=torch.int64, device=device)
        return cls(cursors, cursors.new_zeros(length + 1, rows))

    def begin(self, cursors: Tensor) -> None:
        """From here on they are those of ``TabledTexts``, int64 [B, 6]; rows behind have none."""
        count = len(cursors)
        self.cursors[0, :count].copy_(cursors, non_blocking=True)
        self.cursors[0, count:] = 0
        self.sources[0] = self.cursors[0, :, SOURCE]

    def mask(self, place: int, out: Tensor) -> None:
        """Copy the rows before token ``place`` to ``out``, int32 [B, W]; others' are left alone."""
        copy_rows(self.sources[place, : len(out)], out)

    def append(self, place: int, token_ids: Tensor) -> None:
        """Token ``place`` of each text is this one, int64 [B] target ids; -1 for none."""
        count = len(token_ids)
        cursors = self.cursors[place + 1, :count].copy_(self.cursors[place, :count])
        advance(token_ids, cursors, self.sources[place + 1, :count])


class _Held(NamedTuple):
    """A table on the device: its parts, and a cursor of each state, int64 [N, 6] on the host."""

    parts: tuple[Tensor, ...]
    cursors: NDArray[np.int64]


class DeviceTables:
    """The tables that running texts use, in the device's memory; the others go as room is needed.

    words: W. limit: bytes in all. Texts whose table finds no room beside those in use have none.
    """

    def __init__(self, device: torch.device, words: int, limit: int) -> None:
        self._device, self._words = device, words
        self._limit = limit
        # In the order of their last use. No LRUCache: what this step's texts need must stay.
        self._held: dict[TokenTable, _Held] = {}

    def find(
        self, starts: Mapping[int, TableState], requests: int, *, others: bool
    ) -> TabledTexts | None:
        """Of a batch of ``requests``, those whose tables are there, and from where they go on.

        starts: by request. others: whether anybody else drafts under rows of the host's.

        None where there is none. What is evicted may still be read by what was launched before on
        the current stream.
        """
        cursors = np.zeros((requests, CURSOR), dtype=np.int64)
        by_table: dict[TokenTable, tuple[list[int], list[int]]] = {}
        for request, (table, state) in starts.items():
            texts, states = by_table.setdefault(table, ([], []))
            texts.append(request)
            states.append(state)
        found = list[int]()
        for table, (texts, states) in by_table.items():
            held = self._take(table, by_table)
            if held is not None:
                cursors[texts] = held.cursors[states]
                found += texts
        if not found:
            return None
        is_alone = not others and len(found) == len(starts)
        return TabledTexts(found, torch.from_numpy(cursors), is_alone)

    def _take(self, table: TokenTable, wanted: Container[TokenTable]) -> _Held | None:
        held = self._held.pop(table, None)
        if held is None:
            if not self._evict(table.memory_size_bytes, wanted):
                return None
            held = self._hold(table)
        self._held[table] = held
        return held

    def _evict(self, size: int, wanted: Container[TokenTable]) -> bool:
        left = self._limit - sum(table.memory_size_bytes for table in self._held)
        for table in list(self._held):
            if left >= size:
                break
            if table not in wanted:
                del self._held[table]
                left += table.memory_size_bytes
        return left >= size

    def _hold(self, table: TokenTable) -> _Held:
        assert table.rows.shape[1] == self._words  # else kernels would read what lies behind
        classes, then, rows = (
            torch.tensor(part).to(self._device) for part in (table.classes, table.then, table.rows)
        )
        at = rows.data_ptr() + table.row_of.astype(np.int64) * table.rows.strides[0]
        row_at = torch.as_tensor(at, device=self._device)
        count, width = table.then.shape
        cursors = np.empty((count, CURSOR), dtype=np.int64)
        cursors[:, :STATE] = classes.data_ptr(), then.data_ptr(), width, row_at.data_ptr()
        cursors[:, STATE], cursors[:, SOURCE] = np.arange(count), at
        return _Held((classes, then, rows, row_at), cursors)
