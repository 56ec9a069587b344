"""The constraint of another engine's request, of which only the committed tokens are known.

It follows the request's grammar. It may lag behind, or be lost: the request then goes on without
it, and vLLM's log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.backends.xgrammar import XGrammarGrammar
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.masks.constraint import Constraint

_logger = logging.getLogger("vllm.guided_spec")


class ShadowConstraint:
    """The constraint of one running request.

    future: its grammar, which is compiled in the background. stops: as of
    ``VllmGrammars.stops_of``.
    """

    def __init__(
        self, future: Future[CompiledGrammar], stops: frozenset[int] = frozenset()
    ) -> None:
        self._future = future
        self._stops = stops
        self._constraint: Constraint | None = None
        self._is_lost = False

    def follow(self, text: Sequence[int], start: int = 0, *, waits: bool) -> Constraint | None:
        """Where the grammar stands at the end of the committed tokens.

        text: these are all from ``start`` on; of them only what is new is read. waits: whether to
        wait for the grammar.

        None while its grammar compiles, once its text is complete, and after it was lost: when the
        grammar does not compile or refuses a token. Text that does not go on from what came before
        is followed from its beginning.
        """
        if self._is_lost or not (waits or self._future.done()):
            return None
        if (failure := self._future.exception()) is not None:
            self._lose(failure)
            return None
        constraint = self._constraint
        if constraint is None or not _continues(constraint.committed, text, start):
            grammar = self._future.result()
            if self._stops and isinstance(grammar, XGrammarGrammar):
                excluded = grammar.excluded - self._stops
                grammar = replace(grammar, stops=tuple(self._stops), excluded=excluded)
            constraint = self._constraint = Constraint(grammar)
        try:
            constraint.commit(text[start + len(constraint.committed) :])
        except GrammarStateError as error:
            self._lose(error)
            return None
        return None if constraint.is_terminated else constraint

    def again(self) -> ShadowConstraint:
        """The same request's, whose text is read from its beginning."""
        return ShadowConstraint(self._future, self._stops)

    def _lose(self, error: BaseException) -> None:
        self._is_lost = True
        _logger.warning("guided_spec: a request's grammar is not followed any more: %s", error)


def _continues(committed: Sequence[int], text: Sequence[int], start: int) -> bool:
    """Whether ``text`` may continue ``committed`` from ``start`` on; looks at its end only."""
    last = len(committed) - 1
    return len(text) - start > last and (last < 0 or text[start + last] == committed[last])
