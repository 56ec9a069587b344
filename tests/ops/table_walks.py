"""Random tables of states, and texts that walk along them; run as a module it compares kernels."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from guided_spec.grammar.tables.token_table import ANY_NUMBER, OUTSIDE, TokenTable
from guided_spec.masks.rows import DeviceTables, TableStarts
from guided_spec.ops import table_rows

STEPS = 5


def random_table(seed: int, vocab_size: int, states: int = 7, classes: int = 5) -> TokenTable:
    """A table whose rows have nothing to do with its steps: both are only read."""
    dice = np.random.default_rng(seed)
    words = -(-vocab_size // 32)
    rows = dice.integers(-(2**31), 2**31, (states // 2 + 1, words)).astype(np.int32)
    return TokenTable(
        dice.integers(0, classes, vocab_size).astype(np.int32),
        dice.integers(OUTSIDE, states, (states, classes)).astype(np.int16),
        rows,
        dice.integers(0, len(rows), states).astype(np.int32),
        np.full(states, ANY_NUMBER, dtype=np.uint8),
        np.zeros(states, dtype=np.int32),
    )


class Walked(NamedTuple):
    """masks: int32 [STEPS + 1, B, W], of rows before each token and behind the last. cursors: int64
    [STEPS, B, 2], whether a text goes on and where it stands."""

    masks: Tensor
    cursors: Tensor


def starts_of(tables: Mapping[int, TokenTable | None], state: int) -> dict[TokenTable, TableStarts]:
    """Texts in one state each of their tables, by request."""
    found = dict[TokenTable, TableStarts]()
    for request, table in tables.items():
        if table is not None:
            requests, states = found.setdefault(table, TableStarts([], []))
            requests.append(request)
            states.append(state)
    return found


def start(tables: list[TokenTable | None], device: torch.device) -> tuple[DeviceTables, Tensor]:
    """The tables on the device, and the cursors of texts in the first state of each."""
    words = next(table.rows.shape[1] for table in tables if table is not None)
    placed = DeviceTables(device, words, 2**24)
    found = placed.find(starts_of(dict(enumerate(tables)), 0), len(tables), others=False)
    assert found is not None
    return placed, found.cursors.to(device)


def walk(ops: object, cursors: Tensor, token_ids: Tensor, words: int) -> Walked:
    """Texts from ``cursors`` [B, 6] on along token_ids [STEPS, B], by ``advance`` of ``ops``."""
    count = len(cursors)
    masks = torch.full((STEPS + 1, count, words), 7, dtype=torch.int32, device=cursors.device)
    states = torch.zeros(STEPS, count, 2, dtype=torch.int64, device=cursors.device)
    sources = cursors[:, table_rows.SOURCE].clone()
    for step, ids in enumerate(token_ids):
        ops.copy_rows(sources, masks[step])  # type: ignore[attr-defined]
        ops.advance(ids, cursors, sources)  # type: ignore[attr-defined]
        states[step, :, 0] = cursors[:, table_rows.CLASSES] != 0
        states[step, :, 1] = cursors[:, table_rows.STATE]
    ops.copy_rows(sources, masks[STEPS])  # type: ignore[attr-defined]
    return Walked(masks, states)


def host_walk(tables: list[TokenTable | None], token_ids: Tensor, words: int) -> Walked:
    """The same by the tables' own methods."""
    masks = torch.full((STEPS + 1, len(tables), words), 7, dtype=torch.int32)
    states = torch.zeros(STEPS, len(tables), 2, dtype=torch.int64)
    for text, table in enumerate(tables):
        state = 0 if table is not None else -1
        for step in range(STEPS + 1):
            if table is None or state < 0:
                break
            masks[step, text] = torch.from_numpy(table.row(state))
            token_id = int(token_ids[step, text]) if step < STEPS else -1
            state = table.after(state, token_id) if token_id >= 0 else -1
            if state >= 0:
                states[step, text] = torch.tensor([1, state])
    return Walked(masks, states)


def cases(seed: int, vocab_size: int, texts: int) -> tuple[list[TokenTable | None], Tensor]:
    """Tables of which two texts share one and some have none, and tokens of which some are none."""
    shared = random_table(seed, vocab_size)
    own = [random_table(seed + at, vocab_size, 3 + at, 2 + at) for at in range(texts)]
    tables = [None if at % 4 == 3 else shared if at % 4 < 2 else own[at] for at in range(texts)]
    token_ids = torch.randint(-1, vocab_size, (STEPS, texts))
    return tables, token_ids


def compare(ops: object, device: torch.device) -> None:
    """Assert that kernels do what tables say, for texts and rows of odd numbers."""
    torch.manual_seed(0)
    for seed, (vocab_size, texts) in enumerate([(12, 1), (4099, 7), (40_000, 3), (64, 300)]):
        tables, token_ids = cases(seed, vocab_size, texts)
        words = -(-vocab_size // 32)
        kept, cursors = start(tables, device)
        for is_blank in (False, True):
            check_rows_of_a_step(ops, cursors, words, is_blank=is_blank)
        check_following(ops, cursors, token_ids.to(device))
        found = walk(ops, cursors, token_ids.to(device), words)
        expected = host_walk(tables, token_ids, words)
        assert torch.equal(found.masks.cpu(), expected.masks), (vocab_size, texts)
        assert torch.equal(found.cursors.cpu(), expected.cursors), (vocab_size, texts)
        del kept


def check_following(ops: object, cursors: Tensor, token_ids: Tensor) -> None:
    """Several tokens of a step at once lead where they lead one by one; some texts get none.

    Cursors lie in any order, and one more row is of a text without a table, as another may be.
    """
    count, device = len(cursors), cursors.device
    counts = torch.randint(-1, STEPS + 1, (count + 2,), dtype=torch.int32, device=device)
    own = torch.zeros(count + 1, table_rows.CURSOR, dtype=torch.int64, device=device)
    order = torch.randperm(count, device=device)
    own[order] = cursors
    expected, sources = own.clone(), torch.empty(1, dtype=torch.int64, device=device)
    for text in range(count):
        at = int(order[text])
        for token_id in token_ids[: max(0, int(counts[text])), text]:
            if token_id >= 0:
                one = expected[at : at + 1]
                ops.advance(token_id.view(1), one, sources)  # type: ignore[attr-defined]
    texts = torch.cat([order, torch.full((2,), count, device=device)])
    wide = torch.cat([token_ids.T, token_ids[:, :1].T.expand(2, -1)]).to(torch.int32)
    ops.advance_committed(wide, counts, texts, own)  # type: ignore[attr-defined]
    assert torch.equal(own, expected)


def check_rows_of_a_step(ops: object, cursors: Tensor, words: int, *, is_blank: bool) -> None:
    """Two rows of a text have addresses, that of its first state or none; a third has not."""
    sources = torch.stack([cursors[:, table_rows.SOURCE], cursors[:, table_rows.SOURCE].flip(0)])
    out = torch.full((len(cursors), 3, words), 7, dtype=torch.int32, device=cursors.device)
    expected = torch.full_like(out, -1 if is_blank else 7)
    for depth, column in enumerate(sources):
        rows = expected[:, depth].contiguous()
        ops.copy_rows(column, rows)  # type: ignore[attr-defined]
        expected[:, depth] = rows
    ops.copy_rows(sources.T, out, is_blank=is_blank)  # type: ignore[attr-defined]
    assert torch.equal(out, expected)


if __name__ == "__main__":
    from guided_spec.ops import table_rows_triton

    compare(table_rows_triton, torch.device("cpu"))
    sys.stdout.write("equal\n")
