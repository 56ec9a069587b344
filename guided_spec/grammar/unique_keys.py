"""No key twice in one object: a grammar of JSON texts becomes one whose keys are unique.

A grammar has no memory for keys that it does not list. The matcher here has: it follows the text,
and takes away every token that would complete a key again. Where keys may run out, as under a
pattern such as ``^[A-Z]{2}$``, it also takes away what leads to where only such keys are left: the
last comma, or the first letter of the last key. What is legal depends on the text alone, so that
speculation stays exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.key_tokens import START, Keys, KeyState, KeyTokens, Mode
from guided_spec.grammar.protocol import (
    CompiledGrammar,
    GrammarMatcher,
    Matcher,
    WrappedGrammar,
    WrappedMatcher,
    legal_row,
)
from guided_spec.grammar.recipe import KeyRules, Recipe, RecipeGrammar
from guided_spec.grammar.schema.keys import free_keys, required_keys
from guided_spec.grammar.schema.lowered import Unenforced
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import ids_of, row_of

_JUDGED = 4  # long ways of one state that are remembered


class _Ahead(NamedTuple):
    """away: a token that makes a key unlike all that are there. near: others, with their states."""

    away: int | None
    near: Iterator[tuple[int, KeyState]]


@runtime_checkable
class NotedGrammar(CompiledGrammar, Protocol):
    """What the backends of this package compile: with the backend's name, and what is narrower."""

    @property
    def backend(self) -> str: ...

    @property
    def notes(self) -> tuple[Unenforced, ...]: ...


BackendGrammar = TypeVar("BackendGrammar", bound=NotedGrammar)


@dataclass(frozen=True, eq=False)  # without slots, which leave no room for weak references
class UniqueKeysGrammar(WrappedGrammar, Generic[BackendGrammar]):
    """A compiled grammar of JSON texts, without those that write a key twice; shared by requests.

    inner: of the backend ``backend``. run_out: whether keys may run out, see ``FreeKeys``.
    notes: as the one inside has them. required: keys that some object must have.
    """

    inner: BackendGrammar
    tokens: KeyTokens
    backend: str
    run_out: bool = True
    notes: tuple[Unenforced, ...] = ()
    required: tuple[str, ...] = ()

    def recipe(self) -> Recipe | None:
        """As the one inside has it, with the rules for its keys."""
        inner = self.inner.recipe() if isinstance(self.inner, RecipeGrammar) else None
        return None if inner is None else inner._replace(keys=KeyRules(self.run_out, self.required))

    def new_matcher(self) -> UniqueKeysMatcher:
        """A matcher at the start of the grammar."""
        return UniqueKeysMatcher(self, self.inner.new_matcher())


MaybeUnique: TypeAlias = BackendGrammar | UniqueKeysGrammar[BackendGrammar]
"""What ``with_unique_keys`` returns."""


def with_unique_keys(
    grammar: BackendGrammar, prepared: Any, vocabulary: Vocabulary
) -> MaybeUnique[BackendGrammar]:
    """``grammar``, of a prepared schema, without the texts that write a key twice.

    As it is where the grammar itself has none. vocabulary: the grammar's.
    """
    keys = free_keys(prepared)
    if not keys.are_there:
        return grammar
    return with_key_rules(grammar, KeyRules(keys.run_out, required_keys(prepared)), vocabulary)


def with_key_rules(
    grammar: BackendGrammar, keys: KeyRules | None, vocabulary: Vocabulary
) -> MaybeUnique[BackendGrammar]:
    """``grammar`` without the texts that write a key twice; as it is where ``keys`` is None."""
    if keys is None:
        return grammar
    run_out, required = keys
    return UniqueKeysGrammar(
        grammar, vocabulary.key_tokens, grammar.backend, run_out, grammar.notes, required
    )


class _Judged(NamedTuple):
    """What was found out about some tokens after a state."""

    state: KeyState | None
    rest: tuple[int, ...]
    is_unique: bool


class UniqueKeysMatcher(WrappedMatcher):
    """A ``GrammarMatcher`` that knows the keys of the objects that are open.

    inner: at the start of the grammar.
    """

    def __init__(self, grammar: UniqueKeysGrammar[Any], inner: GrammarMatcher) -> None:
        self._grammar = grammar
        self._tokens = grammar.tokens
        super().__init__(inner)
        self._states = [START]  # before every token and after the last one
        self._ways: dict[Mode, tuple[int, ...]] = {}  # that led to a key that was left, last time
        self._judged: deque[_Judged] = deque(maxlen=_JUDGED)

    @property
    def lenient(self) -> Matcher:
        """The grammar's own matcher."""
        return self._inner

    @property
    def row_source(self) -> GrammarMatcher:
        """The inner matcher's while no token can complete a key again; else this one."""
        return self if self._may_differ(self._states[-1]) else self._inner.row_source

    def accept_token(self, token_id: int) -> bool:
        """Advance by one token; False, and no change, where it is refused."""
        token_id = int(token_id)
        if not 0 <= token_id < len(self._tokens.data):
            return False
        state = self._tokens.advance(self._states[-1], token_id)
        if state is None or not self._inner.accept_token(token_id):
            return False
        if not self._goes_on(state):
            self._inner.rollback(1)
            return False
        self._states.append(state)
        return True

    def fill_next_token_bitmask(self, bitmask: Any, index: int = 0) -> bool:
        """Write row ``index``; returns whether it forbids anything. See ``GrammarMatcher``."""
        forbids = self._inner.fill_next_token_bitmask(bitmask, index)
        state = self._states[-1]
        if self._may_differ(state):
            row: NDArray[np.int32] = np.asarray(bitmask)[index]  # a view, also of a tensor
            bits = row.view(np.uint32)
            for token in dict.fromkeys(self._suspects(state, row)):
                word, bit = token >> 5, np.uint32(1 << (token & 31))
                if bits[word] & bit and not self._takes(token):
                    bits[word] &= ~bit
                    forbids = True
        return forbids

    def interchangeable(self, row: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32 [W]: of some legal tokens those that surely write no key that is there already."""
        state = self._states[-1]
        keys = state.frame.keys if state.frame else None
        if not keys or not (keys.new or keys.old):
            return row
        if state.mode in (Mode.OUTSIDE, Mode.BEFORE_KEY) or state.is_pending:
            return np.zeros_like(row)
        if not _is_near(state):
            return row
        beginnings = self._beginnings(state.key, keys.starting(state.key))
        found = list(dict.fromkeys([*self._suspects(state, row), *beginnings]))
        return row & ~row_of(found, len(self._tokens.data))

    def takes(self, token_ids: Sequence[int]) -> bool:
        """Most ways end at once in the grammar, whose own code is the faster one."""
        return self._inner.takes(token_ids) and self.is_unique(token_ids)

    def is_unique(self, token_ids: Sequence[int]) -> bool:
        """Whether no key is there twice after these tokens; nothing else is asked of them."""
        state: KeyState | None = self._states[-1]
        if token_ids:
            state = self._tokens.advance(self._states[-1], token_ids[0])
        # Many first tokens leave the state as it is, and the same long way is judged after each.
        rest = tuple(token_ids[1:])
        for judged in self._judged:
            if judged.state is state and judged.rest == rest:
                return judged.is_unique
        began = state
        for token in rest:
            state = state and self._tokens.advance(state, token)
        self._judged.append(_Judged(began, rest, state is not None))
        return state is not None

    def fork(self) -> UniqueKeysMatcher:
        """An independent copy at the same position."""
        copy = UniqueKeysMatcher(self._grammar, self._inner.fork())
        copy._states = self._states.copy()
        copy._ways = self._ways.copy()
        return copy

    def rollback(self, num_tokens: int) -> None:
        """Undo the last ``num_tokens`` accepted tokens."""
        self._inner.rollback(num_tokens)
        if num_tokens > 0:
            del self._states[-num_tokens:]

    def _may_differ(self, state: KeyState) -> bool:
        """Whether the row may lack tokens that the inner matcher's has."""
        if self._grammar.run_out or self._tokens.loaded:
            return True
        return bool(state.frame and state.frame.spelled) or _is_near(state, in_key=True)

    def _suspects(self, state: KeyState, row: NDArray[np.int32]) -> Iterator[int]:
        """All tokens that may have to be taken out of the row, and others."""
        yield from self._tokens.loaded
        if state.frame is not None:
            for key in state.frame.spelled:
                yield from self._tokens.whole[key]
            if state.mode is Mode.KEY and state.frame.keys is not None:
                yield from self._closing(state, state.frame.keys, row)
        if self._grammar.run_out:
            yield from self._tokens.turning(state.mode, row)

    def _closing(self, state: KeyState, keys: Keys, row: NDArray[np.int32]) -> Iterator[int]:
        """Tokens that complete a key that is there already; or may write more of it."""
        tokens, near = self._tokens, keys.starting(state.key)
        if state.is_pending:
            every = self._grammar.run_out
            yield from ids_of(row, len(tokens.data)) if every else tokens.quoted(row)
        elif len(near) < len(tokens.closers):
            for key in near:
                yield from tokens.closers.get(key[len(state.key) :], ())
        else:
            for rest, closers in tokens.closers.items():
                if keys.holds(state.key + rest):
                    yield from closers
        if self._grammar.run_out:
            yield from self._beginnings(state.key, near)

    def _beginnings(self, key: bytes, near: Sequence[bytes]) -> Iterator[int]:
        """Tokens that write more of one of ``near``, which ``key`` begins, and nothing else."""
        for other in near:
            for end in range(len(key) + 1, len(other) + 1):
                yield from self._tokens.texts.get(other[len(key) : end], ())

    def _takes(self, token_id: int) -> bool:
        """Whether a token that the inner matcher takes is legal."""
        state = self._tokens.advance(self._states[-1], token_id)
        if state is None or not self._grammar.run_out or not _is_near(state):
            return state is not None
        if not self._inner.accept_token(token_id):
            return True  # which is for the inner matcher to say
        goes_on = self._goes_on(state)
        self._inner.rollback(1)
        return goes_on

    def _goes_on(self, state: KeyState) -> bool:
        """Whether a key is left that the object does not have. The inner matcher stands there."""
        if not self._grammar.run_out or not _is_near(state):
            return True
        if self._leads_away(state, self._ways.get(state.mode, ())):
            return True
        way, seen = list[int](), {state}
        waiting = [self._look(state, seen, spaced=False)]
        while waiting and waiting[-1].away is None:
            option = next(waiting[-1].near, None)
            if option is None:
                waiting.pop()
                self._inner.rollback(len(way[-1:]))
                del way[-1:]
            elif self._inner.accept_token(option[0]):
                way.append(option[0])
                waiting.append(self._look(option[1], seen, spaced=option[1] is state))
        self._inner.rollback(len(way))
        if waiting:
            self._ways[state.mode] = (*way, waiting[-1].away or 0)
        return bool(waiting)

    def _leads_away(self, state: KeyState, way: tuple[int, ...]) -> bool:
        """Whether these tokens begin or complete a key that is not there yet."""
        count, is_near = 0, True
        for token in way:
            then = self._tokens.advance(state, token)
            if then is None or not self._inner.accept_token(token):
                break
            count, state, is_near = count + 1, then, _is_near(then)
        self._inner.rollback(count)
        return not is_near

    def _look(self, state: KeyState, seen: set[KeyState], *, spaced: bool) -> _Ahead:
        """What may follow, but for states in ``seen``; these are added to it."""
        row = legal_row(self._inner, len(self._tokens.data))
        near: list[tuple[int, KeyState]] = []
        for token in ids_of(row):
            then = self._tokens.advance(state, token)
            if then is not None and not _is_near(then):
                return _Ahead(token, iter(near))
            if then is not None and then not in seen:
                seen.add(then)
                near.append((token, then))
            elif then is state and not spaced:  # one space
                spaced = True
                near.append((token, then))
        return _Ahead(None, iter(near))


def _is_near(state: KeyState, *, in_key: bool = False) -> bool:
    """Whether what comes next may turn out to be a key that the object has. in_key: has begun."""
    keys = state.frame.keys if state.frame else None
    if not keys or not (keys.new or keys.old):
        return False
    if state.mode is Mode.KEY:
        return state.is_pending or bool(keys.starting(state.key))
    return state.mode is Mode.BEFORE_KEY and not in_key
