"""Requests that walk along tables of their grammars: nothing waits for a token that is drafted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from guided_spec.grammar.tables.token_table import REFUSED, TokenTable
from guided_spec.integrations.vllm.drafts.tabled_requests import TAIL, TabledRequests, drafter_rows
from guided_spec.integrations.vllm.ranks import LATER, NEVER
from guided_spec.masks.rows import TableAdvance
from guided_spec.ops.mask_words import ids_of, row_of
from tests.ops.table_walks import random_table
from tests.processes import run_compiling

CPU = torch.device("cpu")
VOCABULARY, DEPTH = 70, 4


@pytest.mark.parametrize("own", [None, [0, 1, 2, 33, 64]])
def test_what_a_drafter_reads(own: list[int] | None) -> None:
    legal = [[1, 40], [40], [40, 41], [64], list(range(VOCABULARY))]
    rows = torch.from_numpy(np.stack([row_of(ids, VOCABULARY) for ids in legal]))
    known = None if own is None else torch.from_numpy(row_of(own, VOCABULARY))
    found = drafter_rows(rows, known)
    words = rows.shape[1]
    assert found.shape == (len(legal), words + TAIL)
    only = [-1] * 5 if own is None else [-1, 40, -1, -1, -1]
    assert found[:, words].tolist() == only
    for at, ids in enumerate(legal):
        row = found[at, :words].numpy()
        if own is not None and at == 2:  # two legal tokens, and the drafter knows neither
            assert (row == -1).all()
        else:
            assert ids_of(row, VOCABULARY) == ids


def tabled(requests: int = 3, table_bytes: int = 2**24) -> TabledRequests:
    return TabledRequests(requests, DEPTH, VOCABULARY, None, CPU, table_bytes)


def legal_path(table: TokenTable, length: int) -> list[int]:
    """A text of a table that it holds, from the start."""
    state, found = 0, list[int]()
    for _ in range(length):
        thens = [table.after(state, token) for token in range(VOCABULARY)]
        token = next(at for at, then in enumerate(thens) if then >= 0)
        state = thens[token]
        found.append(token)
    return found


def rows_of(walk: TableAdvance | None, place: int, count: int) -> torch.Tensor:
    assert walk is not None
    out = torch.full((count, -(-VOCABULARY // 32) + TAIL), 9, dtype=torch.int32)
    walk.mask(place, out, is_blank=True)
    return out[:, : -(-VOCABULARY // 32)]


def whole_table(seed: int) -> TokenTable:
    """One from whose start a text goes on for some tokens, and which nothing leaves."""
    table = random_table(seed, VOCABULARY)
    table.then[table.then == -3] = REFUSED
    table.then[:, 0] = np.arange(len(table.then))[::-1] % len(table.then)
    return table


def test_texts_stand_where_they_were_followed_to() -> None:
    """However tokens come: with the request, committed, or drafted; and slots are used again."""
    own = tabled(4)
    tables = [whole_table(seed) for seed in range(3)]
    paths = [legal_path(table, 9) for table in tables]
    for at, (table, path) in enumerate(zip(tables, paths, strict=True)):
        assert own.begin(str(at), table, path[:at])
    assert own.begin("waits", tables[0], []) > LATER
    assert own.begin("more", tables[0], []) == LATER  # no slot is left
    names = ["2", "free", "0", "1"]
    sampled = [paths[2][2:4], [5], paths[0][:3], []]
    tokens = torch.tensor([[*row, *[-1] * (3 - len(row))] for row in sampled])
    own.commit(names, tokens, torch.tensor([len(row) for row in sampled], dtype=torch.int32))
    walk = own.start(names)
    starts = {"2": 4, "0": 3, "1": 1}
    for place in range(DEPTH + 1):
        found = rows_of(walk, place, len(names))
        for row, name in zip(found, names, strict=True):
            if name == "free":
                assert (row == -1).all()
                continue
            at = int(name)
            states = tables[at].states(0, paths[at][: starts[name] + place])
            assert torch.equal(row, torch.from_numpy(tables[at].row(states[-1])))
        if place < DEPTH:
            drawn = [
                5 if name == "free" else paths[int(name)][starts[name] + place] for name in names
            ]
            assert walk is not None
            walk.append(place, torch.tensor(drawn))
    own.forget("0")
    own.forget("0")
    assert own.begin("more", tables[1], paths[1][:2]) > LATER
    found = rows_of(own.start(["more", "0"]), 0, 2)
    state = tables[1].states(0, paths[1][:2])[-1]
    assert torch.equal(found[0], torch.from_numpy(tables[1].row(state)))
    assert (found[1] == -1).all()
    assert own.start(["0", "free"]) is None


def test_a_text_that_leaves_its_table_is_the_hosts_again() -> None:
    table = whole_table(1)
    table.then[table.after(0, legal_path(table, 1)[0])] = -3  # outside, whatever comes
    path = legal_path(table, 1)
    own = tabled()
    assert own.begin("a", table, []) > LATER
    own.commit(["a"], torch.tensor([path]), torch.tensor([1]))
    own.read("a", path)
    assert "a" in own
    own.commit(["a"], torch.tensor([[3]]), torch.tensor([1]))
    assert (rows_of(own.start(["a"]), 0, 1) == -1).all()  # the host does not know yet
    own.read("a", [3])
    assert "a" not in own
    assert own.begin("a", table, [*path, 3]) == NEVER


def test_tokens_outside_of_the_vocabulary_are_none() -> None:
    table = whole_table(2)
    path, own = legal_path(table, 2), tabled()
    assert own.begin("a", table, []) > LATER
    tokens = torch.tensor([[path[0], VOCABULARY, -1, 10**6, path[1]]], dtype=torch.int32)
    own.commit(["a"], tokens, torch.tensor([5]))
    expected = torch.from_numpy(table.row(table.states(0, path)[-1]))
    assert torch.equal(rows_of(own.start(["a"]), 0, 1)[0], expected)


def test_tables_in_use_stay() -> None:
    tables = [whole_table(seed) for seed in range(3)]
    size = max(table.memory_size_bytes for table in tables)
    own = tabled(table_bytes=2 * size)
    assert own.begin("a", tables[0], []) > LATER
    assert own.begin("a too", tables[0], []) > LATER
    own.forget("a too")
    assert own.begin("b", tables[1], []) > LATER
    assert own.begin("c", tables[2], []) == LATER
    own.forget("a")
    assert own.begin("c", tables[2], []) > LATER
    assert own.begin("b again", tables[1], []) > LATER


def test_a_device_without_room_has_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError(args)

    own = tabled()
    monkeypatch.setattr("guided_spec.masks.rows.DeviceTables._hold", fail)
    assert own.begin("a", whole_table(0), []) == LATER


@pytest.mark.slow
def test_no_step_compiles_what_loading_has_not(tmp_path: Path) -> None:
    """The first text with a table comes while others are written."""
    pytest.importorskip("triton")
    loaded, served = run_compiling("tests.integrations.vllm.ahead", tmp_path)
    assert loaded == {"_copy": 2, "_advance": 1, "_advance_committed": 4}
    assert not any(served.values())
