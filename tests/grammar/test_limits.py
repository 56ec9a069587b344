from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import ConfigError, GrammarCompileError, GuidedSpecError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.document import SpecDocument
from guided_spec.grammar.limits import GrammarLimits, check_limits
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts

LIMITS = GrammarLimits()
TIGHT = GrammarLimits(source_bytes=500, nesting=4, repetitions=1_000, alternatives=8)
ORDINARY = GrammarSpec.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "kind": {"enum": ["a", "b"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        },
        "required": ["name"],
    }
)


def raw_schema(text: str) -> GrammarSpec:
    return GrammarSpec("json_schema", text)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def laughs(levels: int) -> dict[str, Any]:
    """Two branches at each level: 2 ** levels when the references are written out."""
    definitions: dict[str, Any] = {
        f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(levels)
    }
    definitions[f"a{levels}"] = {"type": "object"}
    return {"type": "object", "anyOf": [{"$ref": "#/$defs/a0"}] * 2, "$defs": definitions}


def deep_any_of(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"anyOf": [schema, {"type": "integer"}]}
    return schema


def many(count: int) -> dict[str, Any]:
    return {f"key{i}": {"type": "string"} for i in range(count)}


HOSTILE = {
    "repeat": GrammarSpec.regex("a{1,1000000}"),
    "repeat of repeat": GrammarSpec.regex("(a{1,1000}){1,1000}"),
    "repeat of repeat of repeat": GrammarSpec.regex("(((a{1,9999}){9999}){9999}){9999}"),
    "repeat beyond re": GrammarSpec.regex("a{99999999999999999999}"),
    "repeat of 5000 digits": GrammarSpec.regex(f"a{{{'9' * 5000}}}"),
    "stars": GrammarSpec.regex("(" * 40 + "a" + "*)" * 40),
    "backtracking": GrammarSpec.regex("(a|a|aa)*" * 20 + "b"),
    "blow-up": GrammarSpec.regex("(a|b)*a(a|b){60}"),
    "open groups": GrammarSpec.regex("(" * 100_000),
    "groups": GrammarSpec.regex("(" * 5_000 + "a" + ")" * 5_000),
    "open classes": GrammarSpec.regex("[" * 100_000),
    "wide pattern": GrammarSpec.json_schema({"type": "string", "pattern": ".{1,2000}"}),
    "json 100k deep": raw_schema("[" * 100_000),
    "json objects 100k deep": GrammarSpec.json_schema('{"a":' * 100_000 + "1" + "}" * 100_000),
    "arrays 2,000 deep": raw_schema('{"items":' * 2_000 + "{}" + "}" * 2_000),
    "arrays 100 deep": GrammarSpec.json_schema(nested(100)),
    "anyOf 100 deep": GrammarSpec.json_schema(deep_any_of(100)),
    "enum of 100k": GrammarSpec.json_schema({"enum": list(range(100_000))}),
    "choice of 100k": GrammarSpec.choice([str(i) for i in range(100_000)]),
    "10 MB": raw_schema('{"properties":{' + '"a":{"type":"string"},' * 500_000 + '"b":{}}}'),
    "2,000 properties": GrammarSpec.json_schema({"type": "object", "properties": many(2_000)}),
    "const of 1 MB": GrammarSpec.json_schema({"const": "x" * 2**20}),
    "root is itself": GrammarSpec.json_schema({"$ref": "#"}),
    "circle": raw_schema(
        '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'
    ),
    "allOf itself": GrammarSpec.json_schema({"allOf": [{"$ref": "#"}, {"type": "integer"}]}),
    "billion laughs": GrammarSpec.json_schema(laughs(40)),
    "remote": GrammarSpec.json_schema({"$ref": "http://localhost:1/schema.json"}),
    "file": GrammarSpec.json_schema({"$ref": "file:///etc/passwd"}),
    "empty enum": GrammarSpec.json_schema({"enum": []}),
    "nothing": GrammarSpec.json_schema({"type": "integer", "minimum": 2, "maximum": 1}),
    "NUL": GrammarSpec.regex("a\0b"),
    "NUL in a key": GrammarSpec.json_schema({"type": "object", "properties": {"\0": {}}}),
    "surrogate": GrammarSpec.regex("\ud800"),
    "surrogate in a key": raw_schema('{"type":"object","properties":{"\ud800":{}}}'),
    "escaped surrogate": raw_schema(r'{"enum":["\ud800"]}'),
    "integer of 5,000 digits": raw_schema(f'{{"type":"integer","maximum":{"9" * 5000}}}'),
    "1e999": raw_schema('{"type":"number","maximum":1e999}'),
    "count beyond 64 bits": GrammarSpec.json_schema({"type": "string", "maxLength": 2**70}),
    "duplicate keys": raw_schema('{"type":"string","type":"integer","type":"nothing"}'),
    "bounded object": GrammarSpec.json_schema(
        {"type": "object", "properties": many(40), "minProperties": 3, "maxProperties": 20}
    ),
    "ebnf endless": GrammarSpec.ebnf("root ::= root"),
    "ebnf groups": GrammarSpec.ebnf("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "ebnf ambiguous": GrammarSpec.ebnf('root ::= root root | "a" | ""'),
    "lark recursive": GrammarSpec.lark('start: start start | "a"'),
    "tag deep": GrammarSpec("structural_tag", '{"a":' * 5_000 + "1" + "}" * 5_000),
}


@pytest.fixture(name="backend", scope="module")
def _backend() -> Iterator[GrammarPipeline]:
    limits = GrammarLimits(compile_seconds=2.0, compile_bytes=2**30)
    backend = GrammarPipeline(XGrammarBackend(BYTES, compile_threads=1), limits)
    yield backend
    backend.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_is_compiled_or_refused(backend: GrammarPipeline, name: str) -> None:
    outcome: CompiledGrammar | GuidedSpecError
    try:
        outcome = backend.compile(HOSTILE[name])
    except GuidedSpecError as error:
        outcome = error
    if isinstance(outcome, GuidedSpecError):
        assert 0 < len(str(outcome)) < 3_000
    else:
        assert outcome.new_matcher()
    assert accepts(backend.compile(ORDINARY), '{"name": "x", "kind": "b"}')


@pytest.mark.parametrize(
    ("spec", "limit", "found", "place"),
    [
        (GrammarSpec.regex("x" * 501), "source_bytes=500", "501", ""),
        (GrammarSpec.regex("é" * 300), "source_bytes=500", "600", ""),
        (GrammarSpec.regex("((((()))))"), "nesting=4", "5", ""),
        (GrammarSpec.json_schema(nested(4)), "nesting=4", "5", "/items/items/items/items"),
        (raw_schema("[" * 200 + "]" * 200), "nesting=4", "200", "/0/0"),
        (GrammarSpec.regex("a{1001}"), "repetitions=1000", "1001", ""),
        (GrammarSpec.regex("(a{30}b){2,40}"), "repetitions=1000", "1200", ""),
        (GrammarSpec.regex(r"(\(a{,30}b){40,}"), "repetitions=1000", "1200", ""),
        (GrammarSpec.ebnf('root ::= "(" [a-z]{2000}'), "repetitions=1000", "2000", ""),
        (
            GrammarSpec.json_schema({"properties": {"a/b": {"maxLength": 2000}}}),
            "repetitions=1000",
            "2000",
            "/properties/a~1b/maxLength",
        ),
        (
            GrammarSpec.json_schema({"properties": {"enum": {"pattern": "a{2000}"}}}),
            "repetitions=1000",
            "2000",
            "/properties/enum/pattern",
        ),
        (
            GrammarSpec.json_schema({"patternProperties": {"a{2000}": {}}}),
            "repetitions=1000",
            "2000",
            "/patternProperties/a{2000}",
        ),
        (GrammarSpec.json_schema({"enum": [*range(9)]}), "alternatives=8", "9", "/enum"),
        (GrammarSpec.choice([*"abcdefghi"]), "alternatives=8", "9", "/"),
        (GrammarSpec.regex("|" * 8), "alternatives=8", "9", ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_errors_name_limit_value_and_place(
    spec: GrammarSpec, limit: str, found: str, place: str
) -> None:
    with pytest.raises(GrammarCompileError) as caught:
        check_limits(SpecDocument(spec), TIGHT)
    where = f" at {place}" if place else ""
    assert f"{limit}: {found}{where}" in str(caught.value)
    assert "; " in str(caught.value)


@pytest.mark.parametrize(
    "spec",
    [
        GrammarSpec.regex(r"a\{2000\}[{2000}][]{2000}]"),
        GrammarSpec.regex(r"\(" * 20 + r"[()|]"),
        GrammarSpec.ebnf('root ::= "((((((" "{2000}" "|||||||||"'),
        GrammarSpec.json_schema({"const": {"maxLength": 2000}}),
        GrammarSpec.json_schema({"properties": {"maxLength": {"const": 2000}}}),
        GrammarSpec.json_schema({"maxLength": True, "minItems": 2.5}),
        GrammarSpec.json_object(),
        raw_schema("{broken"),
        raw_schema("3"),
    ],
    ids=str,
)
def test_what_only_looks_like_a_count_passes(spec: GrammarSpec) -> None:
    check_limits(SpecDocument(spec), TIGHT)


def test_real_sizes_are_within_the_defaults() -> None:
    for schema in (
        {"type": "string", "maxLength": 2**31 - 1},
        {"type": "string", "maxLength": 10_000},
        {"enum": [f"value {i}" for i in range(5_000)]},
        {"type": "object", "properties": many(2_000)},
        nested(100),
    ):
        check_limits(SpecDocument(GrammarSpec.json_schema(schema)), LIMITS)


@pytest.mark.parametrize(
    ("spec", "large"),
    [
        (ORDINARY, False),
        (GrammarSpec.json_object(), False),
        (GrammarSpec.choice(["yes", "no"]), False),
        (GrammarSpec.regex(r"\d{4}-\d{2}-\d{2}"), False),
        (GrammarSpec.json_schema(laughs(3)), False),
        (GrammarSpec.json_schema(laughs(12)), True),
        (GrammarSpec.json_schema({"maxLength": 257}), True),
        (GrammarSpec.json_schema({"const": {"maxLength": 257}}), True),  # a $ref may lead there
        (GrammarSpec.json_schema({"a": [{"maxLength": 200}, {"maxLength": 200}]}), False),
        (GrammarSpec.json_schema({"a": [{"maxLength": 200}, {"maxLength": 100}]}), True),
        (GrammarSpec.json_schema({"pattern": "a{257}"}), True),
        (GrammarSpec.regex("." * 257), True),
        (GrammarSpec.regex("([ab].){129}"), True),
        (GrammarSpec.json_schema({"properties": many(600)}), True),
        (HOSTILE["bounded object"], True),
        (GrammarSpec.json_schema({"const": "x" * 20_000}), True),
        (raw_schema("[" * 10_000), True),
    ],
    ids=lambda value: str(value)[:40],
)
def test_large_at_sight(spec: GrammarSpec, large: bool) -> None:  # noqa: FBT001
    assert SpecDocument(spec).is_large is large


@given(st.text("ab\\()[]{}|,09.^\"'\n", max_size=60))
def test_any_text_can_be_measured(text: str) -> None:
    for spec in (GrammarSpec.regex(text), GrammarSpec.ebnf(text), raw_schema(text)):
        size = SpecDocument(spec).size
        assert 0 <= size.nesting.value <= len(text)
        assert size.alternatives.value <= len(text) + 1


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["maxLength", "enum", "anyOf", "properties", "pattern", "$ref"]),
                inner,
                max_size=3,
            )
        ),
    )
)
def test_any_json_can_be_measured(value: object) -> None:
    assert SpecDocument(raw_schema(json.dumps(value))).size


def test_the_check_is_quick() -> None:
    """Orders of magnitude: 30 us and some milliseconds are what is expected."""

    def seconds(spec: GrammarSpec) -> float:
        times = []
        for _ in range(20):
            start = time.perf_counter()
            assert SpecDocument(spec).size
            times.append(time.perf_counter() - start)
        return min(times)

    assert seconds(ORDINARY) < 0.002
    assert seconds(GrammarSpec.regex("(" * 4_000)) < 0.2


def test_limits_are_positive() -> None:
    for options in ({"nesting": 0}, {"compile_seconds": -1.0}):
        with pytest.raises(ConfigError, match="positive"):
            GrammarLimits(**options)
    with pytest.raises(ConfigError, match="alternatives=True: must be an int"):
        GrammarLimits(alternatives=True)
