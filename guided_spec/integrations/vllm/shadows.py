"""The constraints of another engine's requests, of which only the committed tokens are known.

A shadow constraint follows a request's grammar. It may lag behind, or be lost: the request then
goes on without it, and vLLM's log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.backends.xgrammar import XGrammarGrammar
from guided_spec.grammar.pipeline import GrammarCompileQueue
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.masks.constraint import Constraint

__all__ = ["ShadowConstraints"]

_logger = logging.getLogger("vllm.guided_spec")


class ShadowConstraints:
    """The constraints of running requests, by any names for these.

    queue: compiles their grammars in the background, once for equal ones.
    waits: whether ``follow`` waits for a grammar that is not compiled yet.
    """

    def __init__(self, queue: GrammarCompileQueue, *, waits: bool = False) -> None:
        self._queue = queue
        self._waits = waits
        self._shadows: dict[Hashable, _Shadow] = {}

    def follow(
        self,
        name: Hashable,
        spec: GrammarSpec,
        text: Sequence[int],
        start: int = 0,
        *,
        stops: frozenset[int] = frozenset(),
        waits: bool = False,
    ) -> Constraint | None:
        """The constraint of a request at the end of its committed tokens.

        text: all of these from ``start`` on; of them only what is new is read. stops: as of
        ``VllmGrammars.stops_of``. waits: whether to wait for the grammar here in any case.

        None while its grammar compiles, once its text is complete, and after it was lost: when the
        grammar does not compile or refuses a token. Text that does not go on from what came before
        is followed from its beginning.
        """
        self.prepare(name, spec, stops)
        return self._shadows[name].follow(text, start, waits=waits or self._waits)

    def prepare(
        self, name: Hashable, spec: GrammarSpec, stops: frozenset[int] = frozenset()
    ) -> None:
        """Begin to compile a request's grammar, which is followed later."""
        shadow = self._shadows.get(name)
        if shadow is None or shadow.spec != spec or shadow.stops != stops:
            self._shadows[name] = _Shadow(spec, stops, self._queue.submit(spec))

    def forget(self, name: Hashable) -> None:
        """Forget a request; one that is not known is no error."""
        self._shadows.pop(name, None)

    def keep(self, names: Container[Hashable]) -> None:
        """Forget every request that is not among ``names``."""
        for name in [name for name in self._shadows if name not in names]:
            del self._shadows[name]


class _Shadow:
    def __init__(
        self, spec: GrammarSpec, stops: frozenset[int], future: Future[CompiledGrammar]
    ) -> None:
        self.spec = spec
        self.stops = stops
        self._future = future
        self._constraint: Constraint | None = None
        self._is_lost = False

    def follow(self, text: Sequence[int], start: int, *, waits: bool) -> Constraint | None:
        if self._is_lost or not (waits or self._future.done()):
            return None
        if (failure := self._future.exception()) is not None:
            self._lose(failure)
            return None
        constraint = self._constraint
        if constraint is None or not _continues(constraint.committed, text, start):
            grammar = self._future.result()
            if self.stops and isinstance(grammar, XGrammarGrammar):
                excluded = grammar.excluded - self.stops
                grammar = replace(grammar, stops=tuple(self.stops), excluded=excluded)
            constraint = self._constraint = Constraint(grammar)
        try:
            constraint.commit(text[start + len(constraint.committed) :])
        except GrammarStateError as error:
            self._lose(error)
            return None
        return None if constraint.is_terminated else constraint

    def _lose(self, error: BaseException) -> None:
        self._is_lost = True
        _logger.warning("guided_spec: a request's grammar is not followed any more: %s", error)


def _continues(committed: Sequence[int], text: Sequence[int], start: int) -> bool:
    """Whether ``text`` may continue ``committed`` from ``start`` on; looks at its end only."""
    last = len(committed) - 1
    return len(text) - start > last and (last < 0 or text[start + last] == committed[last])
