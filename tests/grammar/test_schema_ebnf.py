"""A schema's grammar as text says what the schema says, in whatever letters."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from guided_spec.grammar.backends.ebnf import schema_ebnf
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts

BACKEND = XGrammarBackend(BYTES, compile_threads=1)
WORDS = st.text('ae1F\\x"\xa0éÿ\u0101\u2028中😀', max_size=4)


@given(WORDS, WORDS)
def test_words_are_read_as_they_were_written(key: str, word: str) -> None:
    schema = {
        "type": "object",
        "properties": {key: {"enum": [word]}},
        "required": [key],
        "additionalProperties": False,
    }
    text = json.dumps({key: word}, ensure_ascii=False)
    printed = BACKEND.compile(GrammarSpec.ebnf(schema_ebnf(schema, any_whitespace=False)))
    assert accepts(printed, text)
    assert accepts(BACKEND.compile(GrammarSpec.json_schema(schema)), text)
