"""Steps that draft nothing take their rows from the original, and nothing else changes."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.protocol import CompiledGrammar, RowSource, legal_row
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.state import new_text
from guided_spec.masks.constraint import Constraint, Fork
from guided_spec.ops.mask_words import ids_of
from tests.masks.walks import BYTES, EOS
from tests.toys import EOS as TOY_EOS
from tests.toys import ToyCompiled, text_rule

SIZE = BYTES.vocab_size
NOTE = {
    "type": "object",
    "properties": {"s": {"type": "string", "maxLength": 9}, "n": {"enum": [1, 12]}},
    "required": ["s"],
    "additionalProperties": False,
}
SPECS = [GrammarSpec.json_schema(NOTE), GrammarSpec.regex("[ab]{2,40}(cd)?")]


def _grammars() -> list[CompiledGrammar]:
    """Of both libraries, in time for a budget or without one."""
    endings = EndingsCache(BYTES)
    found: list[CompiledGrammar] = []
    for backend in (XGrammarBackend(BYTES), LLGuidanceBackend(BYTES)):
        for spec in SPECS:
            compiled = backend.compile(spec)
            found += [compiled, endings.bound(compiled, 26, is_required=False)]
    return found


GRAMMARS = _grammars()


class Step(NamedTuple):
    """picks: of the draft's tokens, and of what is committed after those that agree."""

    picks: list[int]
    agreed: int
    others: list[int]
    is_ahead: bool
    catches_up: bool


PICKS = st.lists(st.integers(0, 999), max_size=4)
STEPS = st.lists(st.builds(Step, PICKS, st.integers(0, 4), PICKS, st.booleans(), st.booleans()))


def row(source: RowSource) -> list[int]:
    return [int(token) for token in ids_of(legal_row(source, SIZE))]


def draft(fork: Fork, picks: list[int]) -> list[list[int]]:
    """Append legal tokens; returns the rows on the way."""
    rows: list[list[int]] = []
    for pick in picks:
        if fork.text.is_terminated():
            break
        rows.append(row(fork.row_source))
        if not rows[-1] or not fork.text.accept_token(rows[-1][pick % len(rows[-1])]):
            break
    return rows


@given(grammar=st.sampled_from(range(len(GRAMMARS))), steps=STEPS)
def test_rows_and_texts_are_those_of_a_fork(grammar: int, steps: list[Step]) -> None:
    compiled = GRAMMARS[grammar]
    mixed, forked = (Constraint(compiled, [EOS]) for _ in range(2))
    for step in steps:
        forks = [mixed.fork() if step.picks else mixed.undrafted(), forked.fork()]
        assert row(forks[0].row_source) == row(forks[1].row_source)
        rows, again = (draft(fork, step.picks) for fork in forks)
        assert rows == again
        taken = forks[1].token_ids[: step.agreed]
        truth = new_text(compiled)
        truth.accept_tokens([*forked.committed, *taken])
        for pick in step.others or [0]:
            if truth.is_terminated():
                break
            legal = row(truth)
            taken.append(legal[pick % len(legal)])
            assert truth.accept_token(taken[-1])
        for one in (mixed, forked):
            assert (one.commit_ahead if step.is_ahead else one.commit)(taken) == taken
            assert not step.catches_up or one.catch_up() is None
        assert mixed.is_terminated == forked.is_terminated
        if mixed.is_terminated:
            break
    assert mixed.may_end() == forked.may_end()
    assert mixed.catch_up() is forked.catch_up() is None
    assert (mixed.committed, mixed.steered) == (forked.committed, forked.steered)
    assert (mixed.resyncs, forked.resyncs) == (0, 0)
    assert mixed.has_lost_end == forked.has_lost_end


def test_rows_of_the_original_tell_what_a_budget_took() -> None:
    """A draft that is in vain tells nothing, whichever fills the next row."""
    compiled: Any = EndingsCache(BYTES).bound(GRAMMARS[2], 8, is_required=False)
    found: list[list[int]] = []
    for period in (1, 2, 3):
        constraint = Constraint(compiled, [EOS])
        for at, token in enumerate(b"aaaaaaa"):
            fork = constraint.undrafted() if at % period else constraint.fork()
            row(fork.row_source)
            draft(fork, [0] if at % period == 0 and at < 4 else [])
            constraint.commit_ahead([token])
        constraint.catch_up()
        found.append(constraint.steered)
    assert found[0]
    assert found[1:] == found[:1] * 2


def test_the_fork_reads_nothing_until_it_is_asked_for() -> None:
    constraint = Constraint(ToyCompiled(text_rule([b'abcd{}":'])), [TOY_EOS])
    fork, text = constraint.fork(), list(range(8))
    for token in text[:5]:
        assert row(constraint.undrafted().row_source) == [token]
        assert constraint.commit_ahead([token]) == [token]
        assert constraint.catch_up() is None
    assert fork.text.token_ids == []
    assert constraint.fork().text.token_ids == text[:5]
    assert constraint.commit([*text[5:], TOY_EOS]) == [*text[5:], TOY_EOS]
    assert constraint.is_terminated


def test_a_token_that_the_original_refuses_is_found_at_the_next_commit() -> None:
    constraint = Constraint(ToyCompiled(text_rule([b"abcd"])), [TOY_EOS])
    constraint.undrafted()
    assert constraint.commit_ahead([0, 3]) == [0, 3]
    with pytest.raises(GrammarStateError, match="token 3 at output position 1"):
        constraint.commit_ahead([4])
