"""What a grammar backend has to be. xgrammar's matcher satisfies ``GrammarMatcher`` as it is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import UnsatisfiableGrammarError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.token_table import TableState
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import full_row, num_mask_words


class RowSource(Protocol):
    """What knows which tokens may come next."""

    # xgrammar takes tensors and arrays alike, hence Any.
    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index`` of a contiguous CPU int32 [rows, W] bitmask; does not move.

        Bit ``t % 32`` of word ``t // 32`` is 1 when token t may come next. Returns whether the
        row forbids anything. Must not be called on a terminated matcher.
        """
        ...


class GrammarMatcher(RowSource, Protocol):
    """One text's position in a grammar. Used by one thread at a time."""

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, when the grammar refuses it."""
        ...

    def fork(self) -> GrammarMatcher:
        """An independent copy at the same position."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""
        ...

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        ...


class Source(NamedTuple):
    """A library's own matcher, which may be moved in the place of those around it.

    matcher: stands where they do, at a text that has not ended. reach: tokens, perhaps none, that
    it alone judges, as it fills the rows before them and the one after. stops: the tokens that end
    a text. leads: tokens after which it does not judge alone.
    """

    matcher: GrammarMatcher
    reach: int
    stops: frozenset[int]
    leads: frozenset[int] = frozenset()


class Budget(NamedTuple):
    """That a matcher ends its text within a number of tokens, while it knows a way to an end.

    grammar: the one of the text without it. is_required: whether a text whose way is lost is at
        fault; else it goes on without a budget.
    """

    grammar: CompiledGrammar
    is_required: bool


class Matcher(GrammarMatcher):
    """A ``GrammarMatcher`` that can be asked more. ``as_matcher`` makes one of any other."""

    @abstractmethod
    def fork(self) -> Matcher:
        """An independent copy at the same position."""

    @property
    def fault(self) -> str | None:
        """Why no more can be expected of it; None while it works."""
        return None

    @property
    def may_fail(self) -> bool:
        """Whether it can ever have a ``fault``."""
        return False

    @property
    def row_source(self) -> GrammarMatcher:
        """The matcher that fills the next row; asked again when this one has moved.

        Rows of many matchers of one library may be filled in one call; a wrapper need not be in
        the way.
        """
        return self

    def source(self) -> Source | None:
        """What may go along a draft in its place; None where it has to see every token itself.

        ``replay`` brings it after the draft.
        """
        return None

    def replay(self, token_ids: Sequence[int]) -> None:
        """Go where its ``source`` went, over these tokens, without asking any matcher."""
        raise NotImplementedError(f"{type(self).__name__} has no source")

    @property
    def lenient(self) -> Matcher:
        """One at the same place whose rows cost less, and may hold tokens that are refused here."""
        return self

    def interchangeable(self, row: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32 [W]: of some legal tokens those that others like them may stand for.

        The rest may begin or complete a key that is there already.
        """
        return row

    @property
    def budget(self) -> Budget | None:
        """What it ends its text within; None where the text may be of any length."""
        return None

    @property
    def steered(self) -> Set[int]:
        """Positions in the text at which a row was filled that lacks tokens for a budget."""
        return frozenset()

    @property
    def has_lost_end(self) -> bool:
        """Whether there is a budget, and no way to an end of the text within it is known."""
        return False

    @property
    def num_tabled(self) -> int:
        """Tokens of the text that a table judged, see ``guided_spec.grammar.tables``."""
        return 0

    def table_state(self) -> TableState | None:
        """Where the text stands in a table; None where its rows may be others than the table's.

        The caller's own, who may move it on.
        """
        return None

    def read(self, token_ids: Sequence[int]) -> int:
        """Accept tokens up to the end of the text or the first refused one; returns how many."""
        is_terminated, accept = self.is_terminated, self.accept_token
        for taken, token_id in enumerate(token_ids):
            if is_terminated() or not accept(token_id):
                return taken
        return len(token_ids)

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Whether all these tokens are accepted, no stop token before the last; does not move."""
        count = accept_tokens(self, token_ids)
        if count:
            self.rollback(count)
        return count == len(token_ids)

    def forced_bytes(self) -> bytes:
        """What must come next in every text, as far as that is known; does not move."""
        return b""


class _PlainMatcher(Matcher):
    """A matcher that cannot be asked more: one from outside of this package."""

    accept_token: Callable[..., bool]
    fill_next_token_bitmask: Callable[..., bool]
    rollback: Callable[..., None]
    is_terminated: Callable[..., bool]

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        # Its own methods, so that a call costs no more than before.
        self.accept_token = matcher.accept_token
        self.fill_next_token_bitmask = matcher.fill_next_token_bitmask
        self.rollback = matcher.rollback
        self.is_terminated = matcher.is_terminated

    @property
    def row_source(self) -> GrammarMatcher:
        return self._matcher

    def fork(self) -> Matcher:
        return _PlainMatcher(self._matcher.fork())


def as_matcher(matcher: GrammarMatcher) -> Matcher:
    """The matcher itself where it is a ``Matcher``, else one around it that moves it."""
    return matcher if isinstance(matcher, Matcher) else _PlainMatcher(matcher)


class WrappedMatcher(Matcher):
    """A matcher around another one, whose faults are its own.

    inner: at the start of its grammar.
    """

    def __init__(self, inner: GrammarMatcher) -> None:
        self._inner = as_matcher(inner)

    @property
    def inner(self) -> Matcher:
        """The grammar's own matcher."""
        return self._inner

    @property
    def fault(self) -> str | None:
        """As the inner matcher has it."""
        return self._inner.fault

    @property
    def may_fail(self) -> bool:
        """As the inner matcher has it."""
        return self._inner.may_fail

    @property
    def num_tabled(self) -> int:
        """As the inner matcher has it."""
        return self._inner.num_tabled

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._inner.is_terminated()


def accept_tokens(matcher: GrammarMatcher, token_ids: Sequence[int]) -> int:
    """Accept tokens up to the first refused one; returns how many."""
    for count, token in enumerate(token_ids):
        if not matcher.accept_token(token):
            return count
    return len(token_ids)


def legal_row(matcher: RowSource, vocab_size: int) -> NDArray[np.int32]:
    """int32 [W]: the tokens that may come next; the matcher does not move."""
    row = np.zeros((1, num_mask_words(vocab_size)), dtype=np.int32)
    matcher.fill_next_token_bitmask(row)
    own: NDArray[np.int32] = row[0] & full_row(vocab_size)  # after the last token all may be set
    return own


def require_first_token(grammar: CompiledGrammar, vocab_size: int, kind: str) -> None:
    """Raise UnsatisfiableGrammarError, about a grammar of this kind, for an empty first mask."""
    if not legal_row(grammar.new_matcher(), vocab_size).any():
        raise UnsatisfiableGrammarError(f"no text of this vocabulary matches the {kind}")


class CompiledGrammar(Protocol):
    """A grammar compiled for one vocabulary: immutable, shared by requests.

    excluded: tokens that no text of the grammar holds. Matchers may refuse them noisily, so a draft
        that guesses freely is cut before them without asking.
    memory_size_bytes: what it takes as long as it is kept, as far as that is known.
    """

    @property
    def excluded(self) -> frozenset[int]: ...

    @property
    def memory_size_bytes(self) -> int: ...

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the start of the grammar."""
        ...

    def new_style_matcher(self) -> GrammarMatcher | None:
        """A matcher of a stricter grammar in one fixed whitespace style, to draft from.

        None when the grammar leaves no whitespace free. Never used for masks.
        """
        ...


@dataclass(frozen=True, eq=False)
class WrappedGrammar:
    """A grammar around another one, ``inner``, whose size and whitespace style are its own."""

    inner: CompiledGrammar

    @property
    def excluded(self) -> frozenset[int]:
        """Of the one inside."""
        return self.inner.excluded

    @property
    def memory_size_bytes(self) -> int:
        """Of the one inside."""
        return self.inner.memory_size_bytes

    def new_style_matcher(self) -> GrammarMatcher | None:
        """The one inside's: drafts are cut where this grammar refuses them."""
        return self.inner.new_style_matcher()


class GrammarBackend(Protocol):
    """Compiles grammars for one vocabulary. ``compile`` may be called from several threads.

    docs/add_a_grammar_backend.md has the whole contract; ``register_grammar_backend`` adds one.
    """

    vocabulary: Vocabulary

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile ``spec``.

        Raises GrammarCompileError (broken), UnsupportedSchemaError (valid, but not enforceable
        in full) or UnsatisfiableGrammarError (nothing matches).
        """
        ...
