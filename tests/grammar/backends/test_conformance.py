"""The check of a backend passes those that work, and names what is wrong with the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.guarded import GuardedBackend, check_grammar_backend
from guided_spec.grammar.backends.registry import GRAMMAR_BACKENDS, find_grammar_backend
from guided_spec.grammar.spec import GrammarSpec
from tests.grammar.backends.own_backends import Broken, Handing, Listed, faulty
from tests.masks.walks import BYTES
from tests.toys import ToyMatcher

COLOURS = ["red", "redder", "green", "blue"]
WORDS = GrammarSpec.choice(COLOURS)
Fill = Callable[[ToyMatcher, Any, int], Any]


@pytest.mark.parametrize("name", sorted(GRAMMAR_BACKENDS))
@pytest.mark.parametrize("spec", [WORDS, GrammarSpec.regex("[a-c]{2,5}(é|x+)?")])
def test_the_built_in_ones_conform(name: str, spec: GrammarSpec) -> None:
    backend = find_grammar_backend("backend", name)(BYTES)
    assert check_grammar_backend(backend, spec)


def test_sound_ones_conform() -> None:
    for make in (Listed, Handing):
        texts = check_grammar_backend(make(BYTES), WORDS, num_texts=12)
        assert len(texts) == 12
        assert set(texts) == set(COLOURS)
        assert check_grammar_backend(make(BYTES), WORDS, num_texts=4, max_tokens=2) == []
    assert texts == check_grammar_backend(Handing(BYTES), WORDS, num_texts=12)
    assert texts != check_grammar_backend(Handing(BYTES), WORDS, num_texts=12, seed=1)


def test_what_it_refuses_is_raised() -> None:
    with pytest.raises(GrammarCompileError, match="listed compiles choice, not regex"):
        check_grammar_backend(Listed(BYTES), GrammarSpec.regex("a"))


def filling(fill: Fill) -> Any:
    """A change of ``fill_next_token_bitmask``: its own work, and then ``fill``."""

    def change(base: type[ToyMatcher]) -> Any:
        def changed(self: ToyMatcher, bitmask: Any, index: int = 0) -> Any:
            forbids = base.fill_next_token_bitmask(self, bitmask, index)
            answer = fill(self, np.asarray(bitmask), index)
            return forbids if answer is None else answer

        return _with_fork(base, fill_next_token_bitmask=changed)

    return change


def changing(**methods: Any) -> Any:
    return lambda base: _with_fork(base, **methods)


def _with_fork(base: type[ToyMatcher], **methods: Any) -> type[ToyMatcher]:
    def fork(self: ToyMatcher) -> ToyMatcher:
        return type(self)(self.compiled, self.tokens)

    return type("Changed", (base,), {"fork": fork, **methods})


def _shared(self: ToyMatcher) -> ToyMatcher:
    fork = type(self)(self.compiled)
    fork.tokens = self.tokens
    return fork


def _forgetting_rollback(self: ToyMatcher, num_tokens: int) -> None:
    ToyMatcher.rollback(self, min(num_tokens, 1))


def _accept(self: ToyMatcher, token_id: int) -> bool:
    """Takes what it refuses."""
    return ToyMatcher.accept_token(self, token_id) or token_id == ord("z")


def _accept_less(self: ToyMatcher, token_id: int) -> bool:
    return token_id != ord("u") and ToyMatcher.accept_token(self, token_id)


def _moving(self: ToyMatcher, token_id: int) -> bool:
    if not ToyMatcher.accept_token(self, token_id):
        del self.tokens[-1:]
        return False
    return True


def _or_in(_: ToyMatcher, rows: Any, index: int) -> None:
    rows[index, -1] |= 0x5A5A5A5A & ~1  # the stop token's bit is the lowest one of this word
    rows[index, 0] |= 0x5A5A5A5A  # as if it was never cleared


def _next_row(_: ToyMatcher, rows: Any, index: int) -> None:
    if len(rows) > index + 1:
        rows[index + 1] = -1


def _grow(self: ToyMatcher, rows: Any, index: int) -> None:
    fills = self.compiled.fills[tuple(self.tokens)]
    rows[index, 1] |= 1 << (fills % 20)


def _empty(self: ToyMatcher, rows: Any, index: int) -> None:
    if len(self.tokens) == 2:
        rows[index] = 0


BROKEN: list[tuple[Any, str]] = [
    (filling(_next_row), "a fill wrote other rows than its own"),
    (filling(_grow), "a second fill wrote another row"),
    (filling(_or_in), "legal by the mask, was refused"),
    (filling(_empty), "no token is legal, and the text has not ended"),
    (filling(lambda *_: False), "did not say whether the row forbids anything"),
    (changing(accept_token=_accept), "token 122, illegal by the mask, was accepted"),
    (changing(accept_token=_accept_less), "token 117, legal by the mask, was refused"),
    (changing(accept_token=_moving), "refused tokens changed the row"),
    (changing(fork=_shared), "(the text is over|another row|moved)"),
    (changing(rollback=lambda *_: None), "(another row|the text is over|refused)"),
    (changing(rollback=_forgetting_rollback), "after a rollback to the start"),
    (changing(is_terminated=lambda _: False), "token 256, .* is_terminated is wrong"),
    (faulty("accept_token", 2, lambda _: None), "accept_token returned None"),
    (faulty("rollback", 2, lambda _: 1 // 0), "rollback failed: ZeroDivisionError"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN)
def test_each_broken_rule_is_named(change: Any, message: str) -> None:
    backend = partial(Broken, change=change)(BYTES)
    with pytest.raises(AssertionError, match=rf"^after the tokens \[.*\]: .*{message}"):
        check_grammar_backend(backend, WORDS, num_texts=20)


def test_matchers_of_one_grammar_have_to_agree() -> None:
    grammars = [Listed(BYTES).compile(GrammarSpec.choice([word])) for word in ("red", "blue")]
    turns = itertools.cycle(grammars)
    compiled = SimpleNamespace(
        excluded=(), new_matcher=lambda: next(turns).new_matcher(), new_style_matcher=lambda: None
    )
    backend = SimpleNamespace(vocabulary=BYTES, compile=lambda _: compiled)
    with pytest.raises(AssertionError, match=r"\[\]: a new matcher filled another row"):
        check_grammar_backend(backend, WORDS)


def test_it_is_the_backend_that_is_checked_not_its_guard() -> None:
    """What a guard hides in the engine shows here."""
    broken = Broken(BYTES, faulty("fill_next_token_bitmask", 2, lambda _: 1 // 0))
    assert GuardedBackend("mine", lambda _: broken, BYTES).compile(WORDS)
    with pytest.raises(AssertionError, match="'checked': fill_next_token_bitmask failed"):
        check_grammar_backend(broken, WORDS)
