"""Shadow constraints: they follow committed tokens, and are given up without harm."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.vllm.requests import ShadowConstraint
from guided_spec.masks.constraint import Constraint
from tests.toys import EOS, VOCABULARY


@pytest.fixture(scope="module")
def letters() -> Future[CompiledGrammar]:
    made = Future[CompiledGrammar]()
    made.set_result(XGrammarBackend(VOCABULARY).compile(GrammarSpec.regex("[abc]{2,}")))
    return made


def position(constraint: Constraint | None) -> list[int] | None:
    return None if constraint is None else constraint.committed


def test_it_follows_what_is_committed(letters: Future[CompiledGrammar]) -> None:
    shadow = ShadowConstraint(letters)
    first = shadow.update([], waits=False)
    assert first is not None
    for output in ([0], [0], [0, 1, 2]):
        assert shadow.update(output, waits=False) is first
        assert first.committed == output
    assert position(shadow.update([0, 1], waits=False)) == [0, 1]  # it began anew
    assert position(shadow.update([7, 0, 1, 2], 1, waits=False)) == [0, 1, 2]
    assert shadow.again().update([0], waits=False) is not first


def test_it_ends_and_is_lost(
    letters: Future[CompiledGrammar], caplog: pytest.LogCaptureFixture
) -> None:
    ended = ShadowConstraint(letters)
    assert ended.update([0, 1, EOS], waits=False) is None
    assert ended.update([0, 1, EOS, 5], waits=False) is None
    refused, broken = ShadowConstraint(letters), Future[CompiledGrammar]()
    broken.set_exception(GrammarCompileError("no grammar"))
    for output in ([0, 4], [0, 4, 0], [0]):
        assert refused.update(output, waits=False) is None
        assert ShadowConstraint(broken).update(output, waits=False) is None
    said = [record.getMessage() for record in caplog.records]
    assert [text for text in said if "no grammar" not in text] == said[:1]  # once
    assert "not followed any more: the grammar refuses token 4 at output position 1" in said[0]
    assert position(refused.again().update([0], waits=False)) == [0]


def test_it_waits_for_the_compiler(letters: Future[CompiledGrammar]) -> None:
    slow = Future[CompiledGrammar]()
    shadow = ShadowConstraint(slow)
    assert shadow.update([], waits=False) is None
    later = threading.Timer(0.05, slow.set_result, [letters.result()])
    later.start()
    assert position(shadow.update([0], waits=True)) == [0]
    assert position(shadow.update([0, 1], waits=False)) == [0, 1]
    later.join()


@given(st.lists(st.lists(st.sampled_from([0, 1, 2]), max_size=4), max_size=6))
def test_any_split_into_steps_ends_at_the_same_place(
    letters: Future[CompiledGrammar], steps: list[list[int]]
) -> None:
    shadow = ShadowConstraint(letters)
    output: list[int] = []
    for step in steps:
        output += step
        assert position(shadow.update(output, waits=False)) == output
