"""Texts advance in tables of states over tokens on the device that drafts, by addresses.

A table has memory of its own, and each text holds its address: so one kernel serves texts of
different grammars, and a CUDA graph holds no table. What a text holds is its cursor, one row of an
int64 [R, 6]:

- ``CLASSES``: the address of int32 [V], the class of each token. 0: the text has no table, or no
  token may come next.
- ``THEN``: the address of int16 [N, C], the state after a token of a class; negative for none.
- ``WIDTH``: C.
- ``ROWS``: the address of int64 [N], the address of each state's mask row, int32 [W].
- ``STATE``: the text's current state.
- ``SOURCE``: the address of that state's row, 0 where the text has no table.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from guided_spec.ops.kernels import kernels_of

CLASSES, THEN, WIDTH, ROWS, STATE, SOURCE = range(6)
CURSOR = 6  # numbers of a cursor


def copy_rows(sources: Tensor, out: Tensor, *, is_blank: bool = False) -> None:
    """Copy the row at each address; where it is 0, ``out`` is left as it is.

    sources: int64 [R] on the device of ``out``, which can read there. out: int32 [R, W].
    Or [B, D], of the first D of out [B, N, W].
    is_blank: ``out`` holds anything, and gets rows of ones where there is no address.
    """
    if out.is_cuda:
        kernels_of(__name__).copy_rows(sources, out, is_blank=is_blank)
        return
    if is_blank:
        out.fill_(-1)
    if out.dim() > 2:
        for addresses, rows in zip(sources, out, strict=True):
            copy_rows(addresses, rows[: len(addresses)])
        return
    for row, address in zip(out, sources.tolist(), strict=True):
        if address:
            words = (ctypes.c_int32 * len(row)).from_address(address)
            row.copy_(torch.frombuffer(words, dtype=torch.int32))


def advance(token_ids: Tensor, cursors: Tensor, out: Tensor) -> None:
    """Advance texts by a token each, which their rows allow.

    token_ids: int64 [R]; -1 for none, after which nothing comes. cursors: int64 [R, 6], modified.
    out: int64 [R], gets their ``SOURCE``.
    """
    if cursors.is_cuda:
        kernels_of(__name__).advance(token_ids, cursors, out)
        return
    for cursor, token_id in zip(cursors, token_ids.tolist(), strict=True):
        classes, then, width, rows, state, _ = cursor.tolist()
        found = -1
        if classes and token_id >= 0:
            of = _at(ctypes.c_int32, classes, token_id)
            found = _at(ctypes.c_int16, then, state * width + of)
        cursor[STATE] = max(found, 0)
        cursor[CLASSES] = classes if found >= 0 else 0
        cursor[SOURCE] = _at(ctypes.c_int64, rows, found) if found >= 0 else 0
    out.copy_(cursors[:, SOURCE])


def advance_committed(token_ids: Tensor, counts: Tensor, texts: Tensor, cursors: Tensor) -> None:
    """Advance texts by what they committed; a text whose table does not hold it leaves the table.

    token_ids: int64 or int32 [B, T]. counts: likewise [B], how many of them each text got; a
        negative token is none. texts: int64 [B], which of the cursors are theirs; rows may share
        one that has no table. cursors: int64 [N, 6], modified. All on one device.
    """
    if cursors.is_cuda:
        kernels_of(__name__).advance_committed(token_ids, counts, texts, cursors)
        return
    for tokens, count, text in zip(
        token_ids.tolist(), counts.tolist(), texts.tolist(), strict=True
    ):
        for token_id in tokens[: max(0, count)]:
            if token_id >= 0:
                one = cursors[text : text + 1]
                advance(torch.tensor([token_id]), one, one.new_empty(1))


def _at(kind: type[ctypes.c_int16 | ctypes.c_int32 | ctypes.c_int64], start: int, at: int) -> int:
    """One number of an array in memory."""
    return kind.from_address(start + at * ctypes.sizeof(kind)).value
