"""Lattices over random tables, and the paths of the host; run as a module it compares kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from guided_spec.grammar.tables.token_table import TokenTable
from guided_spec.ops.table_rows import TablePaths
from guided_spec.proposers.block_draft import Lattice
from tests.ops.table_walks import random_table, start

__all__ = ["compare"]

Paths = Callable[[Tensor, Tensor, Tensor | None, Tensor, int], TablePaths]


class Case(NamedTuple):
    """Texts [R], some without a table, and their candidates; see ``first_legal_paths``."""

    tables: list[TokenTable | None]
    token_ids: Tensor
    scores: Tensor
    gains: Tensor | None


def sparse_table(seed: int, vocab_size: int) -> TokenTable:
    """Of its rows some allow half of all tokens, some a few, one token, or none."""
    dice = np.random.default_rng(seed)
    table = random_table(seed, vocab_size, states=9, classes=6)
    rows = np.zeros_like(table.rows)
    rows[0] = table.rows[0]
    for row in rows[1:4]:
        for token in dice.integers(0, vocab_size, dice.integers(1, 3)):
            row.view(np.uint32)[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return replace(table, rows=rows)


def draw(seed: int, shape: tuple[int, int, int], vocab_size: int, *, has_gains: bool) -> Case:
    """Candidates in the order of their scores, of which some are equal, and some not to be had."""
    count, width, size = shape
    dice = np.random.default_rng(seed)
    ids = np.stack([dice.permutation(vocab_size)[:size] for _ in range(count * width)])
    scores = np.round(dice.normal(size=(count * width, size)), 1).astype(np.float32)
    order = np.argsort(-scores, 1, kind="stable")
    scores = np.take_along_axis(scores, order, 1)
    scores[dice.random(len(scores)) < 0.2, size // 2 :] = -np.inf
    gains = None
    if has_gains:
        gains = torch.from_numpy(dice.normal(size=(*shape, size)).astype(np.float32).round(1))
    shared = sparse_table(seed, vocab_size)
    others = [sparse_table(seed + at, vocab_size) for at in range(1, count + 1)]
    tables = [None if at % 5 == 4 else shared if at % 5 < 2 else others[at] for at in range(count)]
    candidates, scored = (torch.from_numpy(part).view(shape) for part in (ids, scores))
    return Case(tables, candidates, scored, gains)


def host_path(case: Case, text: int) -> tuple[list[int], list[int], list[int]]:
    """The tokens of one text, whether it is starved, and the state before each of them.

    -1 behind the path's end.
    """
    table, width = case.tables[text], case.token_ids.shape[1]
    ids = case.token_ids[text].masked_fill(case.scores[text].isneginf(), -1).int().numpy()
    gains = None if case.gains is None else case.gains[text].numpy()
    lattice = Lattice(ids, ids[:, :2].tolist(), case.scores[text].numpy(), gains)
    tokens, starved, states = list[int](), list[int](), [0 if table is not None else -1]
    goes_on, previous = True, None
    for place in range(width):
        found = -1
        if goes_on:
            row = None if table is None else table.row(states[-1]).view(np.uint32)
            legal = [t for t in lattice.options(place, previous) if row is None or _has(row, t)]
            found = legal[0] if legal else _only(row)
        starved.append(int(goes_on and found < 0))
        goes_on = goes_on and found >= 0
        tokens.append(found)
        previous = found
        after = table.after(states[-1], found) if goes_on and table is not None else -1
        states.append(max(after, -1))
        goes_on = goes_on and (table is None or after >= 0)
    return tokens, starved, states


def _has(row: np.ndarray, token: int) -> bool:
    return bool(row[token // 32] >> np.uint32(token % 32) & 1)


def _only(row: np.ndarray | None) -> int:
    legal = [] if row is None else [t for t in range(32 * len(row)) if _has(row, t)]
    return legal[0] if len(legal) == 1 else -1


def compare(paths: Paths, device: torch.device) -> int:
    """Assert that ``paths`` are the host's; returns how many texts were starved."""
    starved = 0
    shapes = [(1, 1, 3), (7, 5, 6), (11, 7, 33), (3, 4, 256)]
    for seed, shape in enumerate(shapes * 2):
        vocab_size, has_gains = max(70, 4 * shape[2]) + seed, seed >= len(shapes)
        case = draw(seed, shape, vocab_size, has_gains=has_gains)
        words = -(-vocab_size // 32)
        kept, cursors = start(case.tables, device)
        gains = None if case.gains is None else case.gains.to(device)
        found = paths(case.token_ids.to(device), case.scores.to(device), gains, cursors, words)
        for text in range(shape[0]):
            tokens, starving, states = host_path(case, text)
            assert found.tokens[text].tolist() == tokens, (shape, text)
            assert found.starved[text].tolist() == starving, (shape, text)
            assert [source != 0 for source in found.sources[:, text].tolist()] == [
                state >= 0 for state in states
            ]
            starved += sum(starving)
        _compare_sources(case, found.sources)
        del kept
    return starved


def _compare_sources(case: Case, sources: Tensor) -> None:
    """Addresses are as far from one another as the rows of the host's states."""
    for text, table in enumerate(case.tables):
        if table is None:
            continue
        _, _, states = host_path(case, text)
        at = sources[:, text].tolist()
        for place, state in enumerate(states):
            if state >= 0:
                apart = int(table.row_of[state] - table.row_of[states[0]])
                assert at[place] - at[0] == apart * table.rows.strides[0]


if __name__ == "__main__":
    from guided_spec.ops.trees.lattice_paths_triton import first_legal_paths

    assert compare(first_legal_paths, torch.device("cpu")) > 5
    sys.stdout.write("equal\n")
