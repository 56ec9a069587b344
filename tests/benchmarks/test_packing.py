"""The benchmark of packed rows compares the same documents."""

from __future__ import annotations

import torch

from benchmarks.packing import in_one_row
from guided_spec.training.data.batches import Collator


def test_all_documents_are_in_the_row() -> None:
    rows = [
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "index": 3, "grammar": ""},
        {"input_ids": [8, 9], "loss_mask": [0, 1], "index": 4, "grammar": ""},
    ]
    packed = in_one_row(Collator(None, vocab_size=16)(rows))
    assert packed.token_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.loss_mask.tolist() == [[False, True, True, False, True]]
    assert torch.equal(packed.lengths, torch.tensor([5]))
