"""No key twice in one object: a grammar of JSON texts becomes one whose keys are unique.

A grammar has no memory for keys that it does not list. The filter here has: it knows the keys of
open objects, and clears every token that would complete a key again. Where keys may run out, as
under a pattern such as ``^[A-Z]{2}$``, it also clears what leads to where only such keys are left:
the last comma, or the first letter of the last key. What is legal depends on the text alone, so
that speculation stays exact.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.recipe import ItemRules, KeyRules, Recipe, RecipeGrammar
from guided_spec.grammar.schema.keys import free_keys, required_keys
from guided_spec.grammar.schema.lowered import Unenforced
from guided_spec.grammar.text.ahead import Ahead
from guided_spec.grammar.text.key_tokens import (
    CHANGELESS,
    START,
    Keys,
    KeyState,
    KeyTokens,
    Mode,
)
from guided_spec.grammar.text.parts import TextParts, new_parts
from guided_spec.grammar.text.row_filter import LookaheadFilter, Mark, Probe, clear_refused
from guided_spec.grammar.text.state import WrappedGrammar
from guided_spec.grammar.text.unique_items import UniqueItemsFilter
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import ids_of, row_of

_JUDGED = 4  # long ways of one state that are remembered


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

    Where ``items`` says so, it has none either that write an item twice.

    inner: of the backend ``backend``. tokens: of the vocabulary. keys: None where the inner grammar
    keeps them unique. notes: those of the inner grammar.
    """

    inner: BackendGrammar
    tokens: KeyTokens
    backend: str
    keys: KeyRules | None = None
    items: ItemRules | None = None
    notes: tuple[Unenforced, ...] = ()

    @property
    def run_out(self) -> bool:
        """Whether keys may run out, see ``FreeKeys``."""
        return self.keys is not None and self.keys.run_out

    @property
    def required(self) -> tuple[str, ...]:
        """Keys that some object must have, where keys are free."""
        return () if self.keys is None else self.keys.required

    def recipe(self) -> Recipe | None:
        """The recipe of the inner grammar, with what is unique; None if it has none."""
        inner = self.inner.recipe() if isinstance(self.inner, RecipeGrammar) else None
        return None if inner is None else inner._replace(keys=self.keys, items=self.items)

    def new_parts(self) -> TextParts:
        """Those of the inner grammar, and filters."""
        inner, size = new_parts(self.inner), len(self.tokens.data)
        filters = list[LookaheadFilter](inner.filters)
        if self.keys is not None:
            filters.append(UniqueKeysFilter(self.tokens, run_out=self.run_out))
        if self.items is not None:  # last: what it looks for has to be legal for the others
            filters.append(UniqueItemsFilter(self.tokens, self.items))
        return inner._replace(filters=tuple(filters), vocab_size=size)


MaybeUnique: TypeAlias = BackendGrammar | UniqueKeysGrammar[BackendGrammar]
"""What ``with_unique_keys`` returns."""


def with_unique_keys(
    grammar: BackendGrammar,
    prepared: Any,
    vocabulary: Vocabulary,
    items: ItemRules | None = None,
) -> MaybeUnique[BackendGrammar]:
    """``grammar``, of a prepared schema, without the texts that write a key or an item twice.

    As it is where there are none. vocabulary: the grammar's. items: those that have to be unique.
    """
    keys = free_keys(prepared)
    rules = KeyRules(keys.run_out, required_keys(prepared)) if keys.are_there else None
    return with_key_rules(grammar, rules, vocabulary, items)


def with_key_rules(
    grammar: BackendGrammar,
    keys: KeyRules | None,
    vocabulary: Vocabulary,
    items: ItemRules | None = None,
) -> MaybeUnique[BackendGrammar]:
    """``grammar`` without the texts that write a key or an item twice; as it is without rules."""
    if keys is None and items is None:
        return grammar
    return UniqueKeysGrammar(
        grammar, vocabulary.key_tokens, grammar.backend, keys, items, grammar.notes
    )


class _Judged(NamedTuple):
    """Whether some tokens after a state write each key once."""

    state: KeyState | None
    rest: tuple[int, ...]
    is_unique: bool


class UniqueKeysFilter:
    """Clears tokens that write a key a second time, see ``RowFilter``. Its state is a ``KeyState``.

    tokens: of the vocabulary. run_out: whether keys may run out, see ``FreeKeys``.

    What it remembers only saves time.
    """

    def __init__(self, tokens: KeyTokens, *, run_out: bool) -> None:
        self._tokens, self._run_out = tokens, run_out
        self._ahead = Ahead(tokens.advance, _is_near, len(tokens.data))
        self._judged: deque[_Judged] = deque(maxlen=_JUDGED)

    @property
    def wakes(self) -> frozenset[int]:
        """Tokens that hold a part of JSON's structure."""
        return self._tokens.special

    def start(self, length: int) -> Mark:
        """Outside of every object."""
        return self._mark(START, length)

    def admits(self, mark: Mark, token_id: int, text: Probe) -> bool:
        """Whether there is such a token: the keys are looked at once the grammar has taken it."""
        del mark, text
        return 0 <= token_id < len(self._tokens.data)

    def after(self, mark: Mark, text: Probe) -> Mark | None:
        """The mark after the last token; None where a key is there twice, or none is left."""
        state = self._tokens.advance(mark.state, text.token_ids[-1])
        if state is None or not self._goes_on(state, text):
            return None
        return mark if state is mark.state else self._mark(state, len(text.token_ids))

    def restrict(self, mark: Mark, row: NDArray[np.int32], text: Probe) -> bool:
        """Clear the tokens after which a key is there twice, or none is left."""
        state = mark.state
        if not self._may_differ(state):
            return False
        suspects = dict.fromkeys(self._suspects(state, row))
        return clear_refused(row, suspects, lambda token: self._takes(state, token, text))

    def tokens_left(self, mark: Mark, length: int) -> int | None:
        """None: a table knows no keys."""
        del mark, length
        return None

    def fork(self) -> UniqueKeysFilter:
        """A filter that remembers nothing yet."""
        return UniqueKeysFilter(self._tokens, run_out=self._run_out)

    def interchangeable(self, mark: Mark, row: NDArray[np.int32]) -> NDArray[np.int32]:
        """int32 [W]: of some legal tokens those that surely write no key that is there already."""
        state: KeyState = mark.state
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

    def takes(self, mark: Mark, token_ids: Sequence[int]) -> bool:
        """Whether no key is there twice after these tokens; nothing else is asked of them."""
        state: KeyState | None = mark.state
        if token_ids:
            state = self._tokens.advance(mark.state, token_ids[0])
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

    def _mark(self, state: KeyState, length: int) -> Mark:
        """Outside of keys, tokens without structure change nothing."""
        is_active = state.mode not in CHANGELESS or self._may_differ(state)
        return Mark(length, state, length) if is_active else Mark(length, state)

    def _may_differ(self, state: KeyState) -> bool:
        """Whether the row may lack tokens that the grammar's has."""
        if self._run_out or self._tokens.loaded:
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
        if self._run_out:
            yield from self._tokens.turning(state.mode, row)

    def _closing(self, state: KeyState, keys: Keys, row: NDArray[np.int32]) -> Iterator[int]:
        """Tokens that complete a key that is there already; or may write more of it."""
        tokens, near = self._tokens, keys.starting(state.key)
        if state.is_pending:
            every = self._run_out
            yield from ids_of(row, len(tokens.data)) if every else tokens.quoted(row)
        elif len(near) < len(tokens.closers):
            for key in near:
                yield from tokens.closers.get(key[len(state.key) :], ())
        else:
            for rest, closers in tokens.closers.items():
                if keys.holds(state.key + rest):
                    yield from closers
        if self._run_out:
            yield from self._beginnings(state.key, near)

    def _beginnings(self, key: bytes, near: Sequence[bytes]) -> Iterator[int]:
        """Tokens that write more of one of ``near``, which ``key`` begins, and nothing else."""
        for other in near:
            for end in range(len(key) + 1, len(other) + 1):
                yield from self._tokens.texts.get(other[len(key) : end], ())

    def _takes(self, state: KeyState, token_id: int, text: Probe) -> bool:
        """Whether a token that the grammar takes is legal."""
        then = self._tokens.advance(state, token_id)
        if then is None or not self._run_out or not _is_near(then):
            return then is not None
        if not text.accept_token(token_id):
            return True  # which is for the grammar to say
        goes_on = self._goes_on(then, text)
        text.rollback(1)
        return goes_on

    def _goes_on(self, state: KeyState, text: Probe) -> bool:
        """Whether a key is left that the object does not have. ``text`` stands in ``state``."""
        return not self._run_out or self._ahead.goes_on(state, state.mode, text)


def _is_near(state: KeyState, *, in_key: bool = False) -> bool:
    """Whether what comes next may turn out to be a key that the object has. in_key: has begun."""
    keys = state.frame.keys if state.frame else None
    if not keys or not (keys.new or keys.old):
        return False
    if state.mode is Mode.KEY:
        return state.is_pending or bool(keys.starting(state.key))
    return state.mode is Mode.BEFORE_KEY and not in_key
