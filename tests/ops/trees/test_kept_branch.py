"""The accepted branch of a tree comes to lie behind its text; nothing else is touched."""

from __future__ import annotations

import pytest
import torch

from guided_spec.ops.attention.slot_attention import KeyValues
from guided_spec.ops.trees.kept_branch import LayerMemory, keep_branch
from tests.ops.interpreted import run_interpreted
from tests.ops.trees.branches import PATHS, ROWS, make_branches


def test_a_branch_moves_behind_its_text_and_nothing_else_does() -> None:
    kept, block = make_branches(7, 8, torch.device("cpu")), 7
    before = kept.clone()
    keep_branch(*kept)
    moved = {
        (slot, start + depth + 1): (slot, start + token)
        for slot, start, path in zip(*ROWS, PATHS, strict=True)
        for depth, token in enumerate(path)
        if token >= 0
    }
    assert len(moved) == 9
    for slot, table in enumerate(kept.tables.tolist()):
        for position in range(len(table) * block):
            of_slot, source = moved.get((slot, position), (slot, position))
            assert of_slot == slot
            if table[position // block] == 0 or table[source // block] == 0:
                continue  # behind all positions
            for layer, old in zip(kept.memory.layers, before.memory.layers, strict=True):
                for buffer, was in zip(layer, old, strict=True):
                    found = buffer[table[position // block], :, position % block]
                    assert torch.equal(found, was[table[source // block], :, source % block])


def test_layers_of_one_shape_are_moved_together() -> None:
    wide, narrow = ([KeyValues(*torch.zeros(2, 3, 2, 4, size))] * 2 for size in (8, 4))
    groups = LayerMemory.group([wide[0], narrow[0], wide[1]])
    assert [len(group.layers) for group in groups] == [2, 1]
    assert groups[0].addresses.tolist() == 2 * [part.data_ptr() for part in wide[0]]


@pytest.mark.slow
def test_the_kernel_does_the_same() -> None:
    pytest.importorskip("triton", minversion="3.9")
    assert run_interpreted("-m", "tests.ops.trees.branches") == "equal"
