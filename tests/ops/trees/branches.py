"""``python -m tests.ops.trees.branches``: the kernel that keeps a branch does what torch does."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.ops.attention.slot_attention import KeyValues
from guided_spec.ops.trees import kept_branch, kept_branch_triton
from guided_spec.ops.trees.kept_branch import LayerMemory
from tests.slot_lines import NUM_SLOTS, make_tables

LENGTH = 40
PATHS = [[1, 2, 3, -1], [3, 4, 9, 17], [-1, -1, -1, -1], [2, 7, -1, -1]]
ROWS = [[2, 0, 1, 3], [5, 20, 0, 13]]


class Kept(NamedTuple):
    """What ``keep_branch`` is given, in its order."""

    memory: LayerMemory
    tables: Tensor
    rows: Tensor
    path: Tensor

    def clone(self) -> Kept:
        """One with memory of its own."""
        layers = [KeyValues(*(one.clone() for one in layer)) for layer in self.memory.layers]
        return self._replace(memory=LayerMemory.of(layers))


def make_branches(block: int, size: int, device: torch.device) -> Kept:
    """Layers of random numbers, and a branch of each row."""
    torch.manual_seed(block)
    tables = make_tables(NUM_SLOTS, LENGTH, block).to(device)
    shape = (int(tables.max()) + 1, 3, block, size)
    layers = [KeyValues(*torch.randn(2, *shape, device=device)) for _ in range(2)]
    rows, path = (torch.tensor(one, device=device) for one in (ROWS, PATHS))
    return Kept(LayerMemory.of(layers), tables, rows, path)


def compare(device: torch.device) -> None:
    """The kernel against the definition, on ``device``."""
    for block, size in ((4, 8), (7, 24), (64, 128)):
        kept = make_branches(block, size, device)
        ours, theirs = kept.clone(), kept.clone()
        memory, *where = ours
        kept_branch_triton.keep_branch(memory.addresses, memory.layers[0].keys, *where)
        kept_branch._keep(*theirs)
        for found, wanted in zip(ours.memory.layers, theirs.memory.layers, strict=True):
            assert torch.equal(found.keys, wanted.keys)
            assert torch.equal(found.values, wanted.values)
        assert not torch.equal(theirs.memory.layers[0].keys, kept.memory.layers[0].keys)


if __name__ == "__main__":
    compare(torch.device("cpu"))
    sys.stdout.write("equal\n")
