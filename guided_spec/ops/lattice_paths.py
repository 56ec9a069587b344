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

import torch
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
    """The definition in torch, where tables lie in memory of the host."""
    count, width, _ = token_ids.shape
    tokens = token_ids.new_full((count, width), -1)
    starved = torch.zeros_like(tokens)
    sources = tokens.new_zeros(width + 1, count)
    sources[0] = cursors[:, SOURCE]
    is_tabled, goes_on = cursors[:, CLASSES] != 0, torch.ones(count, dtype=torch.bool)
    before = torch.zeros(count, dtype=torch.int64)  # the candidate that was taken; -1: another
    for place in range(width):
        total = scores[:, place].clone()
        if gains is not None:
            behind = gains[torch.arange(count), place, before.clamp_min(0)]
            total = torch.where((before >= 0).unsqueeze(1), total + behind, total)
        rows = _rows(sources[place], words)
        own = token_ids[:, place]
        legal = (rows.gather(1, own >> 5) >> (own & 31)) & 1
        total = total.masked_fill(legal == 0, -torch.inf)
        best = total.amax(1, keepdim=True)
        is_best = (total == best) & ~best.isneginf()
        before = torch.where(is_best.any(1), is_best.int().argmax(1), -1)
        only = torch.where(sources[place] != 0, only_legal_token(rows), -1)
        token = torch.where(
            before >= 0, own.gather(1, before.clamp_min(0).unsqueeze(1))[:, 0], only
        )
        starved[:, place] = goes_on & (token < 0)
        goes_on = goes_on & (token >= 0)
        tokens[:, place] = torch.where(goes_on, token, -1)
        advance(tokens[:, place], cursors, sources[place + 1])
        goes_on = goes_on & (~is_tabled | (cursors[:, CLASSES] != 0))
    return TablePaths(tokens, starved, sources)


def _rows(sources: Tensor, words: int) -> Tensor:
    """int32 [R, words]: the mask row at each address; all ones where it is 0."""
    rows = torch.full((len(sources), words), -1, dtype=torch.int32)
    for row, address in zip(rows, sources.tolist(), strict=True):
        if address:
            held = (ctypes.c_int32 * words).from_address(address)
            row.copy_(torch.frombuffer(held, dtype=torch.int32))
    return rows


@cache
def _kernels() -> ModuleType:
    from guided_spec.ops import lattice_paths_triton  # imported here: it needs triton

    return lattice_paths_triton
