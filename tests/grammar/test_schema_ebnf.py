"""A schema's grammar as text says what the schema says, in whatever letters."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.ebnf import schema_ebnf
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts, walk

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


MEMBERS = st.sampled_from(
    [r"a", r"\x41-Z", r"\n", r"\]", r"\-", r"\ud000", r"\uD7FF-\uD900", r"\uDBFF-\uE000", "한-힣"]
    + [r"\ud800-\uffff", r"\uDFFF", r"\U0000E000-\U0010FFFF", r"\x00-\uD7FE", "-"]
)


@given(st.booleans(), st.lists(MEMBERS, min_size=1, max_size=4))
def test_a_class_that_begins_with_surrogates_leads_to_no_empty_row(
    is_negated: bool,  # noqa: FBT001
    members: list[str],
) -> None:
    members = [one for one in members if one != "-"] + [one for one in members if one == "-"][:1]
    written = f"[{'^' * is_negated}{''.join(members)}]"
    held = re.compile(re.sub(r"\\U(.{8})", lambda code: chr(int(code[1], 16)), written))
    letters = [*"aAZn\n]-\x00b", "\ud7ff", "한", "\ue000", "\uffff", "😀", "é"]
    try:
        compiled = BACKEND.compile(GrammarSpec.ebnf(f"root ::= {written}"))
    except GrammarCompileError:
        assert not any(map(held.fullmatch, letters))
        return
    for seed in range(8):
        assert held.fullmatch(walk(compiled, seed).data.decode())
    for letter in letters[:8] + letters[9:]:
        assert accepts(compiled, letter) == bool(held.fullmatch(letter)), letter


def test_a_class_of_surrogates_alone_is_refused() -> None:
    for source in (
        r'root ::= "a" [\uD800-\uDFFF] | "b"',
        r"root ::= [^\x00-\uD7FF\uE000-\U0010FFFF]",
    ):
        with pytest.raises(GrammarCompileError, match="holds no character that UTF-8 encodes"):
            BACKEND.compile(GrammarSpec.ebnf(source))
