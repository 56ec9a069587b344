"""A registered backend, held to the protocol: what it does wrong ends its own request, by name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

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
from guided_spec.grammar.protocol import CompiledGrammar, Matcher
from guided_spec.grammar.schema.lowered import Unenforced
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.unique_keys import UniqueKeysGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import num_mask_words

__all__ = ["GuardedBackend", "GuardedGrammar", "GuardedMatcher"]

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
        if spec.start is not None:
            raise GrammarCompileError(
                "the spec has a start: compile it with a GrammarPipeline that has markers"
            )
        try:
            return self._compile(spec)
        except (GuidedSpecError, MemoryError):
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
        row = np.zeros((1, num_mask_words(grammar.vocab_size)), dtype=np.int32)
        matcher, style = grammar.new_matcher().fork(), grammar.new_style_matcher()
        is_over = matcher.is_terminated()
        matcher.fill_next_token_bitmask(row)
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
        """Always."""
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
