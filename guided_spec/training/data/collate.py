"""Rows of a dataset as one ``TrainingBatch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from guided_spec.errors import ConfigError
from guided_spec.training.batch import TrainingBatch
from guided_spec.training.data.batches import padded_length
from guided_spec.training.data.grammar_masks import GrammarMasks
from guided_spec.training.data.mask_table import MaskTable

__all__ = ["Collator"]


class Collator:
    """Pads documents on the right and makes their masks; for ``DataLoader(collate_fn=...)``.

    masks: None leaves every answer free, as if no document had a grammar.
    vocab_size: the width of the target's logits; only needed, and then required, without ``masks``.

    Raises ConfigError without both.
    """

    def __init__(self, masks: GrammarMasks | None, *, vocab_size: int | None = None) -> None:
        if masks is not None:
            vocab_size = masks.vocabulary.vocab_size
        if vocab_size is None:
            raise ConfigError("vocab_size", None, "is needed without masks: pass the target's")
        self.masks = masks
        self.vocab_size = vocab_size

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> TrainingBatch:
        """A batch on the CPU, as wide as its longest document rounded up to a multiple of 16.

        rows: of a dataset that ``load_examples`` made, at least one.
        """
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        shape = (len(rows), padded_length(int(lengths.max())))
        token_ids = torch.zeros(shape, dtype=torch.int64)
        loss_mask = torch.zeros(shape, dtype=torch.bool)
        for at, row in enumerate(rows):
            length = int(lengths[at])
            token_ids[at, :length] = torch.from_numpy(np.array(row["input_ids"], dtype=np.int64))
            loss_mask[at, :length] = torch.from_numpy(np.array(row["loss_mask"], dtype=np.bool_))
        mask_rows = torch.zeros(shape, dtype=torch.int64)
        return TrainingBatch(
            token_ids=token_ids,
            loss_mask=loss_mask,
            lengths=lengths,
            bitmask=self._fill(rows, mask_rows),
            mask_rows=mask_rows,
            indices=torch.tensor([int(row["index"]) for row in rows]),
        )

    def _fill(self, rows: Sequence[Mapping[str, Any]], mask_rows: Tensor) -> Tensor:
        """The bitmask; ``mask_rows`` is written."""
        masks = self.masks
        answers = [
            (at, row["input_ids"], int(row["answer_start"]), str(row["grammar"]))
            for at, row in enumerate(rows)
            if masks is not None and row["grammar"]
        ]
        table = MaskTable(sum(len(ids) - start for _, ids, start, _ in answers), self.vocab_size)
        for at, input_ids, start, grammar in answers:
            assert masks is not None
            slots = masks.fill(table, input_ids, start, grammar)
            if slots is not None:
                mask_rows[at, start : len(input_ids)] = torch.tensor(slots)
        return _hand_over(table.rows())


def _hand_over(rows: Tensor) -> Tensor:
    """``rows`` where the training process can read them.

    A worker process writes them into shared memory of their own size: the loader would copy all of
    the table there, whose end is not filled. Elsewhere nothing is copied.
    """
    if get_worker_info() is None:
        return rows
    storage = torch.UntypedStorage._new_shared(rows.nbytes, device="cpu")
    shared = torch.empty(0, dtype=rows.dtype).set_(storage, 0, rows.shape, rows.stride())
    return shared.copy_(rows)
