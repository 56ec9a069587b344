"""A registered backend, held to the protocol: what it does wrong ends its own request, by name."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from guided_spec.errors import (
    ConfigError,
    GrammarCompileError,
    GuidedSpecError,
    UnsatisfiableGrammarError,
)
from guided_spec.grammar.backends.llguidance import LLGuidanceGrammar
from guided_spec.grammar.backends.registry import BackendFactory
from guided_spec.grammar.backends.xgrammar import XGrammarGrammar
from guided_spec.grammar.document import DocumentCompiler, SpecDocument
from guided_spec.grammar.protocol import (
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
    Matcher,
    legal_row,
)
from guided_spec.grammar.schema.lowered import Unenforced
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.steps import StepsSpentError
from guided_spec.grammar.text.state import TextState
from guided_spec.grammar.text.unique_keys import UniqueKeysGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import ids_of, num_mask_words

_BACKEND = ("vocabulary", "compile")
_GRAMMAR = ("excluded", "new_matcher", "new_style_matcher")
_MATCHER = ("accept_token", "fill_next_token_bitmask", "fork", "rollback", "is_terminated")


class GuardedBackend(DocumentCompiler[CompiledGrammar]):
    """The backend that ``factory`` makes; it gets specs whose ``backend`` is None.

    What it raises that is no error of this package becomes one, and what it returns is tried out
    once. A grammar of xgrammar's or llguidance's that it returns stays as it is.

    Raises ConfigError where the factory fails, or returns something else.
    """

    def __init__(self, name: str, factory: BackendFactory, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._name = name
        try:
            self._backend = factory(vocabulary)
        except GuidedSpecError:
            raise
        except Exception as error:
            fix = f"its factory failed: {type(error).__name__}: {error}"
            raise ConfigError("grammar_backend", name, fix) from error
        if lacks := _lacks(self._backend, _BACKEND):
            fix = f"its factory returned a {type(self._backend).__name__} without {lacks}"
            raise ConfigError("grammar_backend", name, fix)

    def compile_document(self, document: SpecDocument) -> CompiledGrammar:
        """Compile its spec.

        Raises what the backend raises; GrammarCompileError where that is no error of this package,
        or where a grammar or matcher is not what the protocol asks for; UnsatisfiableGrammarError
        where the first mask is empty.
        """
        spec = document.spec
        document.require_no_start()
        try:
            return self._compile(spec)
        except (GuidedSpecError, MemoryError, StepsSpentError):
            raise
        except Exception as error:
            reason = f"failed on the {spec.kind}: {type(error).__name__}: {error}"
            raise GrammarCompileError(f"the grammar backend {self._name!r} {reason}") from error

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        # Without the name: it may hand the spec on to a backend that goes by names.
        inner = self._backend.compile(replace(spec, backend=None))
        if isinstance(inner, XGrammarGrammar | LLGuidanceGrammar | UniqueKeysGrammar):
            return inner
        if lacks := _lacks(inner, _GRAMMAR):
            reason = f"compiled a {type(inner).__name__} without {lacks}"
            raise GrammarCompileError(f"the grammar backend {self._name!r} {reason}")
        excluded = frozenset(inner.excluded)
        grammar = GuardedGrammar(
            inner, self._name, self.vocabulary.vocab_size, excluded, _size_of(inner)
        )
        self._try_out(spec, grammar)
        return grammar

    def _try_out(self, spec: GrammarSpec, grammar: GuardedGrammar) -> None:
        """One row of a fork, so that a matcher that cannot work fails before the first token."""
        matcher, style = grammar.new_matcher().fork(), grammar.new_style_matcher()
        is_over = matcher.is_terminated()
        row = legal_row(matcher, grammar.vocab_size)
        fault = matcher.fault or (style and style.fault)
        if fault:
            raise GrammarCompileError(fault)
        if is_over or not row.any():
            raise UnsatisfiableGrammarError(
                f"the grammar backend {self._name!r} allows no first token of the {spec.kind}"
            )


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class GuardedGrammar:
    """A grammar that a registered backend compiled; shared by requests, as the one inside is.

    backend: its name. vocab_size: V. excluded, memory_size_bytes: as the one inside has them.
    """

    inner: CompiledGrammar
    backend: str
    vocab_size: int
    excluded: frozenset[int]
    memory_size_bytes: int = 0
    notes: ClassVar[tuple[Unenforced, ...]] = ()

    def new_matcher(self) -> GuardedMatcher:
        """A matcher at the start of the grammar."""
        return self._guard("new_matcher", self._new("new_matcher"))

    def new_style_matcher(self) -> GuardedMatcher | None:
        """As the one inside has it."""
        style = self._new("new_style_matcher")
        return None if style is None else self._guard("new_style_matcher", style)

    def _new(self, method: str) -> Any:
        try:
            return getattr(self.inner, method)()
        except Exception as error:
            return error

    def _guard(self, method: str, matcher: Any) -> GuardedMatcher:
        """With a fault from the start where it is an error, or no matcher."""
        fault = None
        if isinstance(matcher, Exception):
            fault = f"{method} failed: {type(matcher).__name__}: {matcher}"
        elif lacks := _lacks(matcher, _MATCHER):
            fault = f"{method} made a {type(matcher).__name__} without {lacks}"
        if fault is not None:
            fault = f"a grammar of the grammar backend {self.backend!r}: {fault}"
        return GuardedMatcher(self, matcher, fault)


class GuardedMatcher(Matcher):
    """A registered backend's matcher, until it raises or returns what it must not.

    From then on it is asked no more: it refuses every token and its rows are empty, so that the
    text ends here and other texts go on. ``fault`` says why.
    """

    def __init__(self, grammar: GuardedGrammar, inner: Any, fault: str | None = None) -> None:
        self._grammar = grammar
        self._inner = inner
        self._fault = fault

    @property
    def fault(self) -> str | None:
        """What it raised or returned."""
        return self._fault

    @property
    def may_fail(self) -> bool:
        """Whether it can ever have a ``fault``: always True, since the backend is not trusted."""
        return True

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False where it is refused, and for ids outside the vocabulary."""
        if not 0 <= token_id < self._grammar.vocab_size:
            return False
        return self._is_true("accept_token", int(token_id))

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index``; returns whether it forbids anything. See ``GrammarMatcher``."""
        forbids = self._is_true("fill_next_token_bitmask", bitmask, index)
        if self.fault is None:
            return forbids
        np.asarray(bitmask)[index] = 0  # a view, also of a tensor
        return True

    def fork(self) -> GuardedMatcher:
        """An independent copy at the same position, with the same fault."""
        copy = self._ask("fork")
        if self.fault is None and (copy is self._inner or _lacks(copy, _MATCHER)):
            self._fail("fork", "returned itself" if copy is self._inner else f"returned {copy!r}")
        return GuardedMatcher(self._grammar, copy, self.fault)

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""
        if num_tokens > 0:
            self._ask("rollback", num_tokens)

    def is_terminated(self) -> bool:
        """Whether a stop token has been accepted."""
        return self._is_true("is_terminated")

    def _is_true(self, method: str, *arguments: Any) -> bool:
        answer = self._ask(method, *arguments)
        if self.fault is None and not isinstance(answer, bool | np.bool_):
            self._fail(method, f"returned {answer!r}, not True or False")
        return self.fault is None and bool(answer)

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self.fault is not None:
            return None
        try:
            return getattr(self._inner, method)(*arguments)
        except Exception as error:
            self._fail(method, f"failed: {type(error).__name__}: {error}")
            return None

    def _fail(self, method: str, reason: str) -> None:
        self._fault = (
            f"a matcher of the grammar backend {self._grammar.backend!r}: {method} {reason}"
        )


def _size_of(inner: Any) -> int:
    """What it says about its size, which it need not; one that is no number says nothing."""
    size = 0 if _lacks(inner, ("memory_size_bytes",)) else inner.memory_size_bytes
    return size if isinstance(size, int) else 0


def _lacks(value: object, names: tuple[str, ...]) -> str:
    return ", ".join(name for name in names if not hasattr(value, name))


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
    """Write ``num_texts`` random texts of ``spec``; check every position against the protocol.

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
    """One text: an original matcher that advances, and forks that try things out."""

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
        """Raise AssertionError unless ``holds``. matcher: that was asked, if not the original."""
        asked = self._matcher if matcher is None else matcher
        fault = asked.fault if isinstance(asked, Matcher | TextState) else None
        if fault is not None or not holds:
            raise AssertionError(f"after the tokens {self.tokens}: {fault or rule}")
