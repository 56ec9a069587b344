"""Shadow constraints: they follow committed tokens, and are given up without harm."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.pipeline import GrammarCompileQueue
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.vllm.shadows import ShadowConstraints
from guided_spec.masks.constraint import Constraint
from tests.toys import EOS, VOCABULARY

LETTERS = GrammarSpec.regex("[abc]{2,}")
BROKEN = GrammarSpec.regex("(")


@pytest.fixture(scope="module")
def queue() -> Iterator[GrammarCompileQueue]:
    made = GrammarCompileQueue(XGrammarBackend(VOCABULARY), max_workers=1)
    for spec in (LETTERS, BROKEN):
        made.submit(spec).exception(60)
    yield made
    made.close()


def position(constraint: Constraint | None) -> list[int] | None:
    return None if constraint is None else constraint.committed


def test_it_follows_what_is_committed(queue: GrammarCompileQueue) -> None:
    shadows = ShadowConstraints(queue)
    first = shadows.follow("a", LETTERS, [])
    assert first is not None
    for output in ([0], [0], [0, 1, 2]):
        assert shadows.follow("a", LETTERS, output) is first
        assert first.committed == output
    other = shadows.follow("b", LETTERS, [2])
    assert other is not first
    assert position(shadows.follow("a", LETTERS, [0, 1])) == [0, 1]  # it began anew
    shadows.keep({"b"})
    assert shadows.follow("b", LETTERS, [2, 0]) is other
    assert shadows.follow("a", LETTERS, [0]) is not first


def test_it_ends_and_is_lost(queue: GrammarCompileQueue, caplog: pytest.LogCaptureFixture) -> None:
    shadows = ShadowConstraints(queue)
    assert shadows.follow("ended", LETTERS, [0, 1, EOS]) is None
    assert shadows.follow("ended", LETTERS, [0, 1, EOS, 5]) is None
    assert shadows.follow("refused", LETTERS, [0, 4]) is None
    assert shadows.follow("refused", LETTERS, [0, 4, 0]) is None
    assert shadows.follow("broken", BROKEN, [0]) is None
    assert shadows.follow("refused", LETTERS, [0]) is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2  # once each
    assert "not followed any more: the grammar refuses token 4 at output position 1" in said[0]
    shadows.keep(())
    assert position(shadows.follow("refused", LETTERS, [0])) == [0]


def test_it_waits_for_the_compiler() -> None:
    class Slow:
        def __init__(self) -> None:
            self.future: Future[object] = Future()

        def submit(self, spec: GrammarSpec) -> Future[object]:
            del spec
            return self.future

    slow = Slow()
    shadows = ShadowConstraints(slow)  # type: ignore[arg-type]
    waiting = ShadowConstraints(slow, waits=True)  # type: ignore[arg-type]
    shadows.prepare("a", LETTERS)
    assert shadows.follow("a", LETTERS, []) is None
    compiled = XGrammarBackend(VOCABULARY).compile(LETTERS)
    later = threading.Timer(0.05, slow.future.set_result, [compiled])
    later.start()
    assert position(waiting.follow("a", LETTERS, [0])) == [0]
    assert position(shadows.follow("a", LETTERS, [0, 1])) == [0, 1]
    later.join()


def test_what_is_forgotten_begins_anew(queue: GrammarCompileQueue) -> None:
    shadows = ShadowConstraints(queue)
    first = shadows.follow("a", LETTERS, [0])
    shadows.forget("a")
    shadows.forget("never seen")
    assert shadows.follow("a", LETTERS, [0]) not in (None, first)


@given(st.lists(st.lists(st.sampled_from([0, 1, 2]), max_size=4), max_size=6))
def test_any_split_into_steps_ends_at_the_same_place(
    queue: GrammarCompileQueue, steps: list[list[int]]
) -> None:
    shadows = ShadowConstraints(queue)
    output: list[int] = []
    for step in steps:
        output += step
        assert position(shadows.follow("a", LETTERS, output)) == output
