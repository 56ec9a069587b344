"""A text whose grammar takes long decodes beside the others, and is what it would be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from guided_spec.config import EngineConfig
from guided_spec.engine import slow_texts
from guided_spec.engine.slow_texts import SlowTexts
from guided_spec.errors import GrammarError, GrammarTooSlowError
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.masks.constraint import Constraint
from guided_spec.types import SamplingParams
from tests.engine.conftest import PATIENCE
from tests.engine.test_preemption import PARAMS, PROMPTS, Texts, texts
from tests.engine.test_suspects import ENGINES, Settings, generate, make
from tests.learned_heads import HeadedTarget
from tests.server.running import until
from tests.tiny_llm import make_llm

SLOW = SamplingParams(grammar=GrammarSpec.regex("[ab]{20}"), max_tokens=30)
FREE = SamplingParams(max_tokens=30, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(headed: HeadedTarget) -> Texts:
    with make(headed, Settings("none")) as llm:
        return texts(llm.generate(PROMPTS, PARAMS))


@pytest.fixture
def all_slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every grammar takes long; the threads on which rows were prepared."""
    monkeypatch.setattr(slow_texts, "LONG", 0.0)
    threads, prepare = list[str](), Constraint.prepare

    def preparing(constraint: Constraint, num_words: int) -> None:
        threads.append(threading.current_thread().name)
        prepare(constraint, num_words)

    monkeypatch.setattr(Constraint, "prepare", preparing)
    return threads


class Gate:
    """Rows of slow texts wait here. entered: one of them does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self._opened = threading.Event(), threading.Event()
        prepare = Constraint.prepare

        def preparing(constraint: Constraint, num_words: int) -> None:
            self.entered.set()
            assert self._opened.wait(PATIENCE)
            prepare(constraint, num_words)

        monkeypatch.setattr(Constraint, "prepare", preparing)
        monkeypatch.setattr(slow_texts, "LONG", 0.0)

    def open(self) -> None:
        self._opened.set()


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open()


@pytest.mark.parametrize("settings", ENGINES)
def test_texts_are_the_same(
    headed: HeadedTarget,
    settings: Settings,
    expected: Texts,
    all_slow: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert texts(generate(headed, settings, monkeypatch)) == expected
    assert len(all_slow) > 20
    assert {name.rsplit("_", 1)[0] for name in all_slow} == {"guided-spec-slow-rows"}


def test_others_do_not_wait(gate: Gate) -> None:
    with make_llm("llama", "ngram") as llm:
        outputs = dict[int, Any]()
        chunks = llm.stream(["A", "B"], [SLOW, FREE], on_error="return")
        for chunk in chunks:
            if chunk.completion is not None:
                outputs[chunk.prompt_index] = chunk.completion
                if chunk.prompt_index == 1:
                    assert gate.entered.wait(PATIENCE)
                    gate.open()
        assert list(outputs) == [1, 0]
        assert outputs[0].finish_reason == "stop"
        assert set(outputs[0].text) <= {"a", "b"}


def test_who_is_cancelled_meanwhile_ends_with_the_row(gate: Gate) -> None:
    with make_llm("llama", "ngram") as llm:
        chunks: Any = llm.stream("A", SLOW, on_error="return")
        reader = threading.Thread(target=lambda: [*chunks])
        reader.start()
        assert gate.entered.wait(PATIENCE)
        closer = threading.Thread(target=llm.close)
        closer.start()
        assert llm.load.running == 1
        gate.open()
        for thread in (closer, reader):
            thread.join(PATIENCE)
            assert not thread.is_alive()


def test_a_stream_that_is_closed_meanwhile(gate: Gate) -> None:
    with make_llm("llama", "ngram") as llm:
        chunks: Any = llm.stream(["A", "B"], [SLOW, FREE], on_error="return")
        next(chunks)
        assert gate.entered.wait(PATIENCE)
        chunks.close()
        (other,) = llm.generate("A", FREE)
        assert other.error is None  # while the row is still under way
        gate.open()
        until(lambda: llm.load.running == 0)


def test_a_text_that_takes_too_long_ends_alone(all_slow: list[str]) -> None:
    limits = GrammarLimits(text_seconds=1e-9)
    with make_llm("llama", "ngram", grammar_limits=limits) as llm:
        slow, free = llm.generate(["A", "A"], [SLOW, FREE], on_error="return")
    assert isinstance(slow.error, GrammarTooSlowError)
    assert "text_seconds=1e-09 allows no more" in str(slow.error)
    assert set(slow.text) <= {"a", "b"}
    assert free.error is None
    assert all_slow


def test_a_matcher_that_raises_on_the_other_thread(
    all_slow: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any) -> None:
        raise ZeroDivisionError("in native code")

    monkeypatch.setattr(Constraint, "prepare", failing)
    with make_llm("llama", "ngram") as llm:
        slow, free = llm.generate(["A", "A"], [SLOW, FREE], on_error="return")
    assert isinstance(slow.error, GrammarError)
    assert "in native code" in str(slow.error)
    assert free.error is None
    assert not all_slow


def test_later_texts_of_its_grammar_begin_there_until_rows_are_fast(
    all_slow: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_texts, "ROWS_TO_RETURN", 4)
    with make_llm("llama", "none") as llm:
        (first,) = llm.generate("A", SLOW)
        before = len(all_slow)
        llm.generate("A", SLOW)
        num_tokens = first.stats.output_tokens
        assert len(all_slow) - before in (num_tokens, num_tokens - 1)  # all, the first one too
        monkeypatch.setattr(slow_texts, "LONG", 1000.0)
        before = len(all_slow)
        llm.generate("A", SLOW)
        assert len(all_slow) - before == 4


def test_a_step_that_a_clock_finds_long_is_measured_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may have held the machine: only what the CPU took counts."""
    monkeypatch.setattr(slow_texts, "LONG", 0.0)
    noted, note = list[bool](), SlowTexts.note

    def noting(slow: SlowTexts, requests: Any) -> None:
        note(slow, requests)
        noted.extend(one.text.constraint.is_timed for one in requests)
        monkeypatch.setattr(slow_texts, "LONG", 1000.0)

    monkeypatch.setattr(SlowTexts, "note", noting)
    with make_llm("llama", "none") as llm:
        llm.generate("A", SLOW)
    assert noted[:3] == [True, False, False]


def test_the_limit_is_checked() -> None:
    with pytest.raises(Exception, match="text_seconds=0"):
        EngineConfig(grammar_limits=GrammarLimits(text_seconds=0))


@pytest.mark.slow
def test_a_grammar_that_is_dear_to_step() -> None:
    """As many ways through it as the text is long, and more."""
    source = 'root ::= a a a\na ::= a b | b | ""\nb ::= b a | "x" | [a-z]*'
    ambiguous = GrammarSpec.ebnf(source)
    params = SamplingParams(grammar=ambiguous, max_tokens=60, min_tokens=60, complete=False)
    limits = GrammarLimits(text_seconds=0.3)
    with make_llm("llama", "ngram", grammar_limits=limits) as llm:
        slow, free = llm.generate(["A", "A"], [params, FREE], on_error="return")
    assert isinstance(slow.error, GrammarTooSlowError)
    assert free.error is None
