"""One request's place in its grammar, moved the way SGLang moves it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher

__all__ = ["Place"]


class Place:
    """A matcher behind SGLang's habits: refusals raise, and a finished text takes any token.

    compiled: the matcher's grammar. text: the tokens that the matcher has taken. ignored: how many
    came behind the end of the text; no matcher has seen them.

    A step back costs no more than the tokens taken back, however long the text is.
    """

    def __init__(
        self,
        compiled: CompiledGrammar,
        matcher: GrammarMatcher,
        text: Sequence[int] = (),
        ignored: int = 0,
    ) -> None:
        self._compiled = compiled
        self._matcher = matcher
        self._text = [*text]
        self._ignored = ignored
        self._constraint: Constraint | None = None

    @classmethod
    def at_start(cls, compiled: CompiledGrammar) -> Place:
        """Before the first token."""
        return cls(compiled, compiled.new_matcher())

    @property
    def is_terminated(self) -> bool:
        """Whether the text is complete."""
        return self._matcher.is_terminated()

    def accept(self, token_id: int) -> None:
        """Advance by one token; tokens behind the end of the text are counted and change nothing.

        Raises ValueError for a token that the grammar refuses: SGLang ends the request by it.
        """
        if self.is_terminated:
            self._ignored += 1
            return
        if not self._matcher.accept_token(token_id):
            raise ValueError(
                f"the grammar refuses token {token_id} at position {len(self._text)} of its text"
            )
        self._text.append(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` tokens."""
        unseen = min(num_tokens, self._ignored)
        self._ignored -= unseen
        seen = num_tokens - unseen
        if seen:
            self._matcher.rollback(seen)
            del self._text[-seen:]
            if self._constraint is not None and len(self._constraint.committed) > len(self._text):
                self._constraint = None

    def fill(self, bitmask: Any, index: int) -> None:
        """Write what may come next into row ``index``, int32 [rows, W] on the host.

        The row of a complete text is left as it is.
        """
        if not self.is_terminated:
            self._matcher.fill_next_token_bitmask(bitmask, index)

    def copy(self) -> Place:
        """An independent one at the same place."""
        return Place(self._compiled, self._matcher.fork(), self._text, self._ignored)

    def constraint(self) -> Constraint | None:
        """The same place for a proposer to draft from; None where nothing can be drafted.

        It has matchers of its own, which follow this place from one call to the next. None for a
        complete text, and where these matchers refuse what this place's has taken.
        """
        if self.is_terminated:
            return None
        if self._constraint is None:
            self._constraint = Constraint(self._compiled)
        try:
            self._constraint.commit(self._text[len(self._constraint.committed) :])
        except GrammarStateError:
            self._constraint = None
        return self._constraint
