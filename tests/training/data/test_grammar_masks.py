"""Mask rows of answers: the rows of a matcher that walks along, or none."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.training.data.batches import GrammarMasks, MaskTable
from guided_spec.training.data.dataset import load_examples, read_grammar_text, write_grammar_text
from tests.masks.walks import BYTES, EOS

SCHEMA = write_grammar_text(
    GrammarSpec.json_schema({"type": "object", "properties": {"a": {"type": "string"}}})
)
WORDS = write_grammar_text(GrammarSpec.regex("ab*c?"))


def rows_of(
    masks: GrammarMasks, input_ids: Any, response_start: int, grammar: str
) -> NDArray[np.int32] | None:
    """int32 [n, W]: row i says which tokens may stand at place ``response_start + i``."""
    table = MaskTable(len(input_ids) - response_start, masks.vocabulary.vocab_size)
    slots = masks.fill(table, input_ids, response_start, grammar)
    return None if slots is None else table.rows().numpy()[slots]


@pytest.fixture(scope="module")
def masks(vocabulary: Vocabulary) -> GrammarMasks:
    return GrammarMasks(vocabulary)


@pytest.mark.parametrize(
    ("schema", "backend"),
    [
        ({"type": "object", "properties": {"a": {"type": "string"}}}, "xgrammar"),
        # xgrammar's rows of long counts cost tens of milliseconds each.
        ({"type": "string", "maxLength": 600}, "llguidance"),
        ({"type": "string", "pattern": "^[a-c]+$", "minLength": 2, "maxLength": 4}, "llguidance"),
    ],
)
def test_a_grammar_is_compiled_as_it_is_where_texts_are_served(
    schema: dict[str, Any], backend: str, masks: GrammarMasks
) -> None:
    compiled: Any = masks.compile(write_grammar_text(GrammarSpec.json_schema(schema)))
    assert compiled.backend == backend


def test_rows_are_those_of_a_matcher(heldout: Path, tokenizer: Any, masks: GrammarMasks) -> None:
    dataset = load_examples([heldout], tokenizer, stop_ids=[0], max_length=512, limit=30)
    backend = XGrammarBackend(masks.vocabulary)
    for row in dataset:
        start, grammar = int(row["response_start"]), row["grammar"]
        rows = rows_of(masks, row["input_ids"], start, grammar)
        answer = row["input_ids"][start:].tolist()
        assert rows is not None
        assert rows.shape == (len(answer), 128)
        legal = unpack_bitmask(torch.from_numpy(rows), 4096)
        assert legal[torch.arange(len(answer)), answer].all()
        spec = read_grammar_text(grammar)
        assert spec is not None
        matcher = backend.compile(spec).new_matcher()
        expected = np.zeros((1, 128), dtype=np.int32)
        for token, found in zip(answer, rows, strict=True):
            matcher.fill_next_token_bitmask(expected, 0)
            np.testing.assert_array_equal(found, expected[0])
            assert matcher.accept_token(token)
        assert matcher.is_terminated()
    assert (masks.rejected, masks.failed) == (0, 0)


@pytest.mark.parametrize(
    ("text", "stop", "is_legal"),
    [
        (b"abbc", (EOS,), True),
        (b"abb", (EOS,), True),
        (b"abb", (), True),  # cut: so far it is a text of the grammar
        (b"", (), True),
        (b"", (EOS,), False),
        (b"abbx", (EOS,), False),
        (b"abbcc", (EOS,), False),
        (b"a", (EOS, ord("b")), False),  # behind the end nothing may stand
        (b"a", (EOS, EOS), False),
        (b"a", (500,), False),  # no token of the vocabulary
    ],
)
def test_texts_of_a_grammar_and_others(text: bytes, stop: tuple[int, ...], is_legal: bool) -> None:  # noqa: FBT001
    masks = GrammarMasks(BYTES)
    rows = rows_of(masks, [7, 7, *text, *stop], 2, WORDS)
    assert masks.rejected == (not is_legal)
    if is_legal:
        assert rows is not None
        assert len(rows) == len(text) + len(stop)
    else:
        assert rows is None


@pytest.mark.parametrize(
    "grammar",
    [
        GrammarSpec.lark('start: "a" "b"+ "c"'),
        GrammarSpec.ebnf('root ::= "a" "b"+ "c"'),
        GrammarSpec.choice(["abbc", "abc"]),
        GrammarSpec.structural_tag(
            {"type": "structural_tag", "format": {"type": "regex", "pattern": "ab+c"}}
        ),
    ],
)
def test_every_kind_of_grammar(grammar: GrammarSpec) -> None:
    masks = GrammarMasks(BYTES)
    text = write_grammar_text(grammar)
    rows = rows_of(masks, [*b"abbc", EOS], 0, text)
    assert rows is not None
    legal = unpack_bitmask(torch.from_numpy(rows), BYTES.vocab_size)
    assert legal.sum(-1).tolist()[0] == 1
    assert rows_of(masks, [*b"abd"], 0, text) is None
    assert (masks.rejected, masks.failed) == (1, 0)


def test_whitespace_that_was_not_asked_for(tokenizer: Any, masks: GrammarMasks) -> None:
    spec = GrammarSpec.json_schema(json.loads(json.loads(SCHEMA)["source"]), any_whitespace=True)
    token_ids = [*tokenizer('{"a":\n"b"}')["input_ids"], 0]
    assert rows_of(masks, token_ids, 0, SCHEMA) is None
    assert rows_of(masks, token_ids, 0, write_grammar_text(spec)) is not None


def test_broken_grammars_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    masks = GrammarMasks(BYTES, cache_size=2)
    broken = write_grammar_text(GrammarSpec.regex("("))
    with caplog.at_level(logging.WARNING):
        assert rows_of(masks, [97], 0, broken) is None
        assert rows_of(masks, [97], 0, broken) is None
        assert rows_of(masks, [98], 0, WORDS) is None
        assert rows_of(masks, [98], 0, WORDS) is None
    assert rows_of(masks, [98], 0, "") is None
    assert (masks.failed, masks.rejected) == (1, 2)  # a failure is remembered
    assert len(caplog.messages) == 2
    assert "does not compile" in caplog.messages[0]
    assert "token 0" in caplog.messages[1]


def test_the_least_recently_used_grammar_goes_first() -> None:
    masks = GrammarMasks(BYTES, cache_size=2)
    texts = [write_grammar_text(GrammarSpec.regex(letter)) for letter in "abc"]
    first, second = masks.compile(texts[0]), masks.compile(texts[1])
    assert masks.compile(texts[0]) is first
    masks.compile(texts[2])
    assert masks.compile(texts[0]) is first
    assert masks.compile(texts[1]) is not second


def _rows_in_worker(masks: GrammarMasks) -> tuple[int, list[list[int]]]:
    rows = rows_of(masks, b"ab", 0, WORDS)
    assert rows is not None
    return os.getpid(), rows.tolist()


MASKS = GrammarMasks(BYTES)


def _rows_behind_a_fork() -> tuple[int, list[list[int]], int]:
    return *_rows_in_worker(MASKS), MASKS.rejected


@pytest.mark.slow
def test_masks_travel_to_other_processes() -> None:
    here = rows_of(MASKS, b"ab", 0, WORDS)
    assert here is not None
    assert rows_of(MASKS, b"x", 0, WORDS) is None
    copied = pickle.loads(pickle.dumps(MASKS))
    assert copied.rejected == 0
    assert _rows_in_worker(copied)[1] == here.tolist()
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            pid, rows = pool.submit(_rows_in_worker, MASKS).result(timeout=120)
            assert pid != os.getpid()
            assert rows == here.tolist()
            if method == "fork":
                pid, rows, rejected = pool.submit(_rows_behind_a_fork).result(timeout=120)
                assert (rows, rejected) == (here.tolist(), 0)


def test_a_table_keeps_each_row_once() -> None:
    masks = GrammarMasks(BYTES)
    compiled = masks.compile(SCHEMA)
    assert compiled is not None
    table = MaskTable(100, BYTES.vocab_size)
    text = b'{"a": "bbbbbbbbbbbb"}'
    slots = masks.fill(table, [*text, EOS], 0, SCHEMA)
    assert slots is not None
    assert len({*slots[8:18]}) == 1  # inside the string
    assert len(table) < len(text)
    length = len(table)
    kept = table.rows().clone()
    assert masks.fill(table, [*text, EOS], 0, SCHEMA) == slots
    assert masks.fill(table, b'{"a": "b"x', 0, SCHEMA) is None
    assert masks.fill(table, b"aby", 0, WORDS) is None  # new rows, all taken back
    assert len(table) == length
    assert torch.equal(table.rows(), kept)
    assert (table.rows()[0] == -1).all()
    words = masks.fill(table, b"abc", 0, WORDS)
    assert words is not None
    expected = rows_of(masks, b"abc", 0, WORDS)
    np.testing.assert_array_equal(table.rows().numpy()[words], expected)
    assert torch.equal(table.rows()[:length], kept)
