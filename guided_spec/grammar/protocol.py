"""The protocols of a grammar backend. xgrammar's matcher satisfies ``GrammarMatcher`` as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import UnsatisfiableGrammarError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import full_row, num_mask_words


class RowSource(Protocol):
    """Knows which tokens may come next."""

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


class Matcher(GrammarMatcher):
    """A ``GrammarMatcher`` that can be asked more."""

    @property
    def fault(self) -> str | None:
        """Why it has stopped working; None while it works."""
        return None

    @property
    def may_fail(self) -> bool:
        """Whether it can ever have a ``fault``."""
        return False

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Whether all these tokens are accepted, no stop token before the last; does not move."""
        count = accept_tokens(self, token_ids)
        if count:
            self.rollback(count)
        return count == len(token_ids)

    def forced_bytes(self) -> bytes:
        """What must come next in every text, as far as that is known; does not move."""
        return b""


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
