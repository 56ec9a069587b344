"""Near the end of a budget, tokens of llguidance's JSON are judged without being tried: rightly."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from guided_spec.grammar.completion_search import SearchEndings, Way
from guided_spec.grammar.completion_tokens import SearchTokens
from guided_spec.grammar.llguidance import LLGuidanceBackend, LLGuidanceGrammar
from guided_spec.grammar.llguidance_matcher import LLGuidanceMatcher
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary

if importlib.util.find_spec("llguidance") is None:
    pytest.skip("llguidance is not installed", allow_module_level=True)

LONGER = rb'", "|": "|abc|{"|"}|[{"|]]|"]|\n|\u|\"|\\|00|12| cat|null|name|e1|-|.|\",|"",|'
TEXTS = (*(bytes([byte]) for byte in range(256)), *filter(None, LONGER.split(b"|")))
EOS = len(TEXTS)
VOCABULARY = Vocabulary((*TEXTS, b""), (EOS,), EOS + 1)
BACKEND = LLGuidanceBackend(VOCABULARY)
TOKENS = SearchTokens(VOCABULARY)

STRING = {"type": "string"}
SCHEMAS: dict[str, Any] = {
    "open": {"type": "object", "properties": {"name": STRING}, "required": ["name"]},
    "closed": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": STRING}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "keys": {"type": "object", "additionalProperties": {"type": ["integer", "object"]}},
    "string": {"type": "string", "minLength": 3, "maxLength": 9},
    "pattern": {"type": "string", "pattern": '^"[a-z ]{2,9}$'},
    "number": {"type": "number"},
    "nested": {"type": "array", "items": {"type": "array", "items": STRING, "minItems": 1}},
}


def compiled_of(name: str, order: str = "schema") -> LLGuidanceGrammar:
    spec = GrammarSpec.json_schema(SCHEMAS[name])
    return BACKEND.compile(replace(spec, key_order=order))  # type: ignore[arg-type]


def legal(row: np.ndarray[Any, Any]) -> set[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: EOS + 1]).tolist())


def ends(matcher: LLGuidanceMatcher, tokens: Way) -> bool:
    """Whether these tokens complete the text; the matcher stays."""
    fork = matcher.fork()
    return all(fork.accept_token(token) for token in tokens) and fork.is_terminated()


def check_rows(
    quick: SearchEndings, slow: SearchEndings, seed: int, start: LLGuidanceMatcher
) -> int:
    """Compares the rows of both along one text; returns how many were judged without a trial."""
    dice, state, matcher = random.Random(seed), quick.start, start
    judged = 0
    for _ in range(28):
        remaining = quick.cost(state) + dice.choice([0, 1, 3, 9])
        tried = legal(slow.row(state, remaining, matcher))
        found = legal(quick.row(state, remaining, matcher))
        keeps_way = quick._ways_kept(state, matcher)
        for token in found - {EOS}:
            fork = matcher.fork()
            assert fork.accept_token(token), TEXTS[token]
            way = quick.after(state, token, fork)
            assert way is not None
            assert quick.cost(way) < remaining
            assert ends(fork, way), (TEXTS[token], way)
            judged += keeps_way is not None and keeps_way(token)
        assert found <= tried
        # Those that are left out were not looked at: none of them is plain and keeps the way.
        left_out = tried - found
        assert keeps_way is None or not any(map(keeps_way, left_out))
        options = sorted(found - {EOS})
        if not options:
            break
        token = dice.choice(options)
        assert matcher.accept_token(token)
        behind = quick.after(state, token, matcher)
        assert behind is not None
        state = behind
    return judged


@pytest.mark.parametrize(("name", "order"), [*((n, "schema") for n in SCHEMAS), ("keys", "any")])
def test_judged_tokens_do_end_in_time(name: str, order: str) -> None:
    compiled = compiled_of(name, order)
    quick = SearchEndings(compiled, VOCABULARY, TOKENS)
    slow = SearchEndings(replace(compiled, writes_json=False), VOCABULARY, TOKENS)
    judged = [check_rows(quick, slow, seed, compiled.new_matcher()) for seed in range(3)]
    assert sum(judged) > 0 or name == "number"


def test_nothing_is_judged_behind_a_backslash() -> None:
    """What closes the text there is part of the string once the backslash has its letter."""
    compiled = compiled_of("nested")
    endings = SearchEndings(compiled, VOCABULARY, TOKENS)
    matcher = compiled.new_matcher()
    for byte in b'[["a\\':
        assert matcher.accept_token(byte)
    way = (*b'"x, "]]', EOS)
    assert endings._ways_kept(way, matcher) is None
    matcher.rollback(1)
    assert endings._ways_kept((*b'"]]', EOS), matcher) is not None


def test_the_order_is_that_of_a_search_for_the_end() -> None:
    every = np.ones(EOS + 1, dtype=np.bool_)
    every[EOS] = False
    assert TEXTS[TOKENS.first(every, 1)[0]].startswith(b'"')
    few = np.zeros(EOS + 1, dtype=np.bool_)
    few[list(b"a0{ }")] = True
    few[TEXTS.index(b"abc")] = True
    assert [TEXTS[token] for token in TOKENS.first(few, 9)] == [
        b"}",
        b"0",
        b"abc",
        b"a",
        b"{",
        b" ",
    ]
    assert TOKENS.first(few, 2) == TOKENS.first(few, 9)[:2]
