"""Where ends are searched for: what a row near the end of a budget holds does end in time."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from guided_spec.grammar.backends.llguidance import LLGuidanceBackend, LLGuidanceMatcher
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion import search
from guided_spec.grammar.completion.completion import CompletingGrammar
from guided_spec.grammar.completion.search import Scan, SearchEndings, SearchTokens
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.state import probe
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.ops.mask_words import first_tokens, spread_tokens
from tests.grammar.completion.test_completion import check_agreement, legal

LONGER = rb'", "|": "|abc|{"|"}|[{"|]]|"]|\n|\u|\"|\\|00|12| cat|null|name|e1|-|.|\",|"",|'
TEXTS = (*(bytes([byte]) for byte in range(256)), *filter(None, LONGER.split(b"|")))
EOS = len(TEXTS)
VOCABULARY = Vocabulary((*TEXTS, b""), (EOS,), EOS + 1)
BACKEND = LLGuidanceBackend(VOCABULARY)
SPELLING, TOKENS = Spelling(VOCABULARY), SearchTokens(VOCABULARY)

STRING = {"type": "string"}
SCHEMAS: dict[str, Any] = {
    "open": {"type": "object", "properties": {"name": STRING}, "required": ["name"]},
    "closed": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": STRING}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    "branch": {
        "type": "object",
        "properties": {"name": STRING, "null": {"type": "boolean"}},
        "required": ["null"],
        "additionalProperties": False,
    },
    "keys": {"type": "object", "additionalProperties": {"type": ["integer", "object"]}},
    "string": {"type": "string", "minLength": 3, "maxLength": 9},
    "pattern": {"type": "string", "pattern": '^"[a-z ]{2,9}$'},
    "end": {"type": "string", "pattern": "^(.*x|)$"},
    "number": {"type": "number"},
    "counted": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 40}, "a": {"type": "number"}},
        "required": ["name", "a"],
        "additionalProperties": False,
    },
    "nested": {"type": "array", "items": {"type": "array", "items": STRING, "minItems": 1}},
    "format": {"type": "array", "items": {"type": "string", "format": "date-time"}, "minItems": 2},
}
CASES = [*((name, "schema") for name in SCHEMAS), ("keys", "any")]


def compiled_of(name: str, order: str = "schema") -> CompiledGrammar:
    spec = GrammarSpec.json_schema(SCHEMAS[name])
    return BACKEND.compile(replace(spec, key_order=order))  # type: ignore[arg-type]


def endings_of(compiled: CompiledGrammar) -> SearchEndings:
    return SearchEndings(compiled, VOCABULARY, SPELLING, TOKENS)


@pytest.mark.parametrize(
    "text", ['{"name": 0, "', '{"name": 0, "n', '{"name": 0, "cat": {}, "na', '{"a": 0, "']
)
def test_a_key_is_free_but_for_those_that_are_there(text: str) -> None:
    """Of words for a key a few are tested, and those that may repeat one; the others are alike."""
    compiled = compiled_of("keys")
    endings = endings_of(compiled)
    matcher = CompletingGrammar(compiled, endings, len(text) + 30).new_matcher()
    plain = compiled.new_matcher()
    for byte in text.encode():
        assert matcher.accept_token(byte)
        assert plain.accept_token(byte)
    assert legal(matcher, EOS + 1) == legal(plain, EOS + 1)
    assert len(text) not in matcher.steered


@pytest.mark.parametrize(("name", "order"), CASES)
def test_texts_end_in_time_and_rows_agree_with_the_matcher(name: str, order: str) -> None:
    compiled = compiled_of(name, order)
    endings = endings_of(compiled)
    dice = random.Random(name)
    for slack in (0, 1, 4, 12, 40):
        budget = endings.cost(endings.start) + slack
        matcher = CompletingGrammar(compiled, endings, budget).new_matcher()
        plain = compiled.new_matcher()
        length = 0
        while not matcher.is_terminated():
            ours, all_legal = legal(matcher, EOS + 1), legal(plain, EOS + 1)
            assert ours, "a dead end"
            assert ours <= all_legal
            check_agreement(matcher, ours, dice.sample(sorted(all_legal), min(9, len(all_legal))))
            token = dice.choice(sorted(ours))
            assert matcher.accept_token(token)
            assert plain.accept_token(token)
            assert not matcher.has_lost_end
            length += 1
        assert length <= budget


def test_rows_inside_a_string_cost_one_mask_and_few_questions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However near the end is: what was found at its first letter holds for the others."""
    fill, takes = LLGuidanceMatcher.fill_next_token_bitmask, LLGuidanceMatcher.takes
    asked = Counter[str]()

    def counted_fill(matcher: LLGuidanceMatcher, bitmask: Any, index: int = 0) -> bool:
        asked["fill"] += 1
        return fill(matcher, bitmask, index)

    def counted_takes(matcher: LLGuidanceMatcher, token_ids: Any) -> bool:
        asked["takes"] += 1
        return takes(matcher, token_ids)

    monkeypatch.setattr(LLGuidanceMatcher, "fill_next_token_bitmask", counted_fill)
    monkeypatch.setattr(LLGuidanceMatcher, "takes", counted_takes)
    compiled = compiled_of("closed")
    matcher = CompletingGrammar(compiled, endings_of(compiled), 60).new_matcher()
    text = b'{"a": true, "b": ["'
    for byte in text:
        legal(matcher, EOS + 1)
        assert matcher.accept_token(byte)
    legal(matcher, EOS + 1)
    asked.clear()
    for _ in range(len(text), 55):
        assert EOS not in legal(matcher, EOS + 1)
        assert matcher.accept_token(ord("x"))
    assert asked["fill"] == 55 - len(text)
    assert asked["takes"] <= 3 * (55 - len(text))


REQUIRED: dict[str, dict[str, Any]] = {
    "one": {"properties": {"name": STRING}, "required": ["name"]},
    "two": {"properties": {"a": STRING, "b": {"type": "boolean"}}, "required": ["a", "b"]},
    "typed": {
        "properties": {"a": STRING, "name": {"type": "integer"}},
        "required": ["a", "name"],
        "additionalProperties": {"type": "boolean"},
    },
}


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("backend", [BACKEND, XGrammarBackend(VOCABULARY)])
def test_in_any_order_open_objects_end_with_what_they_must_have(
    name: str, backend: GrammarBackend
) -> None:
    """Such as ``{"x": 0, "name": ""}``: no search byte by byte finds a key that may come late."""
    schema = {"type": "object", **REQUIRED[name]}
    spec = GrammarSpec.json_schema(schema, key_order="any", additional_properties="schema")
    compiled = backend.compile(spec)
    endings = endings_of(compiled)
    least = endings.cost(endings.start)
    assert least <= len(b'{"a": "", "name": 0}') + 1
    dice = random.Random(name)
    for slack in (0, 1, 4, 12, 40):
        matcher = CompletingGrammar(compiled, endings, least + slack).new_matcher()
        text: list[int] = []
        while not matcher.is_terminated():
            text.append(dice.choice(sorted(legal(matcher, EOS + 1))))
            assert matcher.accept_token(text[-1])
            assert not matcher.has_lost_end
        assert len(text) <= least + slack
        written = json.loads(VOCABULARY.decode(text[:-1]))
        assert written.keys() >= set(schema["required"])


def test_a_token_that_begins_two_ways_goes_on_with_the_shorter_one() -> None:
    """The token ``null``, which is looked at later, shows what may follow ``n``."""
    compiled = compiled_of("branch")
    endings = endings_of(compiled)
    assert endings.start is not None
    assert endings.start.text == b'{"name": "", "null": false}'
    matcher = CompletingGrammar(compiled, endings, endings.cost(endings.start)).new_matcher()
    for text in (b'{"', b"n"):
        token = TEXTS.index(text)
        assert token in legal(matcher, EOS + 1)
        assert matcher.accept_token(token)
        assert not matcher.has_lost_end
    assert legal(matcher, EOS + 1) == {ord("u")}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "order"), CASES)
def test_most_of_what_fits_is_in_the_row(name: str, order: str) -> None:
    """Judged by a search of its own from behind each token."""
    compiled = compiled_of(name, order)
    endings = endings_of(compiled)
    budget = endings.cost(endings.start) + 12
    matcher = CompletingGrammar(compiled, endings, budget).new_matcher()
    plain, dice, text = compiled.new_matcher(), random.Random(name), list[int]()
    in_row = missing = 0
    for _ in range(6):
        ours = legal(matcher, EOS + 1)
        for token in legal(plain, EOS + 1) - {EOS}:
            fork = plain.fork()
            assert fork.accept_token(token)
            state = endings.start
            assert state is not None
            way = endings.after(state, (*text, token), probe(fork))
            fits = way is not None and endings.cost(way) < budget - len(text)
            in_row += fits and token in ours
            missing += fits and token not in ours
        options = sorted(ours - {EOS})
        if not options:
            break
        token = dice.choice(options)
        assert matcher.accept_token(token)
        assert plain.accept_token(token)
        text.append(token)
    assert missing <= in_row / 10


def test_a_fork_and_its_original_look_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_of("open")
    endings = endings_of(compiled)
    looks: list[bytes] = []
    find = SearchEndings._find

    def counted(self: SearchEndings, matcher: Any, before: bytes, most: int) -> bytes | None:
        looks.append(before)
        return find(self, matcher, before, most)

    monkeypatch.setattr(SearchEndings, "_find", counted)
    original = CompletingGrammar(compiled, endings, 30).new_matcher()
    fork = original.fork()
    text = b'{"name": "abc", "k": [1, {"x": null'
    for token in text:
        legal(fork, EOS + 1)
        assert fork.accept_token(token) or len(looks) > 0
    count = len(looks)
    assert count > 0
    for token in text:
        if not original.accept_token(token):
            break
    assert len(looks) == count


@pytest.mark.parametrize("seed", range(4))
def test_where_a_limited_string_ends_rows_are_those_of_a_full_look(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its last tokens leaves fewer legal ones; that alone is no reason to look again."""
    compiled, looks = compiled_of("counted"), list[int]()
    look = Scan.look

    def counted(scan: Scan, text: Any) -> None:
        looks.append(0)
        look(scan, text)

    monkeypatch.setattr(Scan, "look", counted)
    matcher, looking = (
        CompletingGrammar(compiled, endings_of(compiled), 70).new_matcher() for _ in range(2)
    )
    dice, before = random.Random(seed), b'{"name": "'
    text = before + bytes(dice.choice(b"abcdefgh") for _ in range(39))
    for at, byte in enumerate(text):
        count = len(looks)
        own = legal(matcher, EOS + 1)
        with monkeypatch.context() as patched:
            patched.setattr(Scan, "narrowed", lambda *_: None)
            assert own == legal(looking, EOS + 1)
        if at > len(before) + 20:
            assert len(looks) - count <= 1  # the other one's
        assert matcher.accept_token(byte)
        assert looking.accept_token(byte)
    assert len(looks) > 9


def test_what_one_search_finds_serves_the_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """After many tokens the same way fits, which a row may not search for after each of them."""
    compiled, rows = compiled_of("string"), list[set[int]]()
    for trials in (1, 99):
        monkeypatch.setattr(search, "_TRIALS", trials)
        endings = endings_of(compiled)
        budget = endings.cost(endings.start) + 12
        matcher = CompletingGrammar(compiled, endings, budget).new_matcher()
        assert matcher.accept_token(ord('"'))
        rows.append(legal(matcher, EOS + 1))
    assert len(rows[0] & rows[1]) > 0.8 * len(rows[1])


def test_steps_that_close_come_first_and_worn_ones_last() -> None:
    every = np.full(-(-(EOS + 1) // 32), -1, dtype=np.int32)
    used = np.zeros(len(TOKENS.steps), dtype=np.int64)
    first = [TEXTS[TOKENS.steps[step]] for step in TOKENS.next_steps(every, used, 6)]
    assert first == [b'"', b"}", b"]", b":", b",", b"0"]
    used[list(b"0")] = 1
    assert TEXTS[TOKENS.steps[TOKENS.next_steps(every, used, 6)[-1]]] == b"1"


def test_tokens_of_a_row() -> None:
    row = np.zeros(9, dtype=np.int32)
    row[[0, 3, 8]] = [0b1010, -1, -(2**31)]
    assert first_tokens(row, 4) == [1, 3, 96, 97]
    assert first_tokens(row, 99) == [1, 3, *range(96, 128), 287]
    assert set(spread_tokens(row, 4)) <= set(first_tokens(row, 99))
    assert 287 in spread_tokens(row, 4)
    assert spread_tokens(np.zeros(3, dtype=np.int32), 8) == []
