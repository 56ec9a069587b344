"""Tables of grammars where drafts are made, and the rows of a step that come from there."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.grammar.tables.token_table import TablePlace, TokenTable
from guided_spec.ops.table_rows import CURSOR, SOURCE, STATE

__all__ = ["DeviceTables", "TabledTexts"]


class TabledTexts(NamedTuple):
    """The texts of a step whose rows the device takes from tables itself.

    requests: which of the batch. cursors: int64 [B, 6] on the host, see ``ops.table_rows``; zeros
    for the others. is_alone: whether nobody else of those that draft needs a row of the host's.
    """

    requests: Sequence[int]
    cursors: Tensor
    is_alone: bool


class _Placed(NamedTuple):
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
        self._placed: dict[TokenTable, _Placed] = {}  # in the order of their last use

    def find(
        self, places: Mapping[int, TablePlace], requests: int, *, others: bool
    ) -> TabledTexts | None:
        """Of a batch of ``requests``, those whose tables are there, and from where they go on.

        places: by request. others: whether anybody else drafts under rows of the host's.

        None where there is none. What is evicted may still be read by what was launched before on
        the current stream.
        """
        cursors = np.zeros((requests, CURSOR), dtype=np.int64)
        by_table: dict[TokenTable, tuple[list[int], list[int]]] = {}
        for request, (table, state) in places.items():
            texts, states = by_table.setdefault(table, ([], []))
            texts.append(request)
            states.append(state)
        found = list[int]()
        for table, (texts, states) in by_table.items():
            placed = self._take(table, by_table)
            if placed is not None:
                cursors[texts] = placed.cursors[states]
                found += texts
        if not found:
            return None
        is_alone = not others and len(found) == len(places)
        return TabledTexts(found, torch.from_numpy(cursors), is_alone)

    def _take(self, table: TokenTable, wanted: Container[TokenTable]) -> _Placed | None:
        placed = self._placed.pop(table, None)
        if placed is None:
            if not self._make_room(table.memory_size_bytes, wanted):
                return None
            placed = self._place(table)
        self._placed[table] = placed
        return placed

    def _make_room(self, size: int, wanted: Container[TokenTable]) -> bool:
        left = self._limit - sum(table.memory_size_bytes for table in self._placed)
        for table in list(self._placed):
            if left >= size:
                break
            if table not in wanted:
                del self._placed[table]
                left += table.memory_size_bytes
        return left >= size

    def _place(self, table: TokenTable) -> _Placed:
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
        return _Placed((classes, then, rows, row_at), cursors)
