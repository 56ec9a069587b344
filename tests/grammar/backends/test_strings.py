"""Strings that are counted, or have a pattern, hold each character that the schema lets them."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.cli.verdict import report_schema
from guided_spec.errors import UnsupportedSchemaError
from guided_spec.grammar.backends.auto import AutoBackend
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.document import DocumentBackend, SpecDocument
from guided_spec.grammar.schema.lowered import narrowing
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts
from tests.tiers import examples

BACKENDS: dict[str, DocumentBackend[Any]] = {
    "xgrammar": XGrammarBackend(BYTES),
    "llguidance": LLGuidanceBackend(BYTES),
}
CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
ALL = ['"', "\\", "\n", "\r", "\t", "\b", "\f", "/", "a", "é", "\u2028", "😀", "\x7f"]
PARTS = [
    "a",
    ".",
    "[^a]",
    "[^x]",
    '"',
    r"\\",
    r"\n",
    r"\s",
    r"\S",
    r"\W",
    r"[\x00-z]",
    "(?:a|[^b])",
]
COUNTS = ["", "*", "+", "?", "{0,3}", "{2}"]
PATTERNS = st.lists(
    st.tuples(st.sampled_from(PARTS), st.sampled_from(COUNTS)).map("".join), min_size=1, max_size=3
).map(lambda parts: f"^{''.join(parts)}\\Z")
LENGTHS = st.fixed_dictionaries(
    {}, optional={"minLength": st.integers(0, 2), "maxLength": st.integers(2, 4)}
)
STRINGS = LENGTHS.map(lambda words: {"type": "string", **words}) | PATTERNS.map(
    lambda pattern: {"type": "string", "pattern": pattern}
)
TEXTS = st.text(st.sampled_from([*ALL, "\0", "\x1f", "\x0b", "b", "x"]), max_size=5)


@pytest.mark.every_case
@pytest.mark.parametrize("char", ALL, ids=ascii)
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("words", [{"maxLength": 30}, {"minLength": 2}, {"pattern": r"^a[^x]*\Z"}])
def test_each_character_is_admitted(backend: str, words: dict[str, Any], char: str) -> None:
    chosen = AutoBackend(BYTES) if backend == "auto" else BACKENDS[backend]
    compiled: Any = chosen.compile(GrammarSpec.json_schema({"type": "string", **words}))
    spelled = json.dumps(f"a{char}b", ensure_ascii=False)
    is_noted = compiled.backend == "llguidance" and CONTROL.search(char)
    assert accepts(compiled, spelled) != bool(is_noted)


@settings(max_examples=examples(100))
@given(st.sampled_from([*BACKENDS]), STRINGS, st.lists(TEXTS, min_size=1, max_size=20))
def test_what_is_valid_is_admitted_or_noted(
    name: str, schema: dict[str, Any], texts: list[str]
) -> None:
    backend, validator = BACKENDS[name], jsonschema.Draft202012Validator(schema)
    spec = GrammarSpec.json_schema(schema)
    try:
        compiled = backend.compile(spec)
    except UnsupportedSchemaError:
        return
    notes = [entry.keyword for entry in narrowing(backend.entries(SpecDocument(spec)))]
    for text in texts:
        is_valid = validator.is_valid(text)
        admitted = accepts(compiled, json.dumps(text, ensure_ascii=False))
        assert is_valid or not admitted
        if is_valid and not admitted and not re.search(r"[\x1c-\x1f\u2028]", text):
            assert notes  # of \s, those are beyond ASCII's
            assert CONTROL.search(text) or "pattern" in notes


def test_texts_hold_no_raw_control_characters() -> None:
    for backend in BACKENDS.values():
        compiled = backend.compile(GrammarSpec.json_schema({"type": "string", "maxLength": 9}))
        assert not any(accepts(compiled, f'"{chr(code)}"') for code in range(0x20))
        assert not accepts(compiled, '"""')
        assert not accepts(compiled, '"\\"')


def test_counts_are_of_characters_not_of_escapes() -> None:
    for backend in BACKENDS.values():
        compiled = backend.compile(GrammarSpec.json_schema({"type": "string", "maxLength": 2}))
        assert accepts(compiled, json.dumps('"\\'))
        assert not accepts(compiled, json.dumps('"\\\n'))


def test_keys_of_patterns_have_a_note() -> None:
    schema = {"type": "object", "patternProperties": {"^a.*$": {}}, "additionalProperties": False}
    spec = GrammarSpec.json_schema(schema)
    notes = BACKENDS["xgrammar"].entries(SpecDocument(spec))
    assert ("patternProperties", "note") in [(entry.keyword, entry.level) for entry in notes]
    plain = {**schema, "patternProperties": {"^a[a-z]*$": {}}}
    assert not BACKENDS["xgrammar"].entries(SpecDocument(GrammarSpec.json_schema(plain)))


def test_the_log_and_check_have_the_notes(caplog: pytest.LogCaptureFixture) -> None:
    spec = GrammarSpec.json_schema({"type": "string", "pattern": "a"})
    with caplog.at_level(logging.INFO, "guided_spec"):
        BACKENDS["xgrammar"].compile(spec)
    assert "JSON schema: /: pattern: it covers the whole string" in caplog.text
    report = report_schema(spec, None, "llguidance")
    assert [(entry["keyword"], entry["level"]) for entry in report["findings"]] == [
        ("type", "note")
    ]
    listed = report_schema(GrammarSpec.json_schema({"enum": ["a", "b"]}), None, "llguidance")
    assert listed["findings"] == []
