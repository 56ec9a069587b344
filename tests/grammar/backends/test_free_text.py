"""Free text that leaves some strings out, as rules: compared with looking for them."""

from __future__ import annotations

import itertools
import random

import pytest

from guided_spec.grammar.backends.free_text import text_without
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts

BACKEND = XGrammarBackend(BYTES, compile_threads=1)
EXCLUDED: list[list[str]] = [
    [],
    ["a"],
    ["aa"],
    ["aab"],
    ["abab", "ba"],
    ["ab", "b\n", "é"],
    ["abé", "bé\na", "aaa"],
    ["a", "ab"],
    ["]^-\\", '"'],
]


@pytest.mark.every_case
@pytest.mark.parametrize("excluded", EXCLUDED, ids=str)
def test_all_short_texts(excluded: list[str]) -> None:
    compiled = BACKEND.compile(GrammarSpec.ebnf(text_without(excluded)))
    letters = sorted({letter for text in excluded for letter in text} | {"a", "x"})[:5]
    texts = ["".join(text) for n in range(5) for text in itertools.product(letters, repeat=n)]
    dice = random.Random(1)
    for text in [*dice.sample(texts, min(len(texts), 150)), *excluded, "\U0001f600\x00"]:
        assert accepts(compiled, text) == (not any(one in text for one in excluded)), text
