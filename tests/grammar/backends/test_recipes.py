"""A grammar that was compiled elsewhere is compiled again from what is handed over."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from guided_spec.grammar.backends.auto import AutoBackend, BackendChoice
from guided_spec.grammar.protocol import CompiledGrammar, legal_row
from guided_spec.grammar.recipe import Recipe, RecipeGrammar
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES

OBJECT = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}},
    "required": ["a"],
}
OPEN = {**OBJECT, "additionalProperties": {"type": "boolean"}}
TAG = {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ">"}
TEXT = b'{"a": "x", "b": 3}'
SPECS: dict[str, tuple[GrammarSpec, bytes]] = {
    "object": (GrammarSpec.json_schema(OBJECT), TEXT),
    "whitespace": (GrammarSpec.json_schema(OBJECT, any_whitespace=True), TEXT),
    "any order": (GrammarSpec.json_schema(OBJECT, key_order="any"), b'{"b": 3, "a": "x"}'),
    "open": (GrammarSpec.json_schema(OPEN), b'{"a": "x", "c": true}'),
    "lengths": (GrammarSpec.json_schema({"type": "string", "maxLength": 200}), b'"abc"'),
    "left out": (
        GrammarSpec.json_schema({"not": {"multipleOf": 2}}, unsupported="warn"),
        b"[1, 1]",
    ),
    "unique items": (GrammarSpec.json_schema({"type": "array", "uniqueItems": True}), b"[1, 2]"),
    "regex": (GrammarSpec.regex("a{2,40}b"), b"aab"),
    "choice": (GrammarSpec.choice(["yes", "no"]), b"yes"),
    "ebnf": (GrammarSpec.ebnf('top ::= "a" top | "b"', root="top"), b"aab"),
    "tag": (
        GrammarSpec.structural_tag({"type": "structural_tag", "format": TAG}),
        b"<ab>",
    ),
    "any object": (GrammarSpec.json_object(), b'{"a": 1}'),
}


def rows(grammar: CompiledGrammar, text: bytes) -> list[Any]:
    """The masks along a text of one-byte tokens."""
    matcher, found = grammar.new_matcher(), []
    for byte in text:
        found.append(legal_row(matcher, BYTES.vocab_size).copy())
        assert matcher.accept_token(int(BYTES.single_byte_ids[byte]))
    return [*found, legal_row(matcher, BYTES.vocab_size).copy()]


@pytest.mark.every_case
@pytest.mark.filterwarnings("ignore:the text may break")
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("backend", ["auto", "xgrammar", "llguidance"])
def test_what_is_built_again_has_the_same_masks(name: str, backend: str) -> None:
    spec, text = SPECS[name]
    if backend == "llguidance" and name in ("ebnf", "tag"):
        pytest.skip("languages of xgrammar alone")
    choice = BackendChoice(backend, BYTES)
    compiled = choice.compile(spec)
    assert isinstance(compiled, RecipeGrammar)
    recipe: Recipe = pickle.loads(pickle.dumps(compiled.recipe()))
    again = choice.rebuild(spec, recipe)
    assert again is not None
    assert type(again) is type(compiled)
    for one, other in zip(rows(compiled, text), rows(again, text), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (again.new_style_matcher() is None) == (compiled.new_style_matcher() is None)
    assert getattr(again, "notes", ()) == getattr(compiled, "notes", ())


def test_a_recipe_names_the_backend_that_wrote_it() -> None:
    large = GrammarSpec.json_schema({"enum": [str(number) for number in range(600)]})
    compiled = AutoBackend(BYTES).compile(large)
    recipe = compiled.recipe()
    assert recipe is not None
    assert recipe.backend == "llguidance"
