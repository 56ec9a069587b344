"""Whether a grammar backend keeps to the protocol, tried on random texts of one grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from guided_spec.grammar.backends.guarded import GuardedBackend
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend, GrammarMatcher, as_matcher
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import ids_of, num_mask_words

__all__ = ["check_grammar_backend"]

_TRIED = 16  # legal tokens of one position, and illegal ones
_GARBAGE = 0x5A5A5A5A  # in the rows before they are filled


def check_grammar_backend(
    backend: GrammarBackend,
    spec: GrammarSpec,
    *,
    num_texts: int = 8,
    max_tokens: int = 64,
    seed: int = 0,
) -> list[str]:
    """Walk ``num_texts`` random texts of ``spec`` and hold every position against the protocol.

    max_tokens: of one text; a longer one is left unfinished. For the tests of a backend: it fills
    dozens of rows at each position. Returns the texts that came to their end.

    Raises AssertionError naming the rule that is broken and the tokens that show it, and whatever
    ``compile`` raises.
    """
    guarded = GuardedBackend("checked", lambda _: backend, backend.vocabulary)
    compiled = guarded.compile(spec)
    finished = []
    for number in range(num_texts):
        text = _RandomText(compiled, backend.vocabulary, random.Random(f"{seed} {number}"))
        while len(text.tokens) < max_tokens and not text.is_over:
            text.step()
        if text.is_over:
            finished.append(backend.vocabulary.decode(text.tokens))
    return finished


class _RandomText:
    """One text, by an original that goes on and forks that try things out."""

    def __init__(
        self, compiled: CompiledGrammar, vocabulary: Vocabulary, dice: random.Random
    ) -> None:
        self.tokens: list[int] = []
        self.is_over = False
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._dice = dice
        self._matcher = compiled.new_matcher()

    def step(self) -> None:
        """Check the position, and go on by one legal token."""
        row = self._row(self._matcher)
        legal = self._tokens_of(row)
        self._require("no token is legal, and the text has not ended", legal)
        self._check_rows(row)
        self._check_tokens(row, legal)
        self._check_history(row)
        self._advance(row, self._dice.choice(legal))

    def _check_rows(self, row: NDArray[np.int32]) -> None:
        """Every form of the row is the same one, and nothing else is written."""
        rows = torch.full((3, row.size), _GARBAGE, dtype=torch.int32)
        forbids = self._matcher.fill_next_token_bitmask(rows, 1)
        self._require("a second fill wrote another row", self._same(rows[1].numpy(), row))
        others = bool((rows[[0, 2]] == _GARBAGE).all())
        self._require("a fill wrote other rows than its own", others)
        is_all = len(self._tokens_of(row)) == self._vocabulary.vocab_size
        what = "fill_next_token_bitmask did not say whether the row forbids anything"
        self._require(what, forbids != is_all)
        other = self._compiled.new_matcher()
        for token in self.tokens:
            self._require("a new matcher refused the same text", other.accept_token(token), other)
        self._require("a new matcher filled another row", self._fills(other, row))

    def _check_tokens(self, row: NDArray[np.int32], legal: Sequence[int]) -> None:
        """The mask and ``accept_token`` agree, on forks; every fork can go back."""
        everything = range(self._vocabulary.vocab_size)
        illegal = sorted(set(everything).difference(legal, self._compiled.excluded))
        stops = [token for token in self._vocabulary.stop_token_ids if token in legal]
        for token in (*stops, *self._some(legal)):
            fork = self._matcher.fork()
            what = f"token {token}, legal by the mask, was"
            self._require(f"{what} refused", fork.accept_token(token), fork)
            has_ended = fork.is_terminated() == (token in self._vocabulary.stop_token_ids)
            self._require(f"{what} taken, and is_terminated is wrong", has_ended, fork)
            fork.rollback(1)
            self._require(
                f"{what} taken back, and the text is over", not fork.is_terminated(), fork
            )
            self._require(f"{what} taken back: another row", self._fills(fork, row))
        fork = self._matcher.fork()
        for token in self._some(illegal):
            what = f"token {token}, illegal by the mask, was"
            self._require(f"{what} accepted", not fork.accept_token(token), fork)
        self._require("refused tokens changed the row", self._fills(fork, row))
        self._require("a fork moved its original", self._fills(self._matcher, row))

    def _check_history(self, row: NDArray[np.int32]) -> None:
        """A fork goes back to the start of the text and comes again."""
        fork = self._matcher.fork()
        fork.rollback(len(self.tokens))
        what = "after a rollback to the start"
        for token in self.tokens:
            self._require(f"{what} it refused the text", fork.accept_token(token), fork)
        self._require(f"{what} and the same text: another row", self._fills(fork, row))

    def _advance(self, row: NDArray[np.int32], token: int) -> None:
        fork = self._matcher.fork()
        self._require(f"token {token} was refused", self._matcher.accept_token(token))
        self._require("the original moved its fork", self._fills(fork, row))
        self.tokens.append(token)
        self.is_over = self._matcher.is_terminated()

    def _row(self, matcher: GrammarMatcher) -> NDArray[np.int32]:
        """int32 [W] by an array, filled over garbage."""
        width = num_mask_words(self._vocabulary.vocab_size)
        rows = np.full((1, width), _GARBAGE, dtype=np.int32)
        matcher.fill_next_token_bitmask(rows)
        self._require("", holds=True, matcher=matcher)
        row: NDArray[np.int32] = rows[0]
        return row

    def _tokens_of(self, row: NDArray[np.int32]) -> list[int]:
        return ids_of(row, self._vocabulary.vocab_size)

    def _fills(self, matcher: GrammarMatcher, row: NDArray[np.int32]) -> bool:
        return self._same(self._row(matcher), row)

    def _same(self, one: NDArray[np.int32], other: NDArray[np.int32]) -> bool:
        return self._tokens_of(one) == self._tokens_of(other)

    def _some(self, tokens: Sequence[int]) -> list[int]:
        return self._dice.sample(tokens, min(_TRIED, len(tokens)))

    def _require(self, rule: str, holds: object, matcher: GrammarMatcher | None = None) -> None:
        """matcher: whose answer this is, if not the original's."""
        fault = as_matcher(self._matcher if matcher is None else matcher).fault
        if fault is not None or not holds:
            raise AssertionError(f"after the tokens {self.tokens}: {fault or rule}")
