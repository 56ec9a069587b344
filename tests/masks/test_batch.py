"""Rows of many matchers in one call are those that each matcher fills itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import GrammarStateError
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher, legal_row
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.state import new_text
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.batch import RowBatch
from guided_spec.ops.mask_words import ids_of, num_mask_words
from tests.grammar.tools.test_tool_formats import EOS, vocabulary
from tests.processes import in_fork

VOCABULARY = vocabulary("call")  # two tokens end a text
SIZE = VOCABULARY.vocab_size
TEXT = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 20}}}
NAMED = {
    "type": "sequence",
    "elements": [{"type": "any_text"}, {"type": "token", "token": EOS + 1}],
}


def _grammars() -> list[CompiledGrammar]:
    """Of both libraries; one names a token."""
    mine, other = XGrammarBackend(VOCABULARY), LLGuidanceBackend(VOCABULARY)
    schema = GrammarSpec.json_schema(TEXT)
    tag = GrammarSpec.structural_tag({"type": "structural_tag", "format": NAMED})
    return [other.compile(schema), mine.compile(schema), other.compile(tag)]


GRAMMARS = _grammars()


def own(compiled: CompiledGrammar) -> GrammarMatcher:
    """The library's matcher at the start."""
    matcher = new_text(compiled).own_matcher
    assert matcher is not None
    return matcher


def walked(compiled: CompiledGrammar, picks: Sequence[int]) -> GrammarMatcher:
    """A matcher after some legal tokens; not after the last one."""
    matcher = own(compiled)
    for pick in picks:
        legal = ids_of(legal_row(matcher, SIZE))
        inner = [token for token in legal if token not in VOCABULARY.stop_token_ids]
        if inner:
            matcher.accept_token(int(inner[pick % len(inner)]))
    return matcher


def in_one_call(matchers: Sequence[Any], rows: Sequence[int], batch: RowBatch) -> Any:
    bitmask = np.full((len(rows) + 2, num_mask_words(SIZE)), 0x5A5A5A5A, dtype=np.int32)
    batch.fill(matchers, bitmask, rows)
    return bitmask


@given(
    picks=st.lists(st.lists(st.integers(0, 999), max_size=12), min_size=1, max_size=12),
    data=st.data(),
)
def test_rows_are_those_that_each_matcher_fills(
    picks: list[list[int]], data: st.DataObject
) -> None:
    matchers = [walked(GRAMMARS[at % len(GRAMMARS)], row) for at, row in enumerate(picks)]
    rows = data.draw(st.permutations(range(len(matchers) + 2)))[: len(matchers)]
    batch = RowBatch()
    assert all(map(batch.takes, matchers))
    found = in_one_call(matchers, rows, batch)
    for matcher, row in zip(matchers, rows, strict=True):
        alone = np.zeros_like(found[:1])
        matcher.fill_next_token_bitmask(alone)
        assert (found[row] == alone[0]).all()
    for row in set(range(len(found))) - set(rows):
        assert (found[row] == 0x5A5A5A5A).all()


def test_a_dead_end_is_an_empty_row_beside_others() -> None:
    """llguidance allows a stop token there, and is no longer of use."""
    vocabulary = Vocabulary((b"a", b"b", b"ac", b"", b"\xff"), (3,), 5)
    compiled = LLGuidanceBackend(vocabulary).compile(GrammarSpec.regex("ax|b"))
    at_start, at_end, dead = (own(compiled) for _ in range(3))
    assert at_end.accept_token(1)
    assert dead.accept_token(0)
    rows = np.zeros((3, 1), dtype=np.int32)
    for _ in range(2):
        RowBatch().fill([at_start, dead, at_end], rows, [0, 1, 2])
        assert rows.tolist() == [[0b11], [0], [0b1000]]
    dead.rollback(1)
    assert dead.accept_token(1)


def test_stop_tokens_wait_for_a_named_token() -> None:
    (row, *_) = in_one_call([own(GRAMMARS[2])], [0], RowBatch())
    legal = set(ids_of(row))
    assert EOS + 1 in legal
    assert not legal & set(VOCABULARY.stop_token_ids)


def test_a_text_that_is_over_is_refused() -> None:
    done = GRAMMARS[0].new_matcher()
    for token in (*b"{}", EOS):
        assert done.accept_token(token)
    with pytest.raises(GrammarStateError, match="no token can follow"):
        in_one_call([GRAMMARS[0].new_matcher(), done], [0, 1], RowBatch())


def test_a_fork_of_the_process_fills_rows_too() -> None:
    matchers, batch = [GRAMMARS[0].new_matcher() for _ in range(3)], RowBatch()
    expected = in_one_call(matchers, range(3), batch)
    again = in_fork(lambda: in_one_call(matchers, range(3), batch))
    assert (again == expected).all()
