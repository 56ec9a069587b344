"""One text being written under a grammar, for our engine and any other: when it ends, and why."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from guided_spec.errors import GuidedSpecError
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.ops.sampling.adjust import TokenRules
from guided_spec.ops.sampling.noise import noise_key
from guided_spec.step import Committed
from guided_spec.types import SamplingParams

__all__ = ["GuidedText"]


@dataclass(slots=True, eq=False)
class GuidedText:
    """One request's text as it grows. Made by ``begin``; ``Guide.open`` does so.

    slot: the key under which a proposer keeps state of it.
    tokens: prompt and output so far. prompt_length: how many of them are the prompt.
    max_length: prompt and output tokens at most.
    seed: ``params.seed``, or one that was drawn.
    constraint: its place in the grammar; None for free text.
    rules: the biases, bans and penalties of ``params``.
    stop_ids: the tokens that end it. grammar_ends: those that end a text of a grammar.
    noise_key: of ``seed``, prompt and grammar; see ``guided_spec.ops.sampling.noise``.
    prefill: the same for all texts whose prompts were read as one, see ``DecodeBatch``.
    ended: why it has ended, None while it has not. error: what went wrong, where that is "error".
    """

    slot: int
    tokens: list[int]
    prompt_length: int
    max_length: int
    params: SamplingParams
    seed: int
    constraint: Constraint | None
    rules: TokenRules
    stop_ids: frozenset[int]
    grammar_ends: tuple[int, ...]
    noise_key: int
    prefill: Hashable = field(default_factory=object)
    ended: Literal["stop", "length", "error"] | None = None
    error: GuidedSpecError | None = None

    @classmethod
    def begin(
        cls,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        vocabulary: Vocabulary,
        *,
        max_length: int,
        seed: int,
        bad_words: tuple[tuple[int, ...], ...] = (),
    ) -> GuidedText:
        """A text behind a prompt, without a slot and without its grammar.

        max_length: prompt and output tokens at most, if ``params`` do not say less.
        bad_words: the token sequences that ``params.bad_words`` stand for.
        """
        own, ends = frozenset(params.stop_token_ids), frozenset(vocabulary.stop_token_ids)
        is_free = params.grammar is None
        banned_early = own if is_free and params.ignore_eos else own | ends
        return cls(
            slot=-1,
            tokens=list(prompt_ids),
            prompt_length=len(prompt_ids),
            max_length=min(max_length, len(prompt_ids) + params.max_tokens),
            params=params,
            seed=seed,
            constraint=None,
            rules=TokenRules(params, bad_words, tuple(sorted(banned_early))),
            stop_ids=own if params.ignore_eos else own | ends,
            grammar_ends=tuple(vocabulary.stop_token_ids),
            noise_key=noise_key(seed, prompt_ids, params.grammar),
        )

    @property
    def output_ids(self) -> list[int]:
        """The tokens behind the prompt, the one that ended the text among them."""
        return self.tokens[self.prompt_length :]

    @property
    def draft_limit(self) -> int:
        """Draft tokens that may be of use: one more token always follows the accepted ones."""
        return self.max_length - len(self.tokens) - 1

    def bind(self, grammar: CompiledGrammar, endings: EndingsCache | None) -> None:
        """Constrain the text to a grammar.

        endings: how texts of grammars end, to end this one in time; None never does.

        Raises BudgetTooSmallError where no text is known that is short enough.
        """
        if endings is not None and self.params.complete is not False:
            budget = self.max_length - self.prompt_length
            is_required = self.params.complete is True
            grammar = endings.bound(grammar, budget, is_required=is_required)
        self.constraint = Constraint(grammar, self.grammar_ends)

    def append(
        self, committed: Committed, is_stopped: Callable[[int], bool] | None = None
    ) -> list[int]:
        """Take the row that ``commit`` gave this text; returns the tokens that are now part of it.

        is_stopped: called with each token, but one that ends the text anyway; whether the text ends
            there, at a stop string perhaps.

        Tokens behind one that ends the text are dropped. Sets ``ended`` and ``error``.
        """
        start = len(self.tokens)
        reason = self._take(committed.token_ids, is_stopped)
        if reason is not None:
            self.end(reason)
        elif committed.error is not None:
            self.end("error", committed.error)
        return self.tokens[start:]

    def end(
        self, reason: Literal["stop", "length", "error"], error: GuidedSpecError | None = None
    ) -> None:
        """The text has ended; does nothing if it has already.

        Where nothing else went wrong it has ended with an error if its grammar refuses it.
        """
        if self.ended is not None:
            return
        if error is None and self.constraint is not None:
            error = self.constraint.catch_up()
        self.ended, self.error = reason if error is None else "error", error

    def _take(
        self, token_ids: Sequence[int], is_stopped: Callable[[int], bool] | None
    ) -> Literal["stop", "length"] | None:
        """Append tokens up to one that ends the text; returns why it does.

        The grammar stands behind all of them, so it can only speak of the last.
        """
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self.tokens.append(token_id)
            is_over = token_id in self.stop_ids or (index == last and self._is_complete())
            if is_over or (is_stopped is not None and is_stopped(token_id)):
                return "stop"
            if len(self.tokens) >= self.max_length:
                return "length"
        return None

    def _is_complete(self) -> bool:
        return self.constraint is not None and self.constraint.is_terminated
