"""Grammars as text for vLLM: the same texts and masks as from this package's own backend."""

from __future__ import annotations

import importlib
import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from guided_spec.errors import GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.document import SpecDocument
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec, KeyOrder
from guided_spec.grammar.text.markers import Markers
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.vllm.backend import VllmGrammars
from guided_spec.integrations.vllm.grammars import HandingBackend, written
from guided_spec.integrations.vllm.plugin import installed_version
from tests.integrations.vllm.fake import MODEL, Grammars

OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "é": {"enum": ["x", 'q"']}, "c": {"type": "string"}},
    "required": ["a"],
}
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<f>",
        "content": {"type": "json_schema", "json_schema": OBJECT},
        "end": "</f>",
    },
}
CASES = {
    "schema": (GrammarSpec.json_schema(OBJECT), '{"a": 12, "é": "q\\"", "c": "hé"}'),
    "whitespace": (GrammarSpec.json_schema(OBJECT, any_whitespace=True), '{ "a":3,\n"c": ""}'),
    "any order": (GrammarSpec.json_schema(OBJECT, key_order="any"), '{"c": "z", "a": -1}'),
    "object": (GrammarSpec.json_object(), '{"x": [1, null, {"y": true}]}'),
    "regex": (GrammarSpec.regex(r'(\d{2,4}|["\\é]+)-\w'), '"\\é-x'),
    "choice": (GrammarSpec.choice(["a", 'b"\n', "é\\"]), 'b"\n'),
    "ebnf": (GrammarSpec.ebnf('root ::= "a" root? | [root] # root\n'), "aar"),
    "ebnf, root": (GrammarSpec.ebnf('top ::= "root" next\nnext ::= "1"', root="top"), "root1"),
    "lark": (GrammarSpec.lark('start: "a" | /b+/ "c"'), "bbc"),
    "tag": (GrammarSpec.structural_tag(TAG), '<f>{"a": 1}</f>'),
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(MODEL))


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


@pytest.fixture(scope="module")
def backend(tokenizer: Any, vocabulary: Vocabulary) -> HandingBackend:
    grammars: Any = Grammars()
    return HandingBackend(grammars, vocabulary, Markers.from_tokenizer(vocabulary, tokenizer))


def rows(grammar: CompiledGrammar, token_ids: list[int], vocab_size: int) -> list[bytes]:
    """The mask before each token, and behind the last."""
    matcher = grammar.new_matcher()
    row = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    found = []
    for token_id in [*token_ids, None]:
        row[:] = -1
        matcher.fill_next_token_bitmask(row, 0)
        found.append(row.tobytes())
        if token_id is not None:
            assert matcher.accept_token(token_id)
    return found


@pytest.mark.parametrize("name", CASES)
def test_masks_are_those_of_the_own_backend(
    name: str, tokenizer: Any, vocabulary: Vocabulary, backend: HandingBackend
) -> None:
    spec, text = CASES[name]
    token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    own, handed = XGrammarBackend(vocabulary).compile(spec), backend.compile(spec)
    size = vocabulary.vocab_size
    assert rows(handed, token_ids, size) == rows(own, token_ids, size)
    assert handed.text.kind == ("structural_tag" if spec.kind == "structural_tag" else "grammar")


def test_keys_stand_once(tokenizer: Any, backend: HandingBackend) -> None:
    """vLLM's masks let a key of an open object come again; the text then fails here."""
    twice = tokenizer('{"b": 1, "b": 2}', add_special_tokens=False)["input_ids"]
    handed = backend.compile(GrammarSpec.json_schema(OPEN))
    matcher = handed.new_matcher()
    assert not all(matcher.accept_token(token_id) for token_id in twice)
    kept = handed.ending_with(frozenset({3, 5}))
    assert kept.text is handed.text
    assert {3, 5}.isdisjoint(kept.excluded)
    assert handed.ending_with(frozenset()) is handed


def test_behind_a_marker(tokenizer: Any, backend: HandingBackend) -> None:
    token_ids = tokenizer('well {"a": 1} END{"a": 1}', add_special_tokens=False)["input_ids"]
    for spec in (GrammarSpec.json_schema(OBJECT), GrammarSpec.structural_tag(OBJECT_TAG)):
        matcher = backend.compile(spec.after("END")).new_matcher()
        assert all(matcher.accept_token(token_id) for token_id in token_ids)
        assert matcher.accept_token(tokenizer.eos_token_id)
        early = backend.compile(spec.after("END")).new_matcher()
        assert not early.accept_token(tokenizer.eos_token_id)


OBJECT_TAG = {
    "type": "structural_tag",
    "format": {"type": "json_schema", "json_schema": OBJECT},
}


def test_what_is_refused(backend: HandingBackend) -> None:
    unique = {"type": "array", "uniqueItems": True}
    with pytest.raises(UnsupportedSchemaError, match="uniqueItems"):
        backend.compile(GrammarSpec.json_schema(unique))
    narrow = GrammarSpec.json_schema(unique, unsupported="rewrite")
    assert backend.compile(narrow).text.kind == "grammar"
    for broken in (GrammarSpec.ebnf("root ::= ("), GrammarSpec.regex("(")):
        with pytest.raises(GrammarCompileError):
            backend.compile(broken)


def test_the_text_is_what_vllm_reads_as_ebnf() -> None:
    for spec, _ in CASES.values():
        found = written(SpecDocument(spec))
        if found.kind == "grammar":
            assert "::=" in found.source
            assert found.spec == GrammarSpec.ebnf(found.source)
        else:
            assert json.loads(found.source)["type"] == "structural_tag"
            assert found.spec.kind == "structural_tag"


@pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed")
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_whitespace_has_an_end() -> None:
    """vLLM's own grammar for a schema lets a text be blanks up to ``max_tokens``; ours does not."""
    parts: Any = importlib.import_module("tests.integrations.vllm.parts")
    grammars = VllmGrammars(parts.make_config())
    asked = GrammarSpec.json_schema(OBJECT)
    (blank,) = parts.tokenizer().encode(" ", add_special_tokens=False)
    (brace,) = parts.tokenizer().encode("{", add_special_tokens=False)
    plain = grammars.compile(replace(asked, any_whitespace=True)).new_matcher()
    own = grammars.compile(written(SpecDocument(asked)).spec).new_matcher()
    assert plain.accept_token(brace)
    assert own.accept_token(brace)
    assert all(plain.accept_token(blank) for _ in range(100))
    assert not own.accept_token(blank)


@pytest.mark.parametrize("key_order", ["schema", "any"])
def test_what_a_worker_has_written_is_the_same_text(
    backend: HandingBackend, key_order: KeyOrder
) -> None:
    specs = [
        GrammarSpec.json_schema(OBJECT, key_order=key_order),
        GrammarSpec.json_schema(OBJECT).after("cab"),
        GrammarSpec.regex("a{2,4}b"),
    ]
    for spec in specs:
        alone = replace(spec, start=None)
        recipe = XGrammarBackend(backend.vocabulary).compile(alone).recipe()
        assert recipe is not None
        again = backend.rebuild(spec, pickle.loads(pickle.dumps(recipe)))
        assert again is not None
        assert again.text == backend.compile(spec).text
    tag = GrammarSpec.structural_tag(TAG)
    recipe = XGrammarBackend(backend.vocabulary).compile(tag).recipe()
    assert recipe is not None
    assert backend.rebuild(tag, recipe) is None  # it needs the document
