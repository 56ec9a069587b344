"""Requests whose texts advance in device tables of their grammars where vLLM drafts.

Every committed and every drafted token advances a text's state in its table on the device. So the
masks of a draft exist before the host has seen a token, and vLLM's scheduling stays ahead of the
device. The host reads the same tokens when they have arrived, and checks only whether a text has
left a table that holds a part of its grammar.

A table of another language would cost drafts and nothing else: the target's tokens are masked by
vLLM's scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.grammar.tables.token_table import TableState, TokenTable
from guided_spec.integrations.vllm.ranks import LATER, NEVER
from guided_spec.masks.rows import DeviceTables, TableAdvance, launch_table_rows
from guided_spec.ops.bitmask import only_legal_token
from guided_spec.ops.host import to_device
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.table_rows import CURSOR, advance_committed

TAIL = 4  # words after a drafter's row: the token that it has to take, else -1; then padding


def drafter_rows(rows: Tensor, own: Tensor | None) -> Tensor:
    """Mask rows int32 [R, W] as a drafter reads them: [R, W + TAIL].

    own: int32 [W], the tokens that the drafter knows; None: all. Where it knows no legal one, the
    row's only token comes after it; if there are several, the row forbids nothing: what is
    drafted is refused, and the draft is over.
    """
    only = torch.full_like(rows[:, :1], -1)
    if own is not None:
        is_lost = ((rows & own) == 0).all(1)
        only[:, 0] = torch.where(is_lost, only_legal_token(rows), -1)
        rows = rows.where((~is_lost).unsqueeze(1) | (only >= 0), -1)
    rest = only.new_full((len(rows), TAIL - 1), -1)
    return torch.cat([rows, only, rest], 1)


@dataclass(slots=True)
class _TabledRequest:
    """text: index of its cursor. table: that the cursor points into. state: after the tokens that
    the host has read, None in a table that no text leaves."""

    text: int
    table: TokenTable
    state: TableState | None


class TabledRequests:
    """The running requests whose grammars have tables, by vLLM's names.

    requests: at most, that run at a time. num_draft: K. vocab_size: V, of the target. own: int32
    [W], the tokens that the drafter knows; None: all. device: the drafter's. table_bytes: of its
    memory, for tables.
    """

    def __init__(
        self,
        requests: int,
        num_draft: int,
        vocab_size: int,
        own: NDArray[np.int32] | None,
        device: torch.device,
        table_bytes: int,
    ) -> None:
        known = None if own is None else torch.from_numpy(own).to(device)
        self._device, self._vocab_size = device, vocab_size
        self._words = num_mask_words(vocab_size)
        self._tables = DeviceTables(
            device, self._words, table_bytes, lambda rows: drafter_rows(rows, known)
        )
        # The last one is that of all who have no table.
        self._cursors = torch.zeros(requests + 1, CURSOR, dtype=torch.int64, device=device)
        self._draft = TableAdvance.of(num_draft, requests, device)
        self._free = list(range(requests))
        self._requests: dict[str, _TabledRequest] = {}
        self._in_use = Counter[TokenTable]()  # number of requests of each
        self._moved: dict[int, NDArray[np.int64]] = {}  # cursors that the device does not have yet
        self._names: list[str] | None = None  # of the batch that ``_texts`` is of
        self._texts = torch.empty(0, dtype=torch.int64, device=device)

    def compile_ahead(self) -> None:
        """Compile the kernels, on a CUDA device: the first table comes while requests are served.

        No request may use a table yet.
        """
        if self._device.type != "cuda":
            return
        from guided_spec.ops.launch_triton import compiling_ahead  # imported here: it needs triton

        with compiling_ahead():
            self.launch_all()

    def launch_all(self) -> None:
        """Launch each kernel of ``commit`` and of what ``start`` returns; advances no text.

        vLLM's runners have their tokens and counts in different types.
        """
        launch_table_rows(self._words + TAIL, self._device)
        none = torch.full((1,), len(self._cursors) - 1, device=self._device)
        for token_type, count_type in product((torch.int32, torch.int64), repeat=2):
            counts = torch.zeros(1, dtype=count_type, device=self._device)
            advance_committed(counts.to(token_type).view(1, 1), counts, none, self._cursors)

    def __contains__(self, name: str) -> bool:
        return name in self._requests

    def begin(self, name: str, table: TokenTable, token_ids: Sequence[int]) -> int:
        """Let a request advance in ``table`` from now on, after its committed tokens, if it can.

        Returns its table's fingerprint, else ``NEVER`` where the table does not hold its text, or
        ``LATER`` where memory is short for now.
        """
        states = table.states(0, token_ids)
        if len(states) < len(token_ids):
            return NEVER
        state = states[-1] if states else 0
        cursor = self._tables.cursor(table, state, self._in_use) if self._free else None
        if cursor is None:
            return LATER
        text = self._free.pop()
        kept = None if table.is_whole else TableState(table, state)
        self._requests[name] = _TabledRequest(text, table, kept)
        self._in_use[table] += 1
        self._moved[text] = cursor
        self._names = None
        return table.fingerprint

    def forget(self, name: str) -> None:
        """A request has ended, or continues without a table; any other name changes nothing."""
        request = self._requests.pop(name, None)
        if request is not None:
            self._free.append(request.text)
            self._in_use[request.table] -= 1
            if not self._in_use[request.table]:
                del self._in_use[request.table]
            self._moved[request.text] = np.zeros(CURSOR, dtype=np.int64)
            self._names = None

    def read(self, name: str, token_ids: Sequence[int]) -> None:
        """The host has read what a request committed; one that has left its table is forgotten."""
        request = self._requests.get(name)
        state = None if request is None else request.state
        if state is not None and not state.advance(token_ids):
            self.forget(name)

    def commit(self, names: Sequence[str], token_ids: Tensor, num_tokens: Tensor) -> None:
        """What a step sampled, as of ``GrammarRequests.note``; in all steps."""
        if self._requests:
            known = token_ids.where(token_ids < self._vocab_size, -1)  # vLLM's are none beyond
            advance_committed(known, num_tokens, self._texts_of(names), self._cursors)

    def start(self, names: Sequence[str]) -> TableAdvance | None:
        """Advances the drafts of a batch from the states of its texts; None where none has a table.

        It is in use until the next one is started.
        """
        if not any(name in self._requests for name in names):
            return None
        self._draft.begin(self._cursors.index_select(0, self._texts_of(names)))
        return self._draft

    def _texts_of(self, names: Sequence[str]) -> Tensor:
        """int64 [B]: the cursors of a batch, which are on the device then."""
        if self._moved:
            moved, self._moved = self._moved, {}
            rows = to_device(np.stack([*moved.values()]), self._device)
            self._cursors.index_copy_(0, to_device([*moved], self._device), rows)
        if self._names != names:
            none = len(self._cursors) - 1
            found = (self._requests.get(name) for name in names)
            texts = [none if one is None else one.text for one in found]
            self._texts, self._names = to_device(texts, self._device), [*names]
        return self._texts
