"""Texts end within their budget, whatever is drawn; and what is legal is what the rule says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.errors import BudgetTooSmallError
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion import rule_endings
from guided_spec.grammar.completion.completion import (
    CompletingGrammar,
    EndingsCache,
)
from guided_spec.grammar.completion.endings import Endings, RuleTexts
from guided_spec.grammar.completion.rule_endings import (
    NOWHERE,
    ParseState,
    ParseStates,
    RuleEndings,
)
from guided_spec.grammar.completion.rules import rules_of
from guided_spec.grammar.completion.search import SearchEndings
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.protocol import (
    CompiledGrammar,
    GrammarBackend,
    GrammarMatcher,
)
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.state import probe
from guided_spec.grammar.vocabulary import Vocabulary
from tests.grammar.completion.spelled import MARKERS, SPELLED
from tests.tiers import examples
from tests.toys import VOCABULARY as TOYS
from tests.toys import ToyCompiled, hashed_rule

LONGER = (
    b'", "|": "|abc|{"|"}|[{"|[[|]]|"]|e\n|the| cat|12|100|null|true|\xa9}|name|":[]|<f=|=a|/f>'
)
TEXTS = (*(bytes([byte]) for byte in range(256)), *LONGER.split(b"|"))
EOS = len(TEXTS)
VOCABULARY = Vocabulary((*TEXTS, b""), (EOS,), EOS + 1)

OPEN = {"type": "object", "additionalProperties": {"type": ["string", "object", "array"]}}
TREE = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "b": {"type": "array", "items": {"type": "integer"}},
        "c": {"$ref": "#"},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
DEEP = {  # one optional token costs a whole object
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "b": {
            "type": "object",
            "properties": {f"key{i}": {"type": "integer"} for i in range(12)},
            "required": [f"key{i}" for i in range(12)],
            "additionalProperties": False,
        },
    },
    "required": ["a"],
    "additionalProperties": False,
}
SHORT = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 9}, "n": {"minimum": -3}},
    "required": ["a"],
}
CALL = {"type": "object", "properties": {"q": {"type": "integer"}}, "required": ["q"]}
TAG = {
    "type": "triggered_tags",
    "triggers": ["<f="],
    "tags": [
        {
            "type": "tag",
            "begin": "<f=a>",
            "content": {"type": "json_schema", "json_schema": CALL},
            "end": "</f>",
        },
        {"type": "tag", "begin": "<f=b", "content": {"type": "any_text"}, "end": "</f>"},
    ],
}
SPECS = {
    "tree": GrammarSpec.json_schema(TREE),
    "blank": GrammarSpec.json_schema(TREE, any_whitespace=True),
    "deep": GrammarSpec.json_schema(DEEP),
    "short": GrammarSpec.json_schema(SHORT),
    "open": GrammarSpec.json_schema(OPEN),
    "any": GrammarSpec.json_object(),
    "enum": GrammarSpec.json_schema({"enum": ["a", 12, {"x": "é€"}]}),
    "regex": GrammarSpec.regex(r"[\w.]{1,64}@[a-zé-ö]+(\.[a-z]{2,5}){3,9}|.\d?\S"),
    "groups": GrammarSpec.regex("([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==)?"),
    "choice": GrammarSpec.choice(["yes", "no", "maybe é"]),
    "ebnf": GrammarSpec.ebnf(
        'root ::= a{2,5} ("x" | b)*\na ::= "q" [0-9é-ö]{3,}\nb ::= "(" b ")" | "ü\\n" | [^a-q]+\n'
    ),
    "repeats": GrammarSpec.ebnf('root ::= a{5,500} "x"{3,}\na ::= "q" [0-9] | "12"\n'),
    "tag": GrammarSpec.structural_tag({"type": "structural_tag", "format": TAG}),
}

KEYED = {"open", "any"}  # whose keys must not repeat, which rules alone do not say
ENDLESS = {"tree", "blank", "ebnf"}  # whose rules call themselves, with more to write behind

CACHE = EndingsCache(VOCABULARY)
seeds = st.integers(0, 2**32)


@cache
def compiled_of(name: str) -> CompiledGrammar:
    return XGrammarBackend(VOCABULARY).compile(SPECS[name])


def legal(matcher: GrammarMatcher, vocab_size: int) -> set[int]:
    """The tokens of the next mask row."""
    row = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    matcher.fill_next_token_bitmask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size]
    return set(np.flatnonzero(bits).tolist())


def write(
    compiled: CompiledGrammar, endings: Endings, vocabulary: Vocabulary, dice: random.Random
) -> list[int]:
    """A text of random legal tokens, checked against the rule at every one."""
    budget = endings.cost(endings.start) + dice.randrange(50)
    matcher = CompletingGrammar(compiled, endings, budget).new_matcher()
    plain = compiled.new_matcher()
    state, tokens = endings.start, list[int]()
    while not matcher.is_terminated():
        ours, all_legal = (legal(m, vocabulary.vocab_size) for m in (matcher, plain))
        assert ours, "a dead end"
        assert ours <= all_legal
        some = dice.sample(sorted(all_legal), min(8, len(all_legal)))
        check_agreement(matcher, ours, some)
        if endings.is_exact or vocabulary is TOYS:
            _check_costs(endings, state, budget - len(tokens), plain, (some, ours))
        token = dice.choice(sorted(ours))
        assert plain.accept_token(token)
        assert matcher.accept_token(token)
        assert not matcher.has_lost_end
        if token not in vocabulary.stop_token_ids:
            state = endings.after(state, (token,), probe(plain))
        tokens.append(token)
    assert len(tokens) <= budget
    assert plain.is_terminated()
    return tokens


def check_agreement(matcher: GrammarMatcher, ours: set[int], token_ids: Sequence[int]) -> None:
    """The row and ``accept_token`` say the same."""
    for token in token_ids:
        fork = matcher.fork()
        assert fork.accept_token(token) == (token in ours)


def _check_costs(
    endings: Endings,
    state: object,
    remaining: int,
    plain: GrammarMatcher,
    tokens: tuple[list[int], set[int]],
) -> None:
    """The definition, token by token."""
    some, ours = tokens
    for token in some:
        assert plain.accept_token(token)
        if not plain.is_terminated():
            then = endings.after(state, (token,), probe(plain))
            fits = then is not None and endings.cost(then) < remaining
            assert fits == (token in ours)
        plain.rollback(1)


@pytest.mark.parametrize("name", SPECS)
def test_every_text_ends_within_its_budget(name: str) -> None:
    compiled = compiled_of(name)
    endings = CACHE.of(compiled)
    assert isinstance(endings, RuleEndings) == (name not in KEYED), "the grammar is not understood"
    dice = random.Random(name)
    lengths = [len(write(compiled, endings, VOCABULARY, dice)) for _ in range(25)]
    assert len(set(lengths)) > 1


def test_no_dead_end_where_a_token_holds_an_illegal_one() -> None:
    """xgrammar's own mask lacks ``rror`` behind ``e``, by which the shortest way may go."""
    texts = (*(b"%c" % letter for letter in range(97, 123)), b"ror", b"rror", b"")
    vocabulary = Vocabulary(texts, (len(texts) - 1,), len(texts))
    compiled = XGrammarBackend(vocabulary).compile(GrammarSpec.choice(["error"]))
    endings = EndingsCache(vocabulary).of(compiled)
    for seed in range(50):
        write(compiled, endings, vocabulary, random.Random(seed))


OF_EITHER = {"regex", "groups", "choice"}  # whose rules can be read whoever compiles them


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, XGrammarBackend) for name in sorted(SPECS.keys() - KEYED)),
        *((name, LLGuidanceBackend) for name in sorted(OF_EITHER)),
    ],
)
def test_the_rules_allow_what_the_matcher_allows(
    name: str, backend: Callable[[Vocabulary], GrammarBackend]
) -> None:
    compiled, dice = backend(VOCABULARY).compile(SPECS[name]), random.Random(name)
    endings = CACHE.of(compiled)
    assert isinstance(endings, RuleEndings)
    is_tighter = False
    for _ in range(12):
        matcher, place = compiled.new_matcher(), endings.start
        for _ in range(50):
            table = endings.table(place)
            found = set(np.flatnonzero(table < np.iinfo(np.int16).max).tolist())
            assert found == legal(matcher, VOCABULARY.vocab_size)
            near, far = endings.bound(place, 1), endings.bound(place, 10**6)
            assert int(table[sorted(found)].max()) <= near <= far
            is_tighter |= near < far
            assert int(table.min()) < endings.cost(place), "the cost is attained"
            longer = sorted(token for token in found if token >= 256)
            token = dice.choice(longer if longer and dice.random() < 0.6 else sorted(found))
            assert matcher.accept_token(token)
            if matcher.is_terminated():
                break
            then = endings.after(place, (token,), probe(matcher))
            assert then is not None
            place = then
    assert is_tighter or name in OF_EITHER | {"ebnf"}, "no token writes two of their bytes"


@pytest.mark.parametrize("name", sorted(SPECS.keys() - KEYED))
def test_costs_are_the_same_however_the_tokens_are_chosen(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, chosen = compiled_of(name), random.Random(0)
    spelling, shortest = Spelling(VOCABULARY), RuleTexts(rules_of(compiled), 8)
    for _ in range(10):
        one, other = (RuleEndings(ParseStates(shortest), spelling) for _ in range(2))
        place, same = one.start, other.start
        for _ in range(30):
            monkeypatch.setattr(rule_endings, "_MANY", 0)  # by runs and by second bytes
            table = one.table(place)
            monkeypatch.setattr(rule_endings, "_MANY", VOCABULARY.vocab_size)
            assert np.array_equal(table, other.table(same))
            tokens = [t for t in np.flatnonzero(table < np.iinfo(np.int16).max) if t != EOS]
            if not tokens:
                break
            token, text = int(chosen.choice(tokens)), probe(compiled.new_matcher())
            then, too = one.after(place, (token,), text), other.after(same, (token,), text)
            assert then is not None
            assert too is not None
            place, same = then, too


@pytest.mark.parametrize("name", ["tree", "deep", "short", "regex", "ebnf"])
def test_single_bytes_lead_where_rows_lead(name: str) -> None:
    shortest = RuleTexts(rules_of(compiled_of(name)), 4)
    by_bytes, by_rows = ParseStates(shortest), ParseStates(shortest)
    chosen = random.Random(0)
    for _ in range(20):
        state, other = by_bytes.start, by_rows.start
        for _ in range(60):
            row = by_rows.rows((other.number,))[other.number]
            legal, illegal = (np.flatnonzero(kind).tolist() for kind in (row >= 0, row == NOWHERE))
            assert by_bytes.after(state, bytes([chosen.choice(illegal)])) is None
            if not legal:
                break
            byte = chosen.choice(legal)
            then, other = by_bytes.after(state, bytes([byte])), by_rows[row[byte]]
            assert then is not None
            assert (then.text, then.can_end) == (other.text, other.can_end)
            state = then


@pytest.mark.parametrize("name", sorted(SPECS.keys() - KEYED))
def test_no_token_is_too_dear_as_long_as_a_text_is_not_followed(name: str) -> None:
    compiled, dice = compiled_of(name), random.Random(name)
    endings = CACHE.of(compiled)
    assert isinstance(endings, RuleEndings)
    start = endings.start
    assert (endings.stride(start, 10**6) > 1) == (name not in ENDLESS)
    for _ in range(40):
        place: ParseState | None = start
        remaining = endings.bound(start, 1) + dice.randrange(60)
        for ahead in range(endings.stride(start, remaining)):
            assert place is not None
            assert ahead == 0 or endings.is_free(place, remaining - ahead)
            legal_tokens = np.flatnonzero(endings.table(place) < np.iinfo(np.int16).max)
            token = int(dice.choice(legal_tokens))
            if token in VOCABULARY.stop_token_ids:
                break
            place = endings.after(place, (token,), probe(compiled.new_matcher()))


def test_a_text_with_room_is_not_followed() -> None:
    compiled = compiled_of("short")
    endings = EndingsCache(VOCABULARY).of(compiled)
    matcher = CompletingGrammar(compiled, endings, 1000).new_matcher()
    size = endings.memory_size_bytes
    plain = compiled.new_matcher()
    for _ in range(20):
        token = min(legal(plain, VOCABULARY.vocab_size))
        assert matcher.accept_token(token)
        assert plain.accept_token(token)
        if plain.is_terminated():
            break
    assert endings.memory_size_bytes == size


def test_free_rows_are_the_grammar_s_own() -> None:
    compiled = compiled_of("tree")
    endings = CACHE.of(compiled)
    grammar = CompletingGrammar(compiled, endings, 1000)
    matcher, plain = grammar.new_matcher(), compiled.new_matcher()
    for byte in b'{"a": "some text", "b": [1, 2':
        assert legal(matcher, EOS + 1) == legal(plain, EOS + 1)
        assert not matcher.is_restricted
        assert matcher.accept_token(byte)
        assert plain.accept_token(byte)


def test_a_budget_below_the_shortest_text_is_refused() -> None:
    compiled = compiled_of("tree")
    endings = CACHE.of(compiled)
    least = endings.cost(endings.start)
    CompletingGrammar(compiled, endings, least)
    with pytest.raises(BudgetTooSmallError, match=f"at least {least}") as caught:
        CompletingGrammar(compiled, endings, least - 1)
    assert (caught.value.max_tokens, caught.value.least) == (least - 1, least)


def test_nearly_any_matcher_s_texts_end_within_their_budgets() -> None:
    """Those of rules that are hashes. A search takes tokens of a kind for alike; one such rule of
    fifty tells them apart, and a text may lose its end (docs/reliability.md).
    """
    lost = 0
    for seed in range(200):
        compiled = ToyCompiled(hashed_rule(seed, longest=8))
        try:
            write(compiled, SearchEndings(compiled, TOYS), TOYS, random.Random(seed))
        except AssertionError:
            lost += 1
    assert lost <= 8


@given(seeds)
@settings(max_examples=examples(20))
def test_a_search_is_never_better_than_the_shortest_text(rule: int) -> None:
    compiled = ToyCompiled(hashed_rule(rule, longest=5))
    endings = SearchEndings(compiled, TOYS)
    assert endings.cost(endings.start) >= _shortest(compiled.rule)


def _shortest(rule: Callable[[tuple[int, ...]], frozenset[int]]) -> int:
    texts: list[tuple[int, ...]] = [()]
    while True:
        if any(TOYS.stop_token_ids[0] in rule(text) for text in texts):
            return len(texts[0]) + 1
        texts = [(*text, token) for text in texts for token in rule(text)]


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize("marker", ["ab", "cab", "<s>"])
def test_a_marker_is_written_in_time(marker: str, budget: int | None) -> None:
    backend = GrammarPipeline(XGrammarBackend(SPELLED), markers=MARKERS)
    spec = GrammarSpec.regex("(a|bc){2,4}").after(marker, reasoning_budget=budget)
    compiled = backend.compile(spec)
    endings = EndingsCache(SPELLED).of(compiled)
    dice = random.Random(marker)
    for _ in range(60):
        write(compiled, endings, SPELLED, dice)


def test_the_other_backend_s_texts_end_too() -> None:
    compiled = LLGuidanceBackend(VOCABULARY).compile(SPECS["tree"])
    endings = CACHE.of(compiled)
    assert isinstance(endings, SearchEndings)
    write(compiled, endings, VOCABULARY, random.Random(5))


def test_forks_and_rollbacks_keep_the_budget() -> None:
    compiled = compiled_of("tree")
    endings = CACHE.of(compiled)
    matcher = CompletingGrammar(compiled, endings, 20).new_matcher()
    first = legal(matcher, EOS + 1)
    fork = matcher.fork()
    for token in b'{"a":':
        assert fork.accept_token(token)
    inside = legal(fork, EOS + 1)
    fork.rollback(5)
    assert legal(fork, EOS + 1) == legal(matcher, EOS + 1) == first
    for token in b'{"a":':
        assert fork.accept_token(token)
    assert legal(fork, EOS + 1) == inside
    fork.rollback(0)
    assert not all(fork.accept_token(token) for token in b' "much too long'), (
        "no way to the end is left"
    )
