"""One request's place in its grammar, moved the way SGLang moves it."""

from __future__ import annotations

from typing import Any

from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher

__all__ = ["Place"]


class Place:
    """A matcher behind SGLang's habits: refusals raise, and a finished text takes any token.

    A step back costs no more than the tokens taken back, however long the text is.
    """

    def __init__(self, matcher: GrammarMatcher, length: int = 0, ignored: int = 0) -> None:
        self._matcher = matcher
        self._length = length
        self._ignored = ignored  # tokens behind the end of the text: no matcher has seen them

    @classmethod
    def at_start(cls, compiled: CompiledGrammar) -> Place:
        """Before the first token."""
        return cls(compiled.new_matcher())

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
                f"the grammar refuses token {token_id} at position {self._length} of its text"
            )
        self._length += 1

    def rollback(self, num_tokens: int) -> None:
        """Take back the last ``num_tokens`` tokens."""
        unseen = min(num_tokens, self._ignored)
        self._ignored -= unseen
        if num_tokens > unseen:
            self._matcher.rollback(num_tokens - unseen)
            self._length -= num_tokens - unseen

    def fill(self, bitmask: Any, index: int) -> None:
        """Write what may come next into row ``index``, int32 [rows, W] on the host.

        The row of a complete text is left as it is.
        """
        if not self.is_terminated:
            self._matcher.fill_next_token_bitmask(bitmask, index)

    def copy(self) -> Place:
        """An independent one at the same place."""
        return Place(self._matcher.fork(), self._length, self._ignored)
