from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from guided_spec.errors import (
    ConfigError,
    GrammarCompileError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.backends import auto
from guided_spec.grammar.backends.auto import AutoBackend, BackendChoice
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.document import SpecDocument
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.masks.walks import BYTES, accepts, walk
from tests.tiny_llm import make_llm, near_copy

INTEGER = {"type": "integer"}
SHORT = {"type": "string", "maxLength": 4}
PLAIN: dict[str, Any] = {
    "type": "object",
    "properties": {"name": SHORT, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ONLY_LLGUIDANCE: tuple[dict[str, Any], ...] = (
    {"type": "string", "pattern": "^[a-c]+$", "minLength": 2, "maxLength": 4},
    {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9},
    {
        "type": "object",
        "patternProperties": {"^a": INTEGER, "^b": {"type": "boolean"}},
    },
    {
        "allOf": [
            {"type": "string", "pattern": "^[a-f]{1,4}$"},
            {"type": "string", "pattern": "^[d-z]{1,4}$"},
        ]
    },
)
NEITHER = {"type": "number", "multipleOf": 0.1}
OPEN = {"type": "object", "properties": {"a": INTEGER}}
# What a pattern with this flag excludes is not written.
OVERLAPPING = [{"type": "string", "pattern": "(?m)a"}, {"const": "b"}, {"minLength": 3}]
REFUSED = {"type": "object", "properties": {"a": {"type": "string", "oneOf": OVERLAPPING}}}


@pytest.mark.parametrize("schema", ONLY_LLGUIDANCE, ids=str)
def test_auto_hands_on_what_xgrammar_does_not_enforce(schema: dict[str, Any]) -> None:
    spec = GrammarSpec.json_schema(schema)
    with pytest.raises(UnsupportedSchemaError):
        XGrammarBackend(BYTES).compile(spec)
    grammar = AutoBackend(BYTES).compile(spec)
    assert grammar.backend == "llguidance"
    finished = [w for w in (walk(grammar, seed) for seed in range(8)) if w.finished]
    assert finished
    for text in finished:
        jsonschema.validate(json.loads(text.data), schema)


def test_auto_keeps_to_xgrammar_where_it_can() -> None:
    backend = AutoBackend(BYTES)
    for spec in (GrammarSpec.json_schema(PLAIN), GrammarSpec.regex("a"), GrammarSpec.json_object()):
        assert backend.compile(spec).backend == "xgrammar"
    with pytest.raises(GrammarCompileError) as caught:
        backend.compile(GrammarSpec.regex("(?=a)"))
    assert "llguidance" not in str(caught.value)


def test_auto_prefers_what_rejects_less() -> None:
    """xgrammar would close the object and compile the long list slowly."""
    backend = AutoBackend(BYTES)
    large = {"enum": [str(number) for number in range(600)]}
    open_ = GrammarSpec.json_schema(OPEN, additional_properties="schema")
    for spec, text in (
        (open_, '{"a": 1, "b": null}'),
        (GrammarSpec.json_schema(large), '"599"'),
    ):
        grammar = backend.compile(spec)
        assert grammar.backend == "llguidance"
        assert accepts(grammar, text)


@pytest.mark.parametrize(
    ("spec", "taken"),
    [
        (GrammarSpec.json_schema({"type": "string", "maxLength": 128}), "xgrammar"),
        (GrammarSpec.json_schema({"type": "string", "maxLength": 129}), "llguidance"),
        (GrammarSpec.json_schema({"type": "string", "minLength": 129}), "llguidance"),
        (GrammarSpec.json_schema({"type": "string", "pattern": "^.{0,129}$"}), "llguidance"),
        (GrammarSpec.json_schema({"type": "array", "maxItems": 200}), "xgrammar"),
        (GrammarSpec.regex("[a-z]{1,32}"), "xgrammar"),
        (GrammarSpec.regex("[a-z]{1,33}"), "llguidance"),
        (GrammarSpec.regex("([a-z]+ ){,32}"), "xgrammar"),
        (GrammarSpec.regex("(a|b|c){1,500}"), "llguidance"),
        (GrammarSpec.regex("([a-z]{1,9} ){1,4}"), "llguidance"),
        (GrammarSpec.regex("([a-z]+ )*"), "xgrammar"),
        (GrammarSpec.ebnf('root ::= "a"{1,129}'), "xgrammar"),
    ],
    ids=str,
)
def test_long_counts_are_not_xgrammars(spec: GrammarSpec, taken: str) -> None:
    """Each of its rows would look at the whole vocabulary, or its compile would take seconds."""
    assert AutoBackend(BYTES).compile(spec).backend == taken


@pytest.mark.parametrize(
    ("lengths", "taken"),
    [
        ([{"maxLength": 10}], "xgrammar"),
        ([{"maxLength": 11}], "llguidance"),
        ([{"minLength": 4, "maxLength": 6}], "xgrammar"),
        ([{"minLength": 4, "maxLength": 7}], "llguidance"),
        ([{"maxLength": 10}, {"maxLength": 10}], "xgrammar"),  # compiled once
        ([{"maxLength": 10}, {"maxLength": 1}], "llguidance"),
    ],
    ids=str,
)
def test_the_larger_a_vocabulary_the_less_does_xgrammar_count(
    monkeypatch: pytest.MonkeyPatch, lengths: list[dict[str, int]], taken: str
) -> None:
    monkeypatch.setattr(auto, "_MOST_COUNTED", 10 * BYTES.vocab_size)
    strings = [{"type": "string", **length} for length in lengths]
    spec = GrammarSpec.json_schema({"type": "array", "prefixItems": strings, "items": False})
    assert AutoBackend(BYTES).compile(spec).backend == taken


def test_a_schema_that_is_large_once_written_out_is_not_xgrammars() -> None:
    """Its formats are patterns by then."""
    keys = {f"key{number}": {"type": "string", "format": "uri"} for number in range(12)}
    schema = {"type": "object", "properties": keys, "additionalProperties": False}
    for count, taken in ((2, "xgrammar"), (12, "llguidance")):
        kept = dict(list(keys.items())[:count])
        spec = GrammarSpec.json_schema({**schema, "properties": kept})
        assert AutoBackend(BYTES).compile(spec).backend == taken


def test_what_llguidance_refuses_is_narrowed() -> None:
    schema = {"type": "object", "properties": {"a": {"const": "\x01"}}}
    grammar = AutoBackend(BYTES).compile(GrammarSpec.json_schema(schema))
    assert grammar.backend == "xgrammar"
    assert accepts(grammar, '{"a": "\\u0001"}')


def test_the_same_reason_is_given_once() -> None:
    with pytest.raises(UnsupportedSchemaError) as caught:
        AutoBackend(BYTES).compile(GrammarSpec.json_schema(REFUSED))
    assert "llguidance" not in str(caught.value)


@pytest.mark.parametrize("name", ["auto", "llguidance"])
def test_unsupported_schemas_may_be_narrowed_or_loosened(name: str) -> None:
    backend = BackendChoice(name, BYTES)
    narrow = backend.compile(GrammarSpec.json_schema(REFUSED, unsupported="rewrite"))
    assert accepts(narrow, '{"a": "b"}')
    assert not accepts(narrow, '{"a": "aaa"}')
    with pytest.warns(UserWarning, match=r"/properties/a: oneOf: "):
        loose = backend.compile(GrammarSpec.json_schema(REFUSED, unsupported="warn"))
    assert accepts(loose, '{"a": "aaa"}')
    assert not accepts(loose, '{"a": 1}')
    spec = GrammarSpec.json_schema(INTEGER, unsupported="warn")
    assert not accepts(backend.compile(spec), '"a"')  # no warning: nothing is left out
    with pytest.raises(UnsupportedSchemaError):  # nothing to narrow a reference to
        backend.compile(GrammarSpec.json_schema({"$ref": "x.json"}, unsupported="rewrite"))


def test_schemas_in_tags_follow_the_same_option() -> None:
    parameters = {"type": "object", "properties": {"n": {"type": "number", "multipleOf": 0.1}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    spec = GrammarSpec.tools([tool], "required")
    with pytest.raises(UnsupportedSchemaError):
        AutoBackend(BYTES).compile(spec)
    with pytest.warns(UserWarning, match="/properties/n: multipleOf"):
        grammar = AutoBackend(BYTES).compile(replace(spec, unsupported="warn"))
    call = '<tool_call>\n{"name": "f", "arguments": {"n": 0.25}}\n</tool_call>'
    assert accepts(grammar, call)


def test_auto_gives_both_reasons() -> None:
    with pytest.raises(UnsupportedSchemaError, match=r"(?s)enum.*llguidance"):
        AutoBackend(BYTES).compile(GrammarSpec.json_schema(NEITHER))


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="grammar_backend='outlines'.*xgrammar"):
        BackendChoice("outlines", BYTES)
    with pytest.raises(ConfigError, match="grammar_backend='outlines'.*xgrammar"):
        make_llm("llama", grammar_backend="outlines")


MIXED = (
    SamplingParams(grammar=GrammarSpec.json_schema(PLAIN), max_tokens=40),
    SamplingParams(grammar=GrammarSpec.json_schema(ONLY_LLGUIDANCE[0]), max_tokens=40),
    SamplingParams(max_tokens=12),
    SamplingParams(grammar=GrammarSpec.json_schema(ONLY_LLGUIDANCE[2]), max_tokens=20),
    SamplingParams(grammar=GrammarSpec.regex("[0-9]{3}-[a-z]{4,8}"), max_tokens=40),
    SamplingParams(
        grammar=GrammarSpec.json_schema(ONLY_LLGUIDANCE[1]).after("e", reasoning_budget=6),
        max_tokens=40,
    ),
)


def texts(proposer: str, backend: str, *, batch: int, draft: Any = None) -> list[str]:
    prompts = [f"The name of cat {i}" for i in range(len(MIXED))]
    llm = make_llm("llama", proposer, draft, grammar_backend=backend, max_batch_size=batch)
    with llm:
        outputs = llm.generate(prompts, list(MIXED), on_error="return")
    assert [output.error for output in outputs] == [None] * len(MIXED)
    return [output.completions[0].text for output in outputs]


@pytest.mark.parametrize("backend", ["auto", "llguidance"])
def test_speculation_changes_nothing_in_a_mixed_batch(backend: str) -> None:
    """With ``auto`` one batch holds matchers of both backends, and a free request."""
    expected = texts("none", backend, batch=1)
    jsonschema.validate(json.loads(expected[0]), PLAIN)
    jsonschema.validate(json.loads(expected[1]), ONLY_LLGUIDANCE[0])
    draft = near_copy("llama")
    for proposer in ("ngram", "grammar_forced", "chain:grammar_forced+draft_model"):
        used = draft if "draft_model" in proposer else None
        assert texts(proposer, backend, batch=5, draft=used) == expected


def test_bounds_of_numbers_choose_no_backend() -> None:
    """They are narrower with either, which a note says."""
    spec = GrammarSpec.json_schema({"type": "number", "minimum": 0})
    assert AutoBackend(BYTES).compile(spec).backend == "xgrammar"
    (note,) = XGrammarBackend(BYTES).entries(SpecDocument(spec))
    assert (note.keyword, note.level) == ("minimum", "note")
    none_left = {"type": "object", "properties": {"a": {"minimum": 0}, "b": False}}
    with pytest.raises(UnsatisfiableGrammarError):
        AutoBackend(BYTES).compile(GrammarSpec.json_schema({**none_left, "required": ["b"]}))
