"""What a registered backend does wrong is said by name, and ends its own request only."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from guided_spec.errors import (
    GrammarCompileError,
    GrammarStateError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.backends.guarded import GuardedBackend
from guided_spec.grammar.backends.registry import GRAMMAR_BACKENDS, register_grammar_backend
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.state import new_text
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.types import SamplingParams
from tests.grammar.backends.own_backends import Broken, Handing, Listed, faulty
from tests.masks.walks import BYTES, accepts
from tests.tiny_llm import make_llm, near_copy
from tests.toys import ToyCompiled, ToyMatcher, text_rule

WORD = b"violet"
WORDS = GrammarSpec.choice([WORD.decode(), "vermilion"])
Compile = Callable[[GrammarSpec], Any]


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    yield
    GRAMMAR_BACKENDS.pop("mine", None)


def guarded(compile_: Compile) -> GuardedBackend:
    backend = SimpleNamespace(vocabulary=BYTES, compile=compile_)
    return GuardedBackend("mine", lambda _: backend, BYTES)


def changed(change: Callable[[type[ToyMatcher]], type[ToyMatcher]]) -> CompiledGrammar:
    return GuardedBackend("mine", partial(Broken, change=change), BYTES).compile(WORDS)


def raise_(_: ToyMatcher) -> Any:
    raise ZeroDivisionError("a defect")


def test_a_sound_backend_is_asked_what_it_is_for() -> None:
    backend = Listed(BYTES)
    compiled = GuardedBackend("mine", lambda _: backend, BYTES).compile(WORDS.with_backend("auto"))
    assert [spec.backend for spec in backend.specs] == [None]
    matcher = new_text(compiled)
    assert not any(matcher.accept_token(token) for token in (-1, 257, 10**9))
    assert all(matcher.accept_token(byte) for byte in WORD)
    fork = matcher.fork()
    assert fork.accept_token(256)
    assert (fork.is_terminated(), matcher.is_terminated()) == (True, False)
    fork.rollback(3)
    row = np.zeros((1, 9), dtype=np.int32)
    assert fork.fill_next_token_bitmask(row)
    assert np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")) == [ord("e")]
    assert matcher.fault is None


@pytest.mark.parametrize(("said", "size"), [(5_000, 5_000), (None, 0), ("much", 0)])
def test_a_grammar_may_say_its_size(said: Any, size: int) -> None:
    sized: Any = Listed(BYTES).compile(WORDS)
    if said is None:
        del sized.memory_size_bytes
    else:
        sized.memory_size_bytes = said
    assert guarded(lambda _: sized).compile(WORDS).memory_size_bytes == size


def test_a_start_is_never_dropped() -> None:
    with pytest.raises(GrammarCompileError, match="GrammarPipeline"):
        GuardedBackend("mine", Listed, BYTES).compile(WORDS.after("x"))


def sound(spec: GrammarSpec) -> ToyCompiled:
    compiled = Listed(BYTES).compile(spec)
    assert isinstance(compiled, ToyCompiled)
    return compiled


def without(name: str) -> Compile:
    def compile_(spec: GrammarSpec) -> Any:
        compiled = sound(spec)
        names = {"excluded", "new_matcher", "new_style_matcher"} - {name}
        return SimpleNamespace(**{one: getattr(compiled, one) for one in names})

    return compile_


def with_matcher(matcher: Any) -> Compile:
    return lambda spec: SimpleNamespace(**{**vars(without("")(spec)), "new_matcher": matcher})


def with_excluded(excluded: Any) -> Compile:
    return lambda spec: SimpleNamespace(**{**vars(without("")(spec)), "excluded": excluded})


def with_style(style: Any) -> Compile:
    return lambda spec: SimpleNamespace(**{**vars(without("")(spec)), "new_style_matcher": style})


NOT_COMPILED: list[tuple[Compile, str]] = [
    (lambda _: 1 // 0, "failed on the choice: ZeroDivisionError: "),
    (lambda _: None, "compiled a NoneType without excluded, new_matcher, new_style_matcher"),
    (without("excluded"), "compiled a SimpleNamespace without excluded"),
    (with_excluded(None), "failed on the choice: TypeError: 'NoneType'"),
    (without("new_style_matcher"), "without new_style_matcher"),
    (with_matcher(lambda: None), "new_matcher made a NoneType without accept_token, fill_"),
    (with_matcher(lambda: 1 // 0), "new_matcher failed: ZeroDivisionError"),
    (with_style(lambda: 7), "new_style_matcher made a int without accept_token"),
    (with_style(lambda: 1 // 0), "new_style_matcher failed: ZeroDivisionError"),
]


@pytest.mark.parametrize(("compile_", "message"), NOT_COMPILED)
def test_what_is_no_grammar(compile_: Compile, message: str) -> None:
    with pytest.raises(GrammarCompileError, match=f"grammar backend 'mine'.*{message}"):
        guarded(compile_).compile(WORDS)


def test_its_own_refusals_go_through() -> None:
    def refuse(_: GrammarSpec) -> Any:
        raise UnsupportedSchemaError("not this one")

    with pytest.raises(UnsupportedSchemaError, match="^not this one$"):
        guarded(refuse).compile(WORDS)


def test_a_grammar_of_nothing() -> None:
    with pytest.raises(
        UnsatisfiableGrammarError, match="'mine' allows no first token of the choice"
    ):
        guarded(lambda _: ToyCompiled(lambda _: frozenset(), BYTES)).compile(WORDS)
    empty = guarded(lambda _: ToyCompiled(text_rule([b""], BYTES), BYTES)).compile(WORDS)
    assert accepts(empty, "")  # of nothing but the empty text


AT_ONCE: list[tuple[str, Any, str]] = [
    ("fill_next_token_bitmask", raise_, "fill_next_token_bitmask failed: ZeroDivisionError"),
    ("fill_next_token_bitmask", lambda _: None, "returned None, not True or False"),
    ("is_terminated", lambda _: 0, "is_terminated returned 0, not True or False"),
]


@pytest.mark.parametrize(("method", "fault", "message"), AT_ONCE)
def test_a_matcher_that_cannot_work_does_not_compile(method: str, fault: Any, message: str) -> None:
    with pytest.raises(GrammarCompileError, match=f"grammar backend 'mine': .*{message}"):
        changed(faulty(method, 0, fault))


def test_forks_that_are_none() -> None:
    def make(answer: Callable[[ToyMatcher], Any]) -> Any:
        return lambda base: type("Faulty", (base,), {"fork": answer})

    for answer, message in (
        (lambda matcher: matcher, "fork returned itself"),
        (lambda _: None, "fork returned None"),
        (raise_, "fork failed: ZeroDivisionError: a defect"),
    ):
        with pytest.raises(GrammarCompileError, match=message):
            changed(make(answer))


LATER: list[tuple[str, Any, str]] = [
    ("fill_next_token_bitmask", raise_, "fill_next_token_bitmask failed: ZeroDivisionError"),
    ("accept_token", raise_, "accept_token failed: ZeroDivisionError: a defect"),
    ("accept_token", lambda _: None, "accept_token returned None, not True or False"),
    # A fill asserts that the text has not ended, by the same method.
    ("is_terminated", raise_, "(is_terminated|fill_next_token_bitmask) failed: ZeroDivisionError"),
]


@pytest.mark.parametrize(("method", "fault", "message"), LATER)
def test_a_constraint_says_what_went_wrong(method: str, fault: Any, message: str) -> None:
    constraint = Constraint(changed(faulty(method, 3, fault)))
    row = np.full((1, 9), -1, dtype=np.int32)

    def write(data: bytes) -> None:
        for byte in data:
            constraint.fork().text.fill_next_token_bitmask(row)
            constraint.commit([byte])

    with pytest.raises(GrammarStateError, match=f"grammar backend 'mine': {message}"):
        write(WORD)
    assert len(constraint.committed) in (2, 3)
    assert constraint.fork().text.fault or constraint._original.fault


@pytest.mark.parametrize(("method", "fault", "message"), LATER)
@pytest.mark.parametrize(
    "proposer", ["none", "chain:grammar_forced+ngram", "draft_model:mask", "draft_model:validate"]
)
def test_a_faulty_matcher_ends_its_request_only(
    proposer: str, method: str, fault: Any, message: str
) -> None:
    draft = near_copy("llama") if proposer.startswith("draft_model") else None
    register_grammar_backend("mine", partial(Broken, change=faulty(method, 3, fault)))
    params = [
        SamplingParams(max_tokens=12, grammar=spec, complete=complete)
        for complete in (None, False)
        for spec in (
            replace(WORDS, backend="xgrammar"),
            replace(WORDS, backend="mine"),
            replace(WORDS, backend="mine").after("<think>", reasoning_budget=0),
        )
    ]
    with make_llm("llama", proposer, draft, max_batch_size=6) as llm:
        outputs = llm.generate(["The colour: "] * len(params), params, on_error="return")
    for output in (outputs[0], outputs[3]):
        assert output.finish_reason == "stop"
        assert output.text in ("violet", "vermilion")
    for output in (outputs[1], outputs[2], outputs[4], outputs[5]):
        assert output.finish_reason == "error"
        assert isinstance(output.error, GrammarStateError)
        assert re.search(message, str(output.error))
        assert len(output.text.removeprefix("<think>")) < len(WORD)


def test_what_hands_on_is_not_wrapped() -> None:
    compiled = GuardedBackend("mine", Handing, BYTES).compile(WORDS)
    assert getattr(compiled, "backend", "") == "xgrammar"


def test_out_of_memory_stays_what_it_is() -> None:
    """Where a grammar is tried out, the limit of memory is then what the error names."""

    def swell(_: GrammarSpec) -> Any:
        raise MemoryError

    with pytest.raises(MemoryError):
        guarded(swell).compile(WORDS)


def test_the_vocabulary_is_the_one_it_is_made_for() -> None:
    seen: list[Vocabulary] = []

    def make(vocabulary: Vocabulary) -> Listed:
        seen.append(vocabulary)
        return Listed(vocabulary)

    assert GuardedBackend("mine", make, BYTES).vocabulary is BYTES
    assert seen == [BYTES]
