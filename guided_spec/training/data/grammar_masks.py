"""Which tokens a grammar lets stand at each place of an answer.

Made where the batches are made: in the worker processes of a data loader, beside the training.

The mask rows of one batch: every row is kept once, however many places it belongs to.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.errors import GrammarError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend, GrammarMatcher
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.rows import row_allows
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.training.data.dataset import read_grammar_text

__all__ = [
    "GrammarMasks",
    "MaskTable",
]


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

        It is filled in place: a row that turns out to be there already is filled over next time.
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


logger = logging.getLogger(__name__)


class GrammarMasks:
    """Mask rows of tokenized answers; may be pickled, and used behind a fork.

    backend: makes the grammar backend from the vocabulary; None makes an ``XGrammarBackend``. Each
        process makes its own when it first needs one, since compiled grammars do not travel.
    cache_size: compiled grammars, and failures, that are remembered; the least recently used goes
        first.

    ``rejected`` counts the answers that did not satisfy their grammar, ``failed`` the grammars that
    did not compile, both in this process; the first of each is logged as a warning.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        backend: Callable[[Vocabulary], GrammarBackend] | None = None,
        cache_size: int = 256,
    ) -> None:
        self.vocabulary = vocabulary
        self._make_backend = backend or _one_thread
        self._cache_size = cache_size
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("vocabulary", "_make_backend", "_cache_size")
        return {name: self.__dict__[name] for name in kept}

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
        answer_start: int,
        grammar: str,
    ) -> list[int] | None:
        """Rows of ``table``, [n]: which tokens may stand at each place from ``answer_start`` on.

        None, and the table is left as it was, where there is no grammar, where it does not compile,
        and where the answer does not satisfy it. An answer that is cut before its end satisfies it
        so far.
        """
        compiled = self.compile(grammar)
        if compiled is None:
            return None
        length = len(table)
        matcher = compiled.new_matcher()
        slots: list[int] = []
        for token_id in map(int, input_ids[answer_start:]):
            slot = None if matcher.is_terminated() else table.add(matcher)
            # The mask decides: ``accept_token`` may admit more, and refuses some tokens noisily.
            is_legal = slot is not None and table.allows(slot, token_id)
            if slot is None or not is_legal or not matcher.accept_token(token_id):
                table.truncate(length)
                self._reject(grammar, place=len(slots))
                return None
            slots.append(slot)
        return slots

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._backend: GrammarBackend | None = None
        self._known = lru_cache(maxsize=self._cache_size)(self._compile)
        self.rejected = 0
        self.failed = 0

    def _compile(self, grammar: str) -> CompiledGrammar | None:
        if self._backend is None:
            self._backend = self._make_backend(self.vocabulary)
        spec = read_grammar_text(grammar)
        assert spec is not None
        try:
            return self._backend.compile(spec)
        except GrammarError as error:
            self.failed += 1
            if self.failed == 1:
                logger.warning("a grammar does not compile, its answers count as free: %s", error)
            return None

    def _reject(self, grammar: str, *, place: int) -> None:
        self.rejected += 1
        if self.rejected == 1:
            text = "an answer leaves its grammar at token %d and counts as free text: %.200s"
            logger.warning(text, place, grammar)


def _one_thread(vocabulary: Vocabulary) -> GrammarBackend:
    # There are many workers already, and threads of a parent are dead behind a fork.
    return XGrammarBackend(vocabulary, compile_threads=1)
