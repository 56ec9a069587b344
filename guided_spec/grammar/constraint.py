"""One request's place in its grammar: the original matcher, and a fork that runs ahead of it.

The original moves on committed tokens only. The fork follows drafts; it is made once per request
and brought back by rollback, because forking copies the whole history while rollback does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher

__all__ = ["Constraint", "Fork"]


class Fork:
    """A matcher ahead of the committed text by ``token_ids``, which may all be taken back.

    excluded: tokens to refuse without asking the matcher. Used by one thread at a time.
    """

    def __init__(self, matcher: GrammarMatcher, excluded: frozenset[int] = frozenset()) -> None:
        self.matcher = matcher
        self._excluded = excluded
        self.token_ids: list[int] = []

    def accept(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, when the grammar refuses it."""
        if token_id in self._excluded or not self.matcher.accept_token(token_id):
            return False
        self.token_ids.append(token_id)
        return True

    def rollback_to(self, length: int) -> None:
        """Go back until only the first ``length`` tokens of the draft are left."""
        surplus = len(self.token_ids) - length
        if surplus > 0:
            self.matcher.rollback(surplus)
            del self.token_ids[length:]

    def follow_commit(self, token_ids: Sequence[int]) -> None:
        """Stand where the original stands after it committed ``token_ids``; nothing is ahead."""
        agreed = 0
        while (
            agreed < min(len(token_ids), len(self.token_ids))
            and token_ids[agreed] == self.token_ids[agreed]
        ):
            agreed += 1
        self.rollback_to(agreed)
        for token_id in token_ids[agreed:]:
            if not self.matcher.accept_token(token_id):
                raise GrammarStateError(f"the fork refused token {token_id} that was committed")
        self.token_ids.clear()


class Constraint:
    """One request's grammar, at the end of its committed text.

    compiled: shared with other requests; this constraint makes its own matchers from it.
    """

    def __init__(self, compiled: CompiledGrammar) -> None:
        self.compiled = compiled
        self.committed: list[int] = []
        self._original = compiled.new_matcher()
        self._fork = Fork(self._original.fork(), compiled.excluded)

    @property
    def is_terminated(self) -> bool:
        """Whether a stop token was committed: the text is complete."""
        return self._original.is_terminated()

    def fork(self) -> Fork:
        """The fork, standing where the original stands. The previous draft is forgotten."""
        self._fork.rollback_to(0)
        return self._fork

    def commit(self, token_ids: Sequence[int]) -> list[int]:
        """Advance the original; returns the tokens up to the one that ended the text.

        Raises GrammarStateError when the grammar refuses a token: the text is then no longer
        inside the grammar, and the request cannot go on.
        """
        taken: list[int] = []
        for token_id in token_ids:
            if self._original.is_terminated():
                break
            if not self._original.accept_token(token_id):
                position = len(self.committed) + len(taken)
                reason = f"the grammar refuses token {token_id} at output position {position}"
                raise GrammarStateError(f"{reason}, after it was accepted by the verifier")
            taken.append(token_id)
        self.committed.extend(taken)
        self._fork.follow_commit(taken)
        return taken
