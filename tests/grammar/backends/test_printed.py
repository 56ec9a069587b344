"""Grammars inside JSON strings: the values are the texts of the grammar, no more, no fewer."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest
import xgrammar

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.backends.printed import json_text_ebnf, set_ranges, unescape
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts, walk

BACKEND = XGrammarBackend(BYTES, compile_threads=1)
PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: "*** Update File: " /(.+)/ LF change+
change: ("@@" | "@@ " /(.+)/) LF | ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
LARKS = {
    "patch": PATCH,
    "quotes": r"""start: "\"" (/[^"]/ | "\\" /./)* "\"" """,
    "classes": r"""start: /[\]\-^\\"a-c\t]+/ (/[^\x00-\x7f]/ | /\s/ | /\W/)""",
    "sum": 'start: term (OP term)*\nterm: NUMBER | "(" start ")"\nOP: "+" | "*"\n'
    '%import common.INT -> NUMBER\n%ignore " "\n',
    "counted": r"""start: LETTERS "é😀" LETTERS
LETTERS: /["\n]{2,3}x?/""",
    "long": r"""start: /[^a]{2,200}/ "a" """,
}
HEAD = '*** Begin Patch\n*** Update File: a b"c.py\n'
TEXTS = {
    f'{HEAD}@@ def "x"\n-a\tb\\n\n+é\n*** End Patch\n': True,
    f"{HEAD}+\n*** End Patch": True,
    f"{HEAD}+\n*** End Patch\n\n": False,
    f"{HEAD}a\n*** End Patch": False,
    f"{HEAD}*** End Patch": False,
}
PATTERNS = (r'(?:[^"]|\\")*', r"\w+\s?[\x01-\x08]*", r'"{1,3}\\?', r"(?:a|\n)+\t*", r".*,", "")


def spelled(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


@cache
def plain_and_json(name: str) -> tuple[CompiledGrammar, CompiledGrammar]:
    if name in LARKS:
        plain, inside = GrammarSpec.lark(LARKS[name]), json_text_ebnf({"grammar": LARKS[name]})
    else:
        plain, inside = GrammarSpec.regex(name), json_text_ebnf({"pattern": name})
    return BACKEND.compile(plain), BACKEND.compile(GrammarSpec.ebnf(inside))


@pytest.mark.parametrize("name", [*(one for one in LARKS if one != "patch"), *PATTERNS])
@pytest.mark.every_case
def test_the_values_are_the_grammar_s_texts(name: str) -> None:
    plain, inside = plain_and_json(name)
    num_texts = 0
    for seed in range(40):
        found = walk(plain, seed, wander=seed)
        if found.finished and "\0" not in found.text:
            num_texts += 1
            assert accepts(inside, spelled(found.text)), found.text
        found = walk(inside, seed, wander=seed)
        if found.finished and "\0" not in found.text:
            num_texts += 1
            assert accepts(plain, json.loads(f'"{found.text}"')), found.text
    assert num_texts >= 10


def test_a_patch_with_quotes() -> None:
    plain, inside = plain_and_json("patch")
    for text, is_taken in TEXTS.items():
        assert accepts(plain, text) == is_taken, text
        assert accepts(inside, spelled(text)) == is_taken, text


def test_each_character_has_one_spelling() -> None:
    (_, inside) = plain_and_json(PATTERNS[0])
    for text in ("\\u0061", "\\/", "\\u000a", "\n", "\x00"):
        assert not accepts(inside, text), text
    assert accepts(inside, 'a\\n\\\\\\"\\u0001\x7f\U0001f600')


def test_what_is_printed_is_read() -> None:
    printed = str(xgrammar.Grammar.from_lark(LARKS["classes"]))
    ((first,),) = (re.findall(r"\[((?:[^\]\\]|\\.)*)\]", printed)[:1],)
    assert set_ranges(first)
    assert unescape(r"\x41\u00e9\U0001f600\n\"\\?") == 'A\xe9\U0001f600\n"\\?'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"grammar": "start: missing"}, "the lark grammar does not compile: .*missing"),
        ({"grammar": "start: /a(?=b){2,3}/"}, "lark"),
        ({"grammar": "start: /[^\\x01-\U0010ffff]/"}, "holds no character"),
        ({"pattern": "(?=a)"}, "lookahead"),
        ({"pattern": 3}, "must have a pattern or a grammar"),
    ],
)
def test_what_cannot_be_written_is_refused(content: Any, reason: str) -> None:
    with pytest.raises(GrammarCompileError, match=reason):
        json_text_ebnf(content)
