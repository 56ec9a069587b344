"""The first legal path through the lattices of many texts, along tables, where the lattices are.

Each text has some candidate tokens at every place of a block. At each place it takes the candidate
with the highest score that the mask row of its table's state allows; the score is its own, and what
it gains behind the candidate that was taken before. Where no candidate is legal, the only legal
token of the row is taken if there is just one; else the path ends, and the text is starved. A path
also ends behind a token that ends the text. A text without a table takes its best candidates.
"""

from __future__ import annotations

import ctypes
from functools import cache
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.ops.bitmask import only_legal_token
from guided_spec.ops.table_rows import CLASSES, SOURCE, TablePaths, advance

__all__ = ["first_legal_paths"]


def first_legal_paths(
    token_ids: Tensor, scores: Tensor, gains: Tensor | None, cursors: Tensor, words: int
) -> TablePaths:
    """See the module's docstring; all on one device, and nothing waits for the host.

    token_ids: int64 [R, W, C], different ones at a place. scores: float32 [R, W, C]; -inf: not to
    be drafted. Of equal ones the first counts. gains: float32 [R, W, C, C], see ``Candidates``;
    None where there are none. cursors: int64 [R, 6], see ``table_rows``; they are moved along.
    words: of a mask row.
    """
    if token_ids.is_cuda:
        found: TablePaths = _kernels().first_legal_paths(token_ids, scores, gains, cursors, words)
        return found
    return first_legal_paths_reference(token_ids, scores, gains, cursors, words)


def first_legal_paths_reference(
    token_ids: Tensor, scores: Tensor, gains: Tensor | None, cursors: Tensor, words: int
) -> TablePaths:
    """The definition, where tables lie in memory of the host: text by text, place by place."""
    count, width, _ = token_ids.shape
    tokens = torch.full((count, width), -1)
    starved = torch.zeros_like(tokens)
    sources = tokens.new_zeros(width + 1, count)
    sources[0] = cursors[:, SOURCE]
    for text in range(count):
        cursor, behind = cursors[text : text + 1], None
        is_tabled = bool(cursor[0, CLASSES])
        candidates, own = token_ids[text].numpy(), scores[text].numpy()
        if gains is not None:
            behind = gains[text].numpy()
        before = 0  # the candidate that was taken; -1: another token
        for place in range(width):
            total = own[place]
            if behind is not None and before >= 0:
                total = total + behind[place, before]
            row = _row(int(sources[place, text]), words)
            before = _first_legal(candidates[place], total, row)
            token = int(candidates[place, before]) if before >= 0 else _only(row)
            if token < 0:
                starved[text, place] = 1
                break
            tokens[text, place] = token
            advance(tokens[text, place : place + 1], cursor, sources[place + 1, text : text + 1])
            if is_tabled and not cursor[0, CLASSES]:
                break
    return TablePaths(tokens, starved, sources)


Row = NDArray[np.int32]


def _row(address: int, words: int) -> Row | None:
    """The mask row there, read in its place; None where there is none."""
    if not address:
        return None
    return np.ctypeslib.as_array((ctypes.c_int32 * words).from_address(address))


def _first_legal(
    candidates: NDArray[np.int64], scores: NDArray[np.float32], row: Row | None
) -> int:
    """Which candidate of a place has the highest score of those that are legal; -1: none is."""
    if row is not None:
        is_legal = row[candidates >> 5] >> (candidates & 31) & 1
        scores = np.where(is_legal, scores, -np.inf)
    best = int(scores.argmax())
    return best if scores[best] > -np.inf else -1


def _only(row: Row | None) -> int:
    """The only legal token of a row; -1 where there is another."""
    return -1 if row is None else int(only_legal_token(torch.from_numpy(row)))


@cache
def _kernels() -> ModuleType:
    from guided_spec.ops.trees import lattice_paths_triton  # imported here: it needs triton

    return lattice_paths_triton
