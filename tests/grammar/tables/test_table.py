"""A table allows what its matcher allows: in every state and along random texts."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import xgrammar
from hypothesis import example, given, settings
from hypothesis import strategies as st

from guided_spec.bundled import bundled_asset
from guided_spec.errors import ConfigError, GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.limits import NoTableError, TableLimits
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.table import (
    Difference,
    compare_steps,
    compare_texts,
    proven_table,
    tabled_part,
)
from guided_spec.grammar.tables.token_table import ENDED, OUTSIDE, REFUSED, TokenTable
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.tokenizer import load_tokenizer
from tests.strategies import regexes, schemas
from tests.tiers import examples

WORDS = [b'{"', b'"}', b'":', b', "', b'", "', b"]]", b"}}", b"[[", b'"a"', b"ab", b"true", b"alse"]
WORDS += [
    b"12",
    b"00",
    b"-1",
    b"2023",
    b"\\u00",
    b'\\"',
    b"  ",
    b"\n\n",
    "é".encode(),
    b"\xc3",
    b"a\xc3",
]
TEXTS = (*(bytes([byte]) for byte in range(256)), *WORDS, b"", b"", b"ab")
STOPS = (256 + len(WORDS), 257 + len(WORDS))
SMALL = Vocabulary(TEXTS, STOPS, len(TEXTS))
LIMITS = TableLimits(states=600)
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}},
    },
    "required": ["name"],
}


@cache
def backend(name: str = "xgrammar") -> Any:
    return BackendChoice(name, SMALL)


@cache
def bundled() -> Vocabulary:
    tokenizer = load_tokenizer(bundled_asset("target"))
    return Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def compiled_part(spec: GrammarSpec, name: str = "xgrammar") -> CompiledGrammar:
    return tabled_part(backend(name).compile(spec))


def table_of(spec: GrammarSpec, limits: TableLimits = LIMITS, name: str = "xgrammar") -> TokenTable:
    return proven_table(compiled_part(spec, name), Spelling(SMALL), limits)


def require_equal(compiled: CompiledGrammar, table: TokenTable, steps: int = 200) -> None:
    assert compare_steps(table, compiled) is None
    assert compare_texts(table, compiled, steps, seed=7).difference is None


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
@settings(max_examples=examples(40))
@example(r"(?P<named>\D\D\D\D)")
@given(regexes())
def test_tables_of_regexes_equal_their_matchers(name: str, pattern: str) -> None:
    try:
        compiled = compiled_part(GrammarSpec.regex(pattern), name)
    except GrammarCompileError:
        return
    table = proven_table(compiled, Spelling(SMALL), replace(LIMITS, states=5000))
    assert table.is_whole
    require_equal(compiled, table)


@settings(max_examples=examples(40))
@given(schemas(), st.sampled_from([True, False]))
def test_tables_of_schemas_equal_their_matchers(schema: dict[str, Any], spaces: object) -> None:
    spec = GrammarSpec.json_schema(schema, any_whitespace=bool(spaces))
    try:
        compiled = compiled_part(spec)
    except UnsupportedSchemaError:
        return
    require_equal(compiled, proven_table(compiled, Spelling(SMALL), LIMITS))


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.json_schema(RECORD),
        GrammarSpec.json_object(),
        GrammarSpec.choice(["yes", "no", "not now"]),
        GrammarSpec.regex(r"[\w.]{1,24}@[a-z]+\.(com|org)"),
    ],
    ids=lambda spec: spec.kind,
)
def test_random_texts_of_a_real_vocabulary(spec: GrammarSpec) -> None:
    compiled = tabled_part(BackendChoice("auto", bundled()).compile(spec))
    table = proven_table(compiled, Spelling(bundled()), TableLimits(states=1500))
    compared = compare_texts(table, compiled, 5_000, seed=1)
    assert compared.difference is None
    assert compared.steps == 5_000
    assert table.is_whole == (spec.kind != "json_object")


@pytest.mark.parametrize("pattern", ["^[0-9]{2}:[0-9]{2}$", "^(a|b)c?$", "^[A-Z][a-z]+[0-9]{1,2}$"])
def test_a_pattern_between_anchors_that_nobody_rewrote(pattern: str) -> None:
    """As xgrammar prints it for engines that hand it schemas as they are."""
    schema = {"type": "object", "properties": {"b": {"pattern": pattern, "type": "string"}}}
    source = json.dumps({**schema, "required": ["b"], "additionalProperties": False})
    own = XGrammarBackend(SMALL)
    known: Any = own.compile(GrammarSpec.regex("a"))
    compiler = xgrammar.GrammarCompiler(known.compiled.tokenizer_info)
    printed = str(compiler.compile_json_schema(source, any_whitespace=False).grammar)
    assert 'Regex("^' in printed
    compiled = tabled_part(own.compile(GrammarSpec.ebnf(printed)))
    table = proven_table(compiled, Spelling(SMALL), LIMITS)
    assert table.is_whole
    require_equal(compiled, table)


def test_texts_and_the_stop_token() -> None:
    table = table_of(GrammarSpec.choice(["a", "ab"]))
    ab = TEXTS.index(b"ab")
    after_a = table.after(0, ord("a"))
    assert [table.after(0, token) for token in (ab, len(TEXTS) - 1)] == [
        table.after(after_a, ord("b"))
    ] * 2
    assert table.after(0, ord("b")) == REFUSED
    assert [table.after(0, stop) for stop in STOPS] == [REFUSED] * 2
    assert [table.after(after_a, stop) for stop in STOPS] == [ENDED] * 2
    assert table.row(after_a).view(np.uint32).tolist() != table.row(0).view(np.uint32).tolist()


def test_equal_tokens_and_rows_are_kept_once() -> None:
    table = table_of(GrammarSpec.regex("[a-z]{1,40}"))
    assert table.num_states == 41
    assert table.classes[ord("a")] == table.classes[ord("z")] != table.classes[ord("A")]
    assert table.classes[TEXTS.index(b"ab")] not in table.classes[[ord("a"), ord("A")]]
    assert table.then.shape[1] == 5  # tokens of no, one, two and four letters, and the end
    assert len(table.rows) == 5  # no end; an end; too late for four letters, for two, for one


def test_a_grammar_without_an_end_of_its_states_has_a_part_of_a_table() -> None:
    spec = GrammarSpec.json_object()
    small, large = (table_of(spec, TableLimits(states=n)) for n in (300, 1200))
    assert not small.is_whole
    assert (small.then == OUTSIDE).any()
    assert small.num_states < large.num_states < 1200
    require_equal(compiled_part(spec), small, steps=2_000)


def test_a_change_anywhere_is_found() -> None:
    spec = GrammarSpec.json_schema(RECORD)
    table, compiled = table_of(spec), compiled_part(spec)
    rng = np.random.default_rng(3)
    for _ in range(20):
        then, rows = table.then.copy(), table.rows.copy()
        state = int(rng.integers(table.num_states))
        legal = np.flatnonzero(then[state] >= 0)
        if not len(legal):
            continue
        own = then[state, legal[0]]
        other = next(s for s in range(table.num_states) if table.row_of[s] != table.row_of[own])
        then[state, legal[0]] = other
        assert isinstance(compare_steps(replace(table, then=then), compiled), Difference)
        rows[rng.integers(len(rows)), rng.integers(rows.shape[1] - 1)] ^= 1
        assert isinstance(compare_steps(replace(table, rows=rows), compiled), Difference)


@pytest.mark.parametrize(("matched", "told"), [("[ab]{1,9}", "[ab]{1,8}"), ("xa+c", "x[ab]+c")])
def test_a_matcher_of_another_language_has_no_table(matched: str, told: str) -> None:
    own, other = (
        backend("llguidance").compile(GrammarSpec.regex(pattern)) for pattern in (matched, told)
    )
    with pytest.raises(NoTableError, match=r"its matcher differs after the tokens \[\d+"):
        proven_table(replace(own, pattern=other.pattern), Spelling(SMALL), LIMITS)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (TableLimits(states=1), "too many states, from the first token on"),
        (TableLimits(seconds=1e-9), "longer than seconds=1e-09"),
        (TableLimits(bytes=5_000), "tokens differ|more than bytes=5000"),
    ],
)
def test_limits_are_kept(limits: TableLimits, reason: str) -> None:
    with pytest.raises(NoTableError, match=reason):
        table_of(GrammarSpec.json_schema(RECORD), limits)


def test_a_backend_that_tells_no_rules_has_no_table() -> None:
    with pytest.raises(NoTableError, match="does not expose its rules"):
        table_of(GrammarSpec.json_schema(RECORD), name="llguidance")


@pytest.mark.parametrize("limits", [{"states": 0}, {"states": 40_000}, {"seconds": True}])
def test_limits_are_positive(limits: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        TableLimits(**limits)
