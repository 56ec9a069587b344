"""What the grammar leaves no choice about, proposed whole.

A token is rarely forced (after ``{"`` the tokens ``n``, ``na`` and ``name`` may all be legal), but
the *text* often is. So the search goes byte by byte: as long as exactly one single byte is legal,
it is forced. The forced text is then tokenised the way the tokenizer would write it. The last token
may be wrong where the tokenizer would have merged it with what follows; verification is exact, so
that costs nothing but the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.core import DecodeBatch, DraftInFlight, FinishedDraft, ProposerContext
from guided_spec.grammar.completion.completion import without_budget
from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.grammar.vocabulary import CanonicalTokens, Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import row_allows
from guided_spec.ops.bitmask import num_mask_words
from guided_spec.proposers.drafting import host_draft

__all__ = ["ForcedSearch", "GrammarForced"]

LONGEST_TEXT = 96  # bytes; bounds the search, since a grammar can force text without end


class GrammarForced:
    """Drafts forced text, up to ``config.max_forced_tokens`` tokens a step; needs no model."""

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, context: ProposerContext) -> None:
        self._limit = context.config.max_forced_tokens
        self._search = ForcedSearch(context.vocabulary)
        self._tokens = CanonicalTokens(context.encode, context.vocabulary.token_bytes)
        self._styles: dict[int, _Style] = {}

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """The forced tokens after each request's draft so far; none for free requests."""
        del carry
        is_open = lookahead.is_open
        drafts = [
            self._draft(batch, lookahead, request) if is_open[request] else []
            for request in range(len(batch))
        ]
        legal = lookahead.extend_forced(drafts)
        return FinishedDraft(host_draft(batch, legal), tuple(map(len, legal)))

    def leads(self, batch: DecodeBatch, lookahead: Lookahead, request: int) -> bool:
        """Whether anything is forced after the request's draft so far."""
        return bool(self._draft(batch, lookahead, request))

    def release(self, slots: Sequence[int]) -> None:
        """Forget the whitespace style of the ended requests."""
        for slot in slots:
            self._styles.pop(slot, None)

    def _draft(self, batch: DecodeBatch, lookahead: Lookahead, request: int) -> list[int]:
        room = self._limit - len(lookahead.forced[request])
        if room <= 0:
            return []
        forced = self._find(batch, lookahead, request)
        return [*self._tokens.split(forced.text), *forced.stop][:room]

    def _find(self, batch: DecodeBatch, lookahead: Lookahead, request: int) -> Forced:
        fork, constraint = lookahead.fork_of(request), batch.constraints[request]
        row = lookahead.peek(request)
        if fork is None or constraint is None or row is None:
            return Forced(b"")
        style = self._styles.get(batch.slots[request])
        if style is None or style.constraint is not constraint:
            style = _Style(constraint)
            self._styles[batch.slots[request]] = style
        forced = style.find(self._search, lookahead.drafted[request])
        return self._search.find(without_budget(fork.matcher), row) if forced is None else forced


class Forced(NamedTuple):
    """What must come next: text, and behind it the end-of-text token if nothing else may follow."""

    text: bytes
    stop: tuple[int, ...] = ()


class ForcedSearch:
    """Finds forced text by looking at which single bytes a matcher's mask admits."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = vocabulary.single_byte_ids
        self._bytes = np.flatnonzero(ids >= 0)
        self._ids = ids[self._bytes]
        self._words, self._bits = self._ids >> 5, (self._ids & 31).astype(np.int32)
        self._stops = vocabulary.stop_token_ids
        self._row = np.zeros((1, num_mask_words(vocabulary.vocab_size)), dtype=np.int32)

    def find(self, matcher: GrammarMatcher, row: NDArray[np.int32] | None = None) -> Forced:
        """What must come next, at most ``LONGEST_TEXT`` bytes; the matcher is left where it was.

        row: the matcher's mask, int32 [W], where it is known already.
        """
        found = bytearray()
        stop: tuple[int, ...] = ()
        while len(found) < LONGEST_TEXT:
            row = self._fill(matcher) if row is None else row
            stops = [token for token in self._stops if row_allows(row, token)]
            if stops:
                stop = tuple(stops) if np.bitwise_count(row.view(np.uint32)).sum() == 1 else ()
                break
            legal = np.flatnonzero((row[self._words] >> self._bits) & 1)
            if len(legal) != 1 or not matcher.accept_token(int(self._ids[legal[0]])):
                break
            found.append(int(self._bytes[legal[0]]))
            row = None
        matcher.rollback(len(found))
        return Forced(bytes(found), stop)

    def _fill(self, matcher: GrammarMatcher) -> NDArray[np.int32]:
        matcher.fill_next_token_bitmask(self._row, 0)
        row: NDArray[np.int32] = self._row[0]
        return row


class _Style:
    """A matcher with fixed whitespace that follows one request, for as long as the model's style
    is that one; where the mask leaves whitespace free, this is where forced text comes from."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self._matcher = constraint.compiled.new_style_matcher()
        self._followed = 0

    def find(self, search: ForcedSearch, drafted: Sequence[int]) -> Forced | None:
        """What is forced after the committed text and ``drafted``; None without a style."""
        self._follow()
        if self._matcher is None:
            return None
        taken = 0
        for token in drafted:
            if not self._matcher.accept_token(token):
                break
            taken += 1
        is_open = taken == len(drafted) and not self._matcher.is_terminated()
        forced = search.find(self._matcher) if is_open else None
        self._matcher.rollback(taken)
        return forced

    def _follow(self) -> None:
        for token in self.constraint.committed[self._followed :]:
            if self._matcher is not None and not self._matcher.accept_token(token):
                self._matcher = None  # the model writes in another style
        self._followed = len(self.constraint.committed)
