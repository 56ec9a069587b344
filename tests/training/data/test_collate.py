"""Batches as the trainer gets them, from this process and from workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from guided_spec.errors import ConfigError
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.training.algorithm import TrainingBatch
from guided_spec.training.data.batches import Collator, GrammarMasks, TokenBatches
from guided_spec.training.data.dataset import load_examples
from tests.training.data.test_grammar_masks import rows_of


@pytest.fixture(scope="module")
def dataset(heldout: Path, tokenizer: Any) -> Any:
    return load_examples([heldout], tokenizer, stop_ids=[0], max_length=512, limit=24)


def test_a_batch(dataset: Any, vocabulary: Vocabulary) -> None:
    masks = GrammarMasks(vocabulary)
    rows = [dataset[at] for at in (3, 0, 7)]
    rows.append({**rows[0], "grammar": "", "index": 99})
    batch = Collator(masks)(rows)
    longest = max(len(row["input_ids"]) for row in rows)
    assert batch.token_ids.shape == batch.loss_mask.shape == batch.mask_rows.shape
    assert batch.token_ids.shape[1] % 16 == 0 <= batch.token_ids.shape[1] - longest < 16
    assert batch.indices.tolist() == [3, 0, 7, 99]
    assert [part.dtype for part in batch[:-1]] == [
        torch.int64, torch.bool, torch.int64, torch.int32, torch.int64, torch.int64,
    ]  # fmt: skip
    assert (batch.bitmask[0] == -1).all()
    assert not batch.loss_mask[:, 0].any()
    for at, row in enumerate(rows):
        length, start = len(row["input_ids"]), int(row["response_start"])
        assert batch.lengths[at] == length == row["seq_len"]
        assert batch.token_ids[at, :length].tolist() == row["input_ids"].tolist()
        assert batch.loss_mask[at, :length].tolist() == row["loss_mask"].tolist()
        assert not batch.loss_mask[at, length:].any()
        assert not batch.token_ids[at, length:].any()
        assert not batch.mask_rows[at, :start].any()
        assert not batch.mask_rows[at, length:].any()
        found = batch.bitmask[batch.mask_rows[at, start:length]]
        expected = rows_of(masks, row["input_ids"], start, row["grammar"])
        if row["grammar"]:
            assert expected is not None
            assert torch.equal(found, torch.from_numpy(expected))
        else:
            assert not batch.mask_rows[at].any()
    legal = unpack_bitmask(batch.bitmask[batch.mask_rows], vocabulary.vocab_size)
    assert legal.gather(-1, batch.token_ids.unsqueeze(-1))[batch.loss_mask].all()
    assert len(batch.bitmask) < int(batch.loss_mask.sum())  # rows are shared


def test_an_answer_that_breaks_its_grammar_is_free(dataset: Any, vocabulary: Vocabulary) -> None:
    good, other = dataset[0], dataset[3]
    broken = {**good, "grammar": other["grammar"]}
    together = Collator(GrammarMasks(vocabulary))([broken, other])
    assert not together.mask_rows[0].any()
    alone = Collator(GrammarMasks(vocabulary))([other])
    assert torch.equal(together.bitmask, alone.bitmask)


def test_without_masks(dataset: Any) -> None:
    batch = Collator(None, vocab_size=4096)([dataset[0], dataset[1]])
    assert batch.bitmask.tolist() == [[-1] * 128]
    assert not batch.mask_rows.any()
    with pytest.raises(ConfigError, match="vocab_size"):
        Collator(None)


def test_lists_do_as_well_as_arrays(dataset: Any, vocabulary: Vocabulary) -> None:
    collator = Collator(GrammarMasks(vocabulary))
    lists = [dataset.with_format(None)[at] for at in range(2)]
    assert isinstance(lists[0]["input_ids"], list)
    for one, other in zip(
        collator(lists)[:-1], collator([dataset[0], dataset[1]])[:-1], strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_make_the_same_batches(dataset: Any, vocabulary: Vocabulary, method: str) -> None:
    masks = GrammarMasks(vocabulary)
    sampler = TokenBatches(dataset["seq_len"], batch_tokens=1024, seed=0)
    here = [Collator(masks)([dataset[at] for at in batch]) for batch in sampler]
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=Collator(masks),
        num_workers=1,
        multiprocessing_context=method,
    )
    count = 0
    for expected, found in zip(here, loader, strict=True):
        assert isinstance(found, TrainingBatch)
        assert all(torch.equal(*pair) for pair in zip(expected[:-1], found[:-1], strict=True))
        # Shared memory of its own size: the loader copied nothing, and nothing that is not filled.
        assert found.bitmask.untyped_storage().nbytes() == found.bitmask.nbytes
        count += len(found.lengths)
    assert count == len(dataset)
