"""Batches of documents: like lengths together, in an order that can be repeated, with mask rows.

The rows say which tokens the grammar allows at each position of a response. The worker processes of
the data loader make them, together with the batches.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Sampler, get_worker_info

from guided_spec.errors import ConfigError, GrammarError
from guided_spec.grammar.backends.auto import AutoBackend
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.rows import row_allows
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.training.algorithm import TrainingBatch
from guided_spec.training.data.dataset import read_grammar_text
from guided_spec.training.data.pictures import BatchPictures, read_pictures_text
from guided_spec.types import require_int

logger = logging.getLogger(__name__)

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
        require_int("batch_tokens", batch_tokens, low=1)
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
        """Begin this epoch after its first ``count`` batches, as a run does that was interrupted.

        Counted from the beginning, whatever was skipped before. Raises ConfigError past the end.
        """
        if not 0 <= count <= len(self._batches):
            fix = f"must be at least 0 and at most the epoch's {len(self._batches)} batches"
            raise ConfigError("count", count, fix)
        self._first = count

    def largest(self) -> list[int]:
        """The batch of this epoch that takes the most memory: most padded tokens, then widest."""

        def size(batch: NDArray[np.int64]) -> tuple[int, int]:
            width = padded_length(int(self._lengths[batch].max()))
            return len(batch) * width, width

        found: list[int] = max(self._batches, key=size).tolist()
        return found

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


class Collator:
    """Pads documents on the right and makes their masks; for ``DataLoader(collate_fn=...)``.

    masks: None leaves every response free, as if no document had a grammar.
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
            pictures=BatchPictures.of(
                [read_pictures_text(str(row["pictures"])) for row in rows], token_ids
            ),
        )

    def _fill(self, rows: Sequence[Mapping[str, Any]], mask_rows: Tensor) -> Tensor:
        """The bitmask; ``mask_rows`` is written."""
        masks = self.masks
        responses = [
            (at, row["input_ids"], int(row["response_start"]), str(row["grammar"]))
            for at, row in enumerate(rows)
            if masks is not None and row["grammar"]
        ]
        table = MaskTable(sum(len(ids) - start for _, ids, start, _ in responses), self.vocab_size)
        for at, input_ids, start, grammar in responses:
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


class MaskTable:
    """Rows of int32 [W] words in host memory; row 0 is all ones and forbids nothing.

    capacity: ``add`` calls at most. Memory that is not filled costs nothing but addresses.
    """

    def __init__(self, capacity: int, vocab_size: int) -> None:
        words = num_mask_words(vocab_size)
        self._memory = torch.empty((capacity + 1, words), dtype=torch.int32)
        self._memory[0] = -1
        self._rows: NDArray[np.int32] = self._memory.numpy()
        self._keys = [0]
        self._known: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, matcher: GrammarMatcher) -> int:
        """The row of what may come next; does not move the matcher, which must not be terminated.

        It is filled at the end of the table; the next call overwrites it if it equals another row.
        """
        slot = len(self._keys)
        if not matcher.fill_next_token_bitmask(self._memory, slot):
            return 0
        row = self._rows[slot]
        key = zlib.crc32(row)
        known = self._known.setdefault(key, [])
        for other in known:
            if np.array_equal(self._rows[other], row):
                return other
        known.append(slot)
        self._keys.append(key)
        return slot

    def allows(self, slot: int, token_id: int) -> bool:
        """Whether a row admits the token; ids outside the vocabulary are never admitted."""
        return row_allows(self._rows[slot], token_id)

    def truncate(self, length: int) -> None:
        """Forget the rows from ``length`` on, which is at least 1."""
        for slot in range(length, len(self._keys)):
            self._known[self._keys[slot]].remove(slot)
        del self._keys[length:]

    def rows(self) -> Tensor:
        """int32 [len(self), W]: a view."""
        return self._memory[: len(self._keys)]


class GrammarMasks:
    """Mask rows of tokenized responses; may be pickled, and used after a fork.

    Each process makes its own backend when it first needs one: compiled grammars do not travel.

    cache_size: compiled grammars, and failures, that are remembered; the least recently used goes
        first.

    ``rejected`` counts the responses that did not satisfy their grammar, ``failed`` the grammars
    that did not compile, both in this process; the first of each is logged as a warning.
    """

    def __init__(self, vocabulary: Vocabulary, *, cache_size: int = 256) -> None:
        self.vocabulary = vocabulary
        self._cache_size = cache_size
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("vocabulary", "_cache_size")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def compile(self, grammar: str) -> CompiledGrammar | None:
        """The grammar of a column's text; None for "" and for one that does not compile."""
        if not grammar:
            return None
        if self._pid != os.getpid():
            self._forget()
        return self._known(grammar)

    def fill(
        self,
        table: MaskTable,
        input_ids: Sequence[int] | NDArray[np.int64],
        response_start: int,
        grammar: str,
    ) -> list[int] | None:
        """Rows of ``table``, [n]: the legal tokens at each position from ``response_start`` on.

        None, and the table is left as it was, where there is no grammar, where it does not compile,
        and where the response does not satisfy it. A response may be cut before its end.
        """
        compiled = self.compile(grammar)
        if compiled is None:
            return None
        length = len(table)
        matcher = compiled.new_matcher()
        slots: list[int] = []
        for token_id in map(int, input_ids[response_start:]):
            slot = None if matcher.is_terminated() else table.add(matcher)
            # The mask decides: ``accept_token`` may admit more, and refuses some tokens noisily.
            is_legal = slot is not None and table.allows(slot, token_id)
            if slot is None or not is_legal or not matcher.accept_token(token_id):
                table.truncate(length)
                self._reject(grammar, position=len(slots))
                return None
            slots.append(slot)
        return slots

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._backend: AutoBackend | None = None
        self._known = lru_cache(maxsize=self._cache_size)(self._compile)
        self.rejected = 0
        self.failed = 0

    def _compile(self, grammar: str) -> CompiledGrammar | None:
        if self._backend is None:
            # There are many workers already, and threads of a parent are dead after a fork.
            self._backend = AutoBackend(self.vocabulary, compile_threads=1)
        spec = read_grammar_text(grammar)
        assert spec is not None
        try:
            return self._backend.compile(spec)
        except GrammarError as error:
            self.failed += 1
            if self.failed == 1:
                logger.warning("a grammar does not compile, its responses count as free: %s", error)
            return None

    def _reject(self, grammar: str, *, position: int) -> None:
        self.rejected += 1
        if self.rejected == 1:
            text = "a response leaves its grammar at token %d and counts as free text: %.200s"
            logger.warning(text, position, grammar)
