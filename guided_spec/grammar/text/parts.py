"""What a new text is made of: a matcher, filters of its rows, and free text before them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher
from guided_spec.grammar.tables.token_table import UNBOUND, TokenTable
from guided_spec.grammar.text.row_filter import LookaheadFilter, RowFilter

_NONE: frozenset[int] = frozenset()


class Preamble(Protocol):
    """Free text before a grammar, up to a marker. State 0 is its start, ``end`` its end."""

    @property
    def end(self) -> int: ...

    def after(self, state: int, token_id: int, num_tokens: int) -> int | None:
        """The state after a token; None where it is refused. num_tokens: before it."""
        ...

    def row(self, state: int, num_tokens: int) -> NDArray[np.int32]:
        """int32 [W]: the tokens that may come next. Read only."""
        ...


class HasTable(Protocol):
    """A grammar that may get a table while its texts are written."""

    @property
    def table(self) -> TokenTable | None: ...


class Budget(NamedTuple):
    """That a text ends within a number of tokens, while a path to an end is known.

    grammar: the one of the text without it. is_required: whether a text whose path is lost is at
        fault; else it goes on without a budget.
    """

    grammar: CompiledGrammar
    is_required: bool


class TextParts(NamedTuple):
    """What a new text is made of.

    new_matcher: makes the library's matcher, at the start of the grammar.
    vocab_size: larger tokens are never handed to it, nor negative ones.
    excluded: tokens that no text of the grammar holds. stops: those that end it; None where only
        the matcher knows.
    filters: of the grammar, in the order in which they are asked. preamble: free text before it.
    tabled: the grammar, if it may get a table.
    limit: the filter of the budget, asked last. budget: what that filter is for.
    """

    new_matcher: Callable[[], GrammarMatcher]
    excluded: frozenset[int] = _NONE
    vocab_size: int = UNBOUND
    stops: frozenset[int] | None = None
    filters: tuple[LookaheadFilter, ...] = ()
    preamble: Preamble | None = None
    tabled: HasTable | None = None
    limit: RowFilter | None = None
    budget: Budget | None = None

    def fork(self) -> TextParts:
        """The parts of a copy of the text."""
        limit = None if self.limit is None else self.limit.fork()
        return self._replace(filters=tuple(one.fork() for one in self.filters), limit=limit)


@runtime_checkable
class TextGrammar(Protocol):
    """A compiled grammar that says what its texts are made of."""

    def new_parts(self) -> TextParts:
        """The parts of one more text."""
        ...


def new_parts(compiled: CompiledGrammar) -> TextParts:
    """What one more text of a grammar is made of: of any other than ours, its matcher alone."""
    if isinstance(compiled, TextGrammar):
        return compiled.new_parts()
    return TextParts(compiled.new_matcher, compiled.excluded)
