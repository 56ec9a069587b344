"""What the grammar leaves no choice about, proposed whole.

A token is rarely forced (after ``{"`` the tokens ``n``, ``na`` and ``name`` may all be legal), but
the *text* often is. So the search goes byte by byte: as long as exactly one single byte is legal,
it is forced. The forced text is then tokenised as the tokenizer would write it. The last token
may be wrong where the tokenizer would have merged it with the next text; verification is exact, so
that costs nothing but the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.core import DecodeBatch, DraftInFlight, FinishedDraft, Proposer, ProposerContext
from guided_spec.errors import ConfigError
from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.grammar.text.row_filter import Probe
from guided_spec.grammar.vocabulary import CanonicalTokens, Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead, Pause
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.proposers.drafting import host_draft, no_draft

START = "start"
LONGEST_TEXT = 96  # bytes; bounds the search, since a grammar can force text without end


class GrammarForced(Proposer):
    """Drafts forced text, up to ``config.max_forced_tokens`` tokens a step; needs no model.

    ``grammar_forced:start`` does so where a text begins, and nowhere else: there a head that comes
    next has no hidden states to draft from, and all other steps are as without it.
    """

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, context: ProposerContext) -> None:
        if context.argument not in ("", START):
            fix = f"pass nothing after the colon, or {START!r}"
            raise ConfigError("proposer", f"grammar_forced:{context.argument}", fix)
        self._only_starts = context.argument == START
        self._limit = context.config.max_forced_tokens
        self._search = ForcedSearch(context.vocabulary)
        self._tokens = CanonicalTokens(context.encode, context.vocabulary.token_bytes)
        self._styles: dict[int, _Style] = {}
        self._known: dict[int, _Known] = {}

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """The forced tokens after each request's draft so far; none for free requests."""
        del carry
        searched = self._searched(batch)
        if not any(searched):
            return FinishedDraft(no_draft(batch), (0,) * len(batch))
        if all(searched):
            lookahead.fill_next()
        rows = zip(searched, lookahead.drafted, lookahead.is_open, strict=True)
        drafts = [
            self._draft(batch, lookahead, request, drafted) if is_searched and is_open else []
            for request, (is_searched, drafted, is_open) in enumerate(rows)
        ]
        legal = lookahead.extend_forced(drafts)
        return FinishedDraft(host_draft(batch, legal), tuple(map(len, legal)))

    def may_draft(self, num_draft_tokens: int) -> bool:
        """Whatever K is: what is forced costs nothing to draft."""
        del num_draft_tokens
        return True

    def interrupts(self, batch: DecodeBatch, lookahead: Lookahead) -> Pause | None:
        """Where anything is forced after the request's draft so far."""
        if self._only_starts:
            return None
        return lambda request: bool(
            self._draft(batch, lookahead, request, lookahead.drafted[request])
        )

    def release(self, slots: Sequence[int]) -> None:
        """Forget the whitespace style of the ended requests."""
        for slot in slots:
            self._styles.pop(slot, None)
            self._known.pop(slot, None)

    def _searched(self, batch: DecodeBatch) -> list[bool]:
        """[B]: whose forced text is looked for."""
        if not self._only_starts:
            return [True] * len(batch)
        lengths = zip(batch.contexts, batch.prompt_lengths, strict=True)
        return [len(context) == length for context, length in lengths]

    def _draft(
        self, batch: DecodeBatch, lookahead: Lookahead, request: int, drafted: Sequence[int]
    ) -> list[int]:
        """What is forced after ``drafted``, which is the request's draft so far."""
        if batch.constraints[request] is None:
            return []
        most = self._limit - len(lookahead.forced[request])
        if most <= 0:
            return []
        slot = batch.slots[request]
        key = (len(batch.contexts[request]), len(drafted))
        known = self._known.get(slot)
        if known is None or known.key != key:
            forced = self._find(batch, lookahead, request, drafted)
            known = _Known(key, [*self._tokens.split(forced.text), *forced.stop])
            self._known[slot] = known
        return known.tokens[:most]

    def _find(
        self, batch: DecodeBatch, lookahead: Lookahead, request: int, drafted: Sequence[int]
    ) -> Forced:
        fork, constraint = lookahead.fork_of(request), batch.constraints[request]
        row = lookahead.peek(request)
        if fork is None or constraint is None or row is None:
            return Forced(b"")
        style = self._styles.get(batch.slots[request])
        if style is None or style.constraint is not constraint:
            style = _Style(constraint)
            self._styles[batch.slots[request]] = style
        forced = style.find(self._search, drafted)
        return self._search.find(fork.text.without_budget(), row) if forced is None else forced


class _Known(NamedTuple):
    """What was found for a request at one point: ``interrupts`` asks, ``begin`` asks again."""

    key: tuple[int, int]
    tokens: list[int]


class Forced(NamedTuple):
    """What must come next: text, then the end-of-text token if nothing else may come after it."""

    text: bytes
    stop: tuple[int, ...] = ()


class ForcedSearch:
    """Finds forced text by looking at which single bytes a matcher's mask admits.

    A mask costs a microsecond, and so does each call into numpy: the words of a mask that matter
    become one integer of Python's.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        ids = vocabulary.single_byte_ids
        single = {int(ids[byte]): byte for byte in np.flatnonzero(ids >= 0)}
        self._stops = vocabulary.stop_token_ids
        self._words = _words([*single, *self._stops])
        positions = _bit_positions(self._words)
        self._bytes = {positions[token]: (token, byte) for token, byte in single.items()}
        self._single_bits = sum(1 << position for position in self._bytes)
        self._stop_bits = sum(1 << positions[token] for token in self._stops)
        self._bit_positions = positions
        self._row = np.zeros((1, num_mask_words(vocabulary.vocab_size)), dtype=np.int32)

    def find(self, matcher: GrammarMatcher | Probe, row: NDArray[np.int32] | None = None) -> Forced:
        """What must come next, at most ``LONGEST_TEXT`` bytes; the matcher is left where it was.

        row: the matcher's mask, int32 [W], where it is known already.
        """
        found = bytearray()
        stop: tuple[int, ...] = ()
        if row is None:
            row = self._fill(matcher)
        while len(found) < LONGEST_TEXT:
            admitted = int.from_bytes(row[self._words].tobytes(), "little")
            if admitted & self._stop_bits:
                stop = self._only_stop(row, admitted)
                break
            single = admitted & self._single_bits
            if single == 0 or single & (single - 1):  # none, or several
                break
            token, byte = self._bytes[single.bit_length() - 1]
            if not matcher.accept_token(token):
                break
            found.append(byte)
            row = self._fill(matcher)
        matcher.rollback(len(found))
        return Forced(bytes(found), stop)

    def _only_stop(self, row: NDArray[np.int32], admitted: int) -> tuple[int, ...]:
        """The stop token where the row admits nothing else."""
        if np.bitwise_count(row.view(np.uint32)).sum() > 1:
            return ()
        return tuple(token for token in self._stops if admitted >> self._bit_positions[token] & 1)

    def _fill(self, matcher: GrammarMatcher | Probe) -> NDArray[np.int32]:
        matcher.fill_next_token_bitmask(self._row, 0)
        row: NDArray[np.int32] = self._row[0]
        return row


def _words(token_ids: Sequence[int]) -> NDArray[np.int64]:
    """The words of a mask row that hold these tokens, ascending."""
    return np.unique(np.array(token_ids, dtype=np.int64) >> 5)


def _bit_positions(words: NDArray[np.int64]) -> dict[int, int]:
    """The bit index of each token of these words, once they are one integer."""
    return {
        32 * word + bit: 32 * at + bit
        for at, word in enumerate(words.tolist())
        for bit in range(32)
    }


class _Style:
    """A matcher with fixed whitespace that follows one request, for as long as the model's style
    is that one; where the mask leaves whitespace free, this is where forced text comes from."""

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self._matcher = constraint.compiled.new_style_matcher()
        self._accepted = 0

    def find(self, search: ForcedSearch, drafted: Sequence[int]) -> Forced | None:
        """What is forced after the committed text and ``drafted``; None without a style."""
        self._accept_committed()
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

    def _accept_committed(self) -> None:
        for token in self.constraint.committed[self._accepted :]:
            if self._matcher is not None and not self._matcher.accept_token(token):
                self._matcher = None  # the model writes in another style
        self._accepted = len(self.constraint.committed)
