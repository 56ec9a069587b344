"""Padding of training batches, and what packing their documents into one row would bring.

``python -m benchmarks.packing DATA`` cuts the documents into batches as ``guided-spec train`` does
and prints the share of their places that is padding. Then it times an EAGLE-3 step of the bundled
target on the first batches: as they are, and with all documents of a batch one after another in a
single row, under a dense mask. What a mask forbids takes the same time, so that one of documents
would be no faster.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from guided_spec.cli.console import stdout
from guided_spec.engine.setup import bundled_asset
from guided_spec.models.loading import end_of_text_ids, load_model, load_tokenizer
from guided_spec.training.algorithm import TrainingBatch
from guided_spec.training.data.batches import Collator, TokenBatches
from guided_spec.training.data.dataset import load_examples
from guided_spec.training.features import OnlineFeatures
from guided_spec.training.registry import find_algorithm

__all__ = ["in_one_row", "main"]


def in_one_row(batch: TrainingBatch) -> TrainingBatch:
    """The documents of a batch behind one another, as if they were one."""
    is_text = torch.arange(batch.token_ids.shape[1]) < batch.lengths[:, None]
    return batch._replace(
        token_ids=batch.token_ids[is_text][None],
        loss_mask=batch.loss_mask[is_text][None],
        lengths=batch.lengths.sum()[None],
        mask_rows=batch.mask_rows[is_text][None],
        indices=batch.indices[:1],
    )


def main(arguments: list[str] | None = None) -> None:
    """Parse the command line, measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packing")
    parser.add_argument("data", nargs="+")
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=8)
    options = parser.parse_args(arguments)
    path = bundled_asset("target")
    target: Any = load_model(path, device="cpu").requires_grad_(requires_grad=False)
    tokenizer = load_tokenizer(path)
    stop_ids = end_of_text_ids(target, tokenizer)
    dataset: Any = load_examples(options.data, tokenizer, stop_ids=stop_ids, max_length=2048)
    sampler = TokenBatches(dataset["seq_len"], batch_tokens=options.batch_tokens, seed=0)
    collate = Collator(None, vocab_size=target.config.vocab_size)
    batches = [collate([dataset[row] for row in rows]) for rows in sampler]
    tokens = sum(int(batch.lengths.sum()) for batch in batches)
    places = sum(batch.token_ids.numel() for batch in batches)
    padding = f"{1 - tokens / places:.1%} is padding"
    stdout().print(f"{len(dataset)} documents, {len(batches)} batches: {padding}")
    _time(target, batches[: options.batches])


def _time(target: Any, batches: list[TrainingBatch]) -> None:
    algorithm = find_algorithm("eagle3")
    model = algorithm.from_training_args(target.config, target=target, vocabulary=None)
    forward, _ = algorithm.get_trainer_kwargs(masked=False)
    features = OnlineFeatures(target, tuple(model.feature_layers))
    packed = [in_one_row(batch) for batch in batches]
    seconds = {"padded": 0.0, "one row": 0.0}
    for pair in zip(batches, packed, strict=True):
        for name, batch in zip(seconds, pair, strict=True):
            began = time.perf_counter()
            model(batch, features(batch), **forward).loss.backward()
            seconds[name] += time.perf_counter() - began
    tokens = sum(int(batch.lengths.sum()) for batch in batches)
    for name, taken in seconds.items():
        stdout().print(f"{name}: {tokens / taken:.0f} tokens per second")


if __name__ == "__main__":
    main()
