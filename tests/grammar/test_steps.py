"""Steps that are counted while a grammar is prepared, and what they keep from running away."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from guided_spec.errors import GrammarCompileError, GrammarError
from guided_spec.grammar.backends.any_order import any_order_grammar
from guided_spec.grammar.backends.ebnf import any_order_notes
from guided_spec.grammar.backends.llguidance_schema import prepare_for_llguidance
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.document import SpecDocument
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.regex import spend_on_search, to_fullmatch
from guided_spec.grammar.schema.prepare import prepare_schema
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.steps import StepsSpentError, limit_steps, spend, spend_on_value
from tests.masks.walks import BYTES, accepts

MOST = GrammarLimits().steps
_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "json_allowed_escapes": 'nrbtf\\"',
}


def prepare(schema: Any) -> None:
    """All that is done in Python about a schema, whichever backend gets it."""
    document = SpecDocument(GrammarSpec.json_schema(schema))
    _ = document.size
    with suppress(GrammarError):
        any_order_notes(document.examined.schema)
    with suppress(GrammarError):
        any_order_grammar(prepare_for_llguidance(document.lowered), _OPTIONS)


def levels(count: int, keyword: str, *, width: int = 2) -> dict[str, Any]:
    """Definitions, each of which lists the next one some times under ``keyword``."""
    definitions = {
        f"d{i}": {"properties": {f"p{i}": {}}, keyword: [{"$ref": f"#/$defs/d{i + 1}"}] * width}
        for i in range(count)
    }
    last = {f"d{count}": {"type": "object", "properties": {"a": {"type": "string"}}}}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, **last}}


def conditions(count: int) -> Any:
    schema: Any = {"type": "integer"}
    for level in range(count):
        schema = {
            "if": {"properties": {f"k{level}": {"not": schema}}},
            "then": schema,
            "else": {"required": [f"x{level}"]},
        }
    return schema


def negations(count: int) -> Any:
    schema: Any = {"properties": {"a": {"type": "string"}, "b": {"minimum": 3}}}
    for _ in range(count):
        schema = {
            "not": {"allOf": [schema, {"required": ["x"]}], "anyOf": [schema, {"minimum": 2}]}
        }
    return schema


def nested_contains(count: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(count):
        schema = {"type": "array", "contains": schema, "minContains": 6}
    return schema


def dependent(count: int) -> Any:
    inner = {"oneOf": [{"properties": {f"k{j}": {"type": "string"}}} for j in range(12)]}
    return {"type": "object", "dependentSchemas": {f"k{i}": inner for i in range(count)}}


_TREE = {"oneOf": [{"$ref": "#"}, {"oneOf": [{"$ref": "#"}, {"type": "integer"}]}]}
_STRINGS = [f"v{i}" for i in range(30)]
DEAR: dict[str, Any] = {
    "contains of 10**6": {"contains": {"type": "integer"}, "minContains": 10**6},
    "at most 10**6": {"contains": {"type": "integer"}, "minContains": 10**5, "maxContains": 10**6},
    "contains in contains": nested_contains(5),
    "oneOf of references": levels(9, "oneOf"),
    "unevaluated in references": {"unevaluatedProperties": False, **levels(6, "allOf", width=6)},
    "a tree of oneOf": {"properties": {f"k{i}": _TREE for i in range(3)}, "required": ["k0"]},
    "conditions": conditions(6),
    "negations": negations(7),
    "wide oneOf": {"oneOf": [{"pattern": f"a{{{i}}}"} for i in range(60)]},
    "oneOf of lists": {
        "oneOf": [{"enum": [*(f"{j}{one}" for one in _STRINGS), f"{j + 1}v0"]} for j in range(80)]
    },
    "dependent schemas": dependent(30),
    "many prefixes": {"prefixItems": [{"oneOf": [{"type": "string"}, {"maxLength": 3}]}] * 300},
    "values of patterns": {"enum": ["a" * 60 + "b"], "pattern": "^(a+)+$"},
    "keys of patterns": {
        "properties": {"a" * 60 + "b": {}},
        "patternProperties": {"^(a|a)*$": {}},
        "additionalProperties": False,
    },
    "any case": {"type": "string", "pattern": "(?i)[\\u0000-\\U0010ffff]"},
    "classes of all scripts": {
        "properties": {
            f"k{i}": {"type": "string", "pattern": f"^[^\\w{chr(0x4E00 + i)}]{{3}}\\W\\D{i}$"}
            for i in range(60)
        }
    },
    "unlike many keys": {
        "properties": {f"{i:03d}" + "k" * 90: {} for i in range(300)},
        "additionalProperties": {"type": "integer"},
    },
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", DEAR)
def test_what_runs_away_ends_at_the_limit(name: str) -> None:
    with pytest.raises(StepsSpentError), limit_steps(MOST):
        prepare(DEAR[name])


@pytest.mark.parametrize("count", [14, 60])
def test_references_that_are_joined_at_each_level_do_not_run_away(count: int) -> None:
    with limit_steps(10 * MOST):
        prepare_schema(levels(count, "anyOf"))


def test_a_count_is_seen_before_anything_is_made_of_it() -> None:
    with pytest.raises(StepsSpentError), limit_steps(10**6) as count:
        prepare({"contains": {"type": "integer"}, "minContains": 10**6})
    assert count.spent > 4 * 10**6  # at once


def test_loops_in_loops_of_a_regex_are_counted_as_they_are_written() -> None:
    pattern = "(?:" * 24 + "a" + "){2,}" * 24
    with pytest.raises(StepsSpentError), limit_steps(MOST):
        to_fullmatch(pattern)


def test_the_limit_is_reached_at_the_same_step_each_time() -> None:
    spent = []
    for _ in range(2):
        with limit_steps(10**9) as count:
            prepare(levels(4, "oneOf"))
        spent.append(count.spent)
    assert spent[0] == spent[1] > 1_000


def test_nothing_is_counted_without_a_limit() -> None:
    spend(10**12)
    spend_on_value([0] * 10**6)
    spend_on_search("^(a+)+$", "a" * 1_000)
    with limit_steps(5) as outer:
        with limit_steps(100) as inner:
            spend(50)
        spend(2)
    assert (outer.spent, inner.spent) == (2, 50)


def test_a_value_with_shared_parts_is_as_large_as_its_text() -> None:
    value: Any = "x"
    for _ in range(40):
        value = [value, value]
    with pytest.raises(StepsSpentError), limit_steps(1_000) as count:
        spend_on_value(value)
    assert count.spent <= 1_010  # it is not looked at any further


@pytest.mark.parametrize(
    ("pattern", "text", "most"),
    [
        ("^x-", "x-" + "a" * 100, 40),
        ("^[a-z_]+$", "name", 40),
        ("^(?:one|two|three)$", "three", 60),
        ("^(?:|[^m](?s:.)*|m(?:|[^u](?s:.)*|u(?:(?s:.)+)))$", "equals", 120),
    ],
)
def test_ordinary_patterns_cost_little(pattern: str, text: str, most: int) -> None:
    with limit_steps(MOST) as count:
        spend_on_search(pattern, text)
    assert 0 < count.spent <= most


@pytest.mark.parametrize("pattern", ["^(a+)+$", "(a|a)*b", "(a?)*b", "a*a*a*a*a*a*b", r"(a+)\1+b"])
def test_patterns_that_may_go_wrong_cost_much(pattern: str) -> None:
    with pytest.raises(StepsSpentError), limit_steps(MOST):
        spend_on_search(pattern, "a" * 64)


class _TooManyCallsError(Exception):
    pass


@contextmanager
def at_most_calls(most: int) -> Iterator[None]:
    """Raises _TooManyCallsError beyond so many calls of Python functions."""
    left = most

    def count(_frame: FrameType, event: str, _argument: Any) -> None:
        nonlocal left
        left -= event == "call"
        if left < 0:
            raise _TooManyCallsError

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        yield
    finally:
        sys.setprofile(before)


_LEAVES: list[Any] = [
    {"type": "string"},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 6_000},
    {"enum": ["a", "b", 1, None]},
    {"const": {"a": [1, 2]}},
    {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9},
    {"$ref": "#"},
    {"$ref": "#/$defs/d"},
    {"type": "array", "uniqueItems": True, "items": {"enum": list(range(9))}},
    {"required": ["a", "b"]},
]
_COUNTS = st.sampled_from([0, 1, 3, 50, 10**4, 10**9])


def _combined(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(inner, min_size=1, max_size=4)
    named = st.dictionaries(st.sampled_from("abcde"), inner, max_size=4)
    parts: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), several),
        **dict.fromkeys(("not", "if", "then", "else", "items", "contains"), inner),
        **dict.fromkeys(("additionalProperties", "unevaluatedProperties"), inner),
        **dict.fromkeys(("properties", "dependentSchemas"), named),
        **dict.fromkeys(("minContains", "maxContains", "minItems"), _COUNTS),
        **dict.fromkeys(("minProperties", "maxProperties"), _COUNTS),
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b+$"]), inner, max_size=2),
    }
    return st.fixed_dictionaries({}, optional=parts)


SCHEMAS = st.recursive(st.sampled_from(_LEAVES), _combined, max_leaves=12)


@example(
    schema={
        "properties": {"a": {"type": "string"}},
        "patternProperties": {"^a": {"type": "string"}},
    },
    definition={"type": "string"},
)
@given(schema=SCHEMAS, definition=SCHEMAS)
def test_no_schema_does_more_than_it_counts(schema: Any, definition: Any) -> None:
    most = 2_000
    whole = {"$defs": {"d": definition}, **(schema if isinstance(schema, dict) else {})}
    with at_most_calls(20 * most), suppress(StepsSpentError), limit_steps(most):
        prepare(json.loads(json.dumps(whole)))


def test_without_a_worker_the_limit_refuses_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    pipeline = GrammarPipeline(XGrammarBackend(BYTES), GrammarLimits(steps=5_000))
    spec = GrammarSpec.json_schema(levels(9, "oneOf"))
    with pytest.raises(GrammarCompileError, match=r"beyond the limit steps=5000, and no worker"):
        pipeline.compile(spec)
    grammar = pipeline.compile(GrammarSpec.json_schema({"type": "boolean"}))
    assert accepts(grammar, "true")


@pytest.mark.slow
def test_a_dear_schema_is_prepared_in_a_worker() -> None:
    schema = {"oneOf": [{"const": f"v{i}"} for i in range(4)]}
    pipeline = GrammarPipeline(XGrammarBackend(BYTES), GrammarLimits(steps=50))
    try:
        grammar = pipeline.compile(GrammarSpec.json_schema(schema))
        assert accepts(grammar, '"v3"')
        assert not accepts(grammar, '"v4"')
        with pytest.raises(GrammarError, match="positive spelling"):  # as helpful as it is here
            pipeline.compile(GrammarSpec.json_schema({"not": {"multipleOf": 2}}))
        warned = GrammarSpec.json_schema({"not": {"multipleOf": 2}}, unsupported="warn")
        with pytest.warns(UserWarning, match="not"):
            pipeline.compile(warned)
    finally:
        pipeline.close()
