"""Which documents go into which batch: like lengths together, in an order that can be repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from guided_spec.errors import ConfigError

__all__ = ["TokenBatches", "padded_length"]

MULTIPLE = 16
SHARD = 8192  # documents that are sorted by length together


def padded_length(length: int) -> int:
    """The width to which a batch with a longest document of ``length`` tokens is padded."""
    return -(-length // MULTIPLE) * MULTIPLE


class TokenBatches(Sampler[list[int]]):
    """Batches of indices, for ``DataLoader(batch_sampler=...)``.

    lengths: tokens of each document. batch_tokens: the padded size of a batch at most; a longer
        document makes a batch alone. rank, world: this process, and how many share the data.

    The order is a function of (seed, epoch). All ranks see the same number of batches, and no
    document twice in an epoch; what does not divide is left out. Only where there are fewer batches
    than ranks some are repeated. Raises ConfigError.
    """

    def __init__(
        self,
        lengths: Sequence[int] | NDArray[np.int64],
        *,
        batch_tokens: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        # Sliced: a column of a dataset is read number by number otherwise.
        self._lengths = np.asarray(lengths[:], dtype=np.int64)
        if not len(self._lengths):
            raise ConfigError("lengths", [], "must have at least one document")
        if batch_tokens < 1:
            raise ConfigError("batch_tokens", batch_tokens, "must be at least 1")
        if not 0 <= rank < world:
            raise ConfigError("rank", rank, f"must be at least 0 and below world, which is {world}")
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._rank = rank
        self._world = world
        self.set_epoch(0)

    @property
    def epoch(self) -> int:
        """The epoch that iterating yields."""
        return self._epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, from 0 on, and begin at its first batch."""
        self._epoch = epoch
        self._first = 0
        self._batches = self._share(self._cut(epoch))

    def skip(self, count: int) -> None:
        """Begin this epoch behind its first ``count`` batches, as a run does that was interrupted.

        Counted from the beginning, whatever was skipped before. Raises ConfigError past the end.
        """
        if not 0 <= count <= len(self._batches):
            fix = f"must be at least 0 and at most the epoch's {len(self._batches)} batches"
            raise ConfigError("count", count, fix)
        self._first = count

    def __len__(self) -> int:
        """Batches that iterating yields; it may differ a little from epoch to epoch."""
        return len(self._batches) - self._first

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._batches[self._first :]:
            yield batch.tolist()

    def _cut(self, epoch: int) -> list[NDArray[np.int64]]:
        """All batches of an epoch, in the order in which the ranks take them in turns."""
        dice = np.random.default_rng([self._seed, epoch])
        order = dice.permutation(len(self._lengths))
        batches: list[NDArray[np.int64]] = []
        for start in range(0, len(order), SHARD):
            shard = order[start : start + SHARD]
            shard = shard[np.argsort(self._lengths[shard], kind="stable")]
            begin = 0
            for end, index in enumerate(shard):
                # Ascending: the newest document is the longest and sets the width.
                width = padded_length(int(self._lengths[index]))
                if end > begin and (end + 1 - begin) * width > self._batch_tokens:
                    batches.append(shard[begin:end])
                    begin = end
            batches.append(shard[begin:])
        return [batches[at] for at in dice.permutation(len(batches))]

    def _share(self, batches: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
        world, total = self._world, len(batches)
        if total < world:
            return [batches[self._rank % total]]
        return batches[self._rank : total - total % world : world]
