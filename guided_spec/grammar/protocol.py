"""What a grammar backend has to be. xgrammar's matcher satisfies ``GrammarMatcher`` as it is."""

from __future__ import annotations

from typing import Any, Protocol

from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = [
    "CompiledGrammar",
    "GrammarBackend",
    "GrammarMatcher",
    "fault_of",
    "may_fail",
    "row_source",
]


class GrammarMatcher(Protocol):
    """One text's position in a grammar. Used by one thread at a time.

    A matcher around another one may also say which of the two fills the next row: see
    ``row_source``.
    """

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, when the grammar refuses it."""
        ...

    # xgrammar takes tensors and arrays alike, hence Any.
    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index`` of a contiguous CPU int32 [rows, W] bitmask; does not move.

        Bit ``t % 32`` of word ``t // 32`` is 1 when token t may come next. Returns whether the
        row forbids anything. Must not be called on a terminated matcher.
        """
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


def row_source(matcher: GrammarMatcher) -> GrammarMatcher:
    """The matcher that fills the next row of ``matcher``: its attribute ``row_source``, or itself.

    Rows of many matchers of one library may be filled in one call; a wrapper need not be in the
    way. It holds for one position: the matcher is asked again when it has moved.
    """
    source: GrammarMatcher = getattr(matcher, "row_source", matcher)
    return source


def fault_of(matcher: GrammarMatcher) -> str | None:
    """Why no more can be expected of a matcher, or of one ``inner`` to it; None while it works."""
    at: Any = matcher
    while at is not None:
        fault: str | None = getattr(at, "fault", None)
        if fault is not None:
            return fault
        at = getattr(at, "inner", None)
    return None


def may_fail(matcher: GrammarMatcher) -> bool:
    """Whether ``fault_of`` can ever find anything: it never does with xgrammar's own matchers."""
    at: Any = matcher
    while at is not None:
        if hasattr(at, "fault"):
            return True
        at = getattr(at, "inner", None)
    return False


class CompiledGrammar(Protocol):
    """A grammar compiled for one vocabulary: immutable, shared by requests.

    excluded: tokens that no text of the grammar holds. Matchers may refuse them noisily, so a draft
        that guesses freely is cut before them without asking.
    """

    @property
    def excluded(self) -> frozenset[int]: ...

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the start of the grammar."""
        ...

    def new_style_matcher(self) -> GrammarMatcher | None:
        """A matcher of a stricter grammar in one fixed whitespace style, to draft from.

        None when the grammar leaves no whitespace free. Never used for masks.
        """
        ...


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
