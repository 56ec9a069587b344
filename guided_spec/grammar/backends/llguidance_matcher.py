"""One text's position in a grammar of llguidance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import ConfigError, GrammarStateError
from guided_spec.grammar.protocol import Matcher
from guided_spec.grammar.rows import full_row
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["LLGuidanceMatcher", "LLGuidanceSource"]


class LLGuidanceSource(NamedTuple):
    """Everything that a matcher is made from.

    library: the module llguidance. tokenizer: its ``LLTokenizer`` of the vocabulary.
    text: a grammar in its Lark dialect.
    """

    library: Any
    tokenizer: Any
    text: str
    vocabulary: Vocabulary

    def new(self) -> Any:
        """llguidance's own matcher, at the start; in its error state if the text is broken."""
        grammar = self.library.LLMatcher.grammar_from_lark(self.text)
        return self.library.LLMatcher(self.tokenizer, grammar, log_level=0)


class LLGuidanceMatcher(Matcher):
    """A ``GrammarMatcher`` over llguidance's.

    llguidance ends in an error, and stays there, after a refused token and where a limit is hit.
    So a token is checked before it is consumed, stop tokens are kept away from it, and after an
    error it is made anew from ``token_ids``.
    """

    def __init__(self, source: LLGuidanceSource, matcher: Any) -> None:
        self._source = source
        self._matcher = matcher
        self._token_ids: list[int] = []
        self._has_ended = False

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, where it is refused."""
        token_id = int(token_id)
        vocabulary = self._source.vocabulary
        if self._has_ended or not 0 <= token_id < vocabulary.vocab_size:
            return False
        if token_id in vocabulary.stop_token_ids:
            self._has_ended = bool(self._matcher.is_accepting())
            if not self._has_ended:
                return False
        elif not vocabulary.token_bytes[token_id] or self._matcher.validate_tokens([token_id]) != 1:
            return False
        elif not self._matcher.consume_token(token_id):
            self._replay()
            return False
        self._token_ids.append(token_id)
        return True

    def takes(self, token_ids: Sequence[int]) -> bool:
        """In microseconds, a fraction of accepting a token that completes the text."""
        count: int = 0 if self._has_ended else self._matcher.validate_tokens(token_ids)
        return count == len(token_ids)

    def forced_bytes(self) -> bytes:
        """What must come next in every text, as far as that is known; does not move."""
        forced: bytes = b"" if self._has_ended else self._matcher.compute_ff_bytes()
        return forced

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index``; returns whether it forbids anything. See ``GrammarMatcher``.

        All zero, a dead end, where llguidance gives up: no token of the vocabulary goes on, or the
        grammar is too complex here. Raises GrammarStateError on a terminated matcher.
        """
        if self._has_ended:
            raise GrammarStateError("the text is complete: no token can follow")
        row: NDArray[np.int32] = np.asarray(bitmask)[index]  # a view, also of a tensor
        self._fill(row)
        if self._matcher.is_error():
            self._replay()  # a new lexer, too: the shared one may be full
            self._fill(row)
            if self._matcher.is_error():
                self._replay()
                row[:] = 0  # llguidance would allow a stop token in the middle of the text
        return not np.array_equal(row, full_row(self._source.vocabulary.vocab_size))

    def fork(self) -> LLGuidanceMatcher:
        """An independent copy at the same position."""
        copy = LLGuidanceMatcher(self._source, self._matcher.deep_copy())
        copy._token_ids = self._token_ids.copy()
        copy._has_ended = self._has_ended
        return copy

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens. Raises ConfigError if there are fewer."""
        if not 0 <= num_tokens <= len(self._token_ids):
            fix = f"must be between 0 and {len(self._token_ids)}, the tokens accepted so far"
            raise ConfigError("num_tokens", num_tokens, fix)
        if num_tokens == 0:
            return
        del self._token_ids[-num_tokens:]
        surplus = num_tokens - self._has_ended
        self._has_ended = False
        if surplus and not self._matcher.rollback(surplus):
            self._replay()

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._has_ended

    def _fill(self, row: NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def _replay(self) -> None:
        self._matcher = self._source.new()
        self._matcher.consume_tokens(self._token_ids)
