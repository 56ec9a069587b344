"""Which tables lie on the device, and from where their texts go on."""

from __future__ import annotations

import weakref

import torch

from guided_spec.masks.rows import STEPS_IN_FLIGHT, DeviceTables, MaskRows, TabledTexts
from guided_spec.ops.table_rows import CLASSES, SOURCE, STATE, copy_rows
from tests.ops.table_walks import random_table, starts_of

VOCAB_SIZE = 100
TABLES = [random_table(seed, VOCAB_SIZE) for seed in range(4)]
SIZE = TABLES[0].memory_size_bytes  # of each


def find(device: DeviceTables, *numbers: int, others: bool = False) -> TabledTexts | None:
    """Texts in state 2 of some tables, the first one in row 1 of the batch."""
    tables = {at: TABLES[number] for at, number in enumerate(numbers, 1)}
    return device.find(starts_of(tables, 2), len(numbers) + 1, others=others)


def rows_of(found: TabledTexts) -> torch.Tensor:
    rows = torch.zeros(len(found.cursors), -(-VOCAB_SIZE // 32), dtype=torch.int32)
    copy_rows(found.cursors[:, SOURCE].contiguous(), rows)
    return rows


def test_where_texts_go_on() -> None:
    device = DeviceTables(torch.device("cpu"), 4, 4 * SIZE)
    found = find(device, 3, 1, 3)
    assert found is not None
    assert (sorted(found.stops), found.is_alone) == ([1, 2, 3], True)
    assert found.cursors[:, STATE].tolist() == [0, 2, 2, 2]
    assert found.cursors[0, CLASSES] == 0
    expected = torch.tensor([[0] * 4, *(TABLES[number].row(2).tolist() for number in (3, 1, 3))])
    assert torch.equal(rows_of(found), expected.to(torch.int32))
    beside = find(device, 1, others=True)
    assert beside is not None
    assert not beside.is_alone


def test_the_least_recently_used_goes_unless_it_is_in_use() -> None:
    device = DeviceTables(torch.device("cpu"), 4, 2 * SIZE)
    first = find(device, 0, 1)
    assert first is not None
    crowded = find(device, 0, 1, 2)
    assert crowded is not None
    assert (sorted(crowded.stops), crowded.is_alone) == ([1, 2], False)
    assert torch.equal(crowded.cursors[1:3], first.cursors[1:3])  # they stay where they are
    assert find(device, 0) is not None
    assert find(device, 2) is not None  # in the place of table 1, which is the oldest
    assert set(device._held) == {TABLES[0], TABLES[2]}
    assert find(DeviceTables(torch.device("cpu"), 4, SIZE - 1), 0) is None


def test_what_goes_is_kept_for_the_steps_that_still_read_it() -> None:
    device = DeviceTables(torch.device("cpu"), 4, SIZE)
    first = find(device, 0)
    assert first is not None
    parts = [weakref.ref(part) for part in device._held[TABLES[0]].parts]
    for number in (1, 2):
        assert find(device, number) is not None
        assert all(part() is not None for part in parts)
    for _ in range(STEPS_IN_FLIGHT):
        find(device, 2)
    assert all(part() is None for part in parts)


def test_nothing_goes_for_a_table_that_finds_no_room() -> None:
    device = DeviceTables(torch.device("cpu"), 4, 2 * SIZE)
    assert find(device, 0, 1) is not None
    large = random_table(9, VOCAB_SIZE, states=200)
    assert device.cursor(large, 0, {TABLES[0]}) is None
    assert set(device._held) == {TABLES[0], TABLES[1]}


def test_rows_from_a_table_are_not_left_in_the_host_s_own() -> None:
    """Where they were, the next step's text found them, whose rows forbid nothing."""
    rows, row = MaskRows(1, 3, VOCAB_SIZE, torch.device("cpu")), torch.full((4,), 5).int()
    rows.clear(1)
    found = rows.first(1, 2, torch.tensor([[row.data_ptr()], [0]]))
    assert found.tolist() == [[[5] * 4, [-1] * 4]]
    rows.clear(1)
    assert bool((rows.first(1, 2) == -1).all())
