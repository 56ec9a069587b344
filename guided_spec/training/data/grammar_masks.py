"""Which tokens a grammar lets stand at each place of an answer.

Made where the batches are made: in the worker processes of a data loader, beside the training.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import GrammarError
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.grammar.xgrammar import XGrammarBackend
from guided_spec.training.data.dataset import read_grammar_text
from guided_spec.training.data.mask_table import MaskTable

__all__ = ["GrammarMasks"]

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

    def rows(
        self, input_ids: Sequence[int] | NDArray[np.int64], answer_start: int, grammar: str
    ) -> NDArray[np.int32] | None:
        """int32 [n, W]: row i says which tokens may stand at place ``answer_start + i``.

        None where there is no grammar, where it does not compile, and where the answer does not
        satisfy it. An answer that is cut before its end satisfies it so far.
        """
        table = MaskTable(len(input_ids) - answer_start, self.vocabulary.vocab_size)
        slots = self.fill(table, input_ids, answer_start, grammar)
        return None if slots is None else table.rows().numpy()[slots]

    def fill(
        self,
        table: MaskTable,
        input_ids: Sequence[int] | NDArray[np.int64],
        answer_start: int,
        grammar: str,
    ) -> list[int] | None:
        """``rows`` as n rows of ``table``, which is left as it was where there are none."""
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
