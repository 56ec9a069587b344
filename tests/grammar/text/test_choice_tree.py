"""The tree of token paths: all of them, each once, and no more than decides the text."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import ConfigError
from guided_spec.grammar.text.choice_tree import MOST_NODES, ChoiceTree
from guided_spec.grammar.vocabulary import Vocabulary
from tests.toys import Rule, ToyTarget, text_rule

TOKENS = (b"a", b"b", b"ab", b"ba", b"a", b"bb", b"aab", b"", b"", b"", b"", b"")  # "a" twice
STOPS = (10, 11)
VOCABULARY = Vocabulary(TOKENS, STOPS, len(TOKENS))
TARGET = ToyTarget(seed=7, scale=1.5)


def in_order(text: bytes) -> list[int]:
    """One token a byte."""
    return [TOKENS.index(bytes([byte])) for byte in text]


def walk(rule: Rule, path: tuple[int, ...] = ()) -> dict[bytes, float]:
    """What every text gets when each token is drawn from the legal ones; by walking all paths."""
    legal = sorted(rule(path))
    logits = TARGET.logits(path).double()
    found: dict[bytes, float] = {}
    for token, share in zip(legal, torch.softmax(logits[legal], 0).tolist(), strict=True):
        if token in STOPS:
            ends = {b"".join(TOKENS[one] for one in path): 1.0}
        else:
            ends = walk(rule, (*path, token))
        for text, value in ends.items():
            found[text] = found.get(text, 0.0) + share * value
    return found


def with_both_stops(texts: Sequence[bytes]) -> Rule:
    rule = text_rule(texts, VOCABULARY)
    return lambda path: rule(path) | (set(STOPS) if STOPS[0] in rule(path) else set())


def probabilities(tree: ChoiceTree) -> list[float]:
    """Asks the target about the rows of the tree, as the engine does."""
    scores = {}
    for row in tree.rows():
        for at in row.nodes:
            node = tree.nodes[at]
            assert row.token_ids[: len(node.path)] == node.path
            logits = TARGET.logits(node.path).double()[[b.token_id for b in node.branches]]
            assert at not in scores, "asked twice"
            scores[at] = torch.log_softmax(logits, 0).tolist()
    return [math.exp(value) for value in tree.logprobs(scores)]


TEXTS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4, unique=True)


@given(TEXTS)
def test_all_paths_are_what_sampling_takes(texts: list[str]) -> None:
    found = probabilities(ChoiceTree.of(texts, VOCABULARY))
    expected = walk(with_both_stops([text.encode() for text in texts]))
    assert found == pytest.approx([expected[text.encode()] for text in texts], abs=1e-12)
    assert sum(found) == pytest.approx(1.0, abs=1e-12)


@given(TEXTS)
def test_one_way_is_what_sampling_takes_among_one_way_each(texts: list[str]) -> None:
    ways = {tuple(in_order(text.encode())) for text in texts}

    def rule(path: tuple[int, ...]) -> frozenset[int]:
        legal = {way[len(path)] for way in ways if way[: len(path)] == path and way != path}
        return frozenset(legal | (set(STOPS) if path in ways else set()))

    found = probabilities(ChoiceTree.of(texts, VOCABULARY, in_order))
    expected = walk(rule)
    assert found == pytest.approx([expected[text.encode()] for text in texts], abs=1e-12)


def test_paths_end_where_the_text_is_decided() -> None:
    tree = ChoiceTree.of(["a" + "b" * 500, "b" * 500], VOCABULARY)
    assert [node.path for node in tree.nodes] == [()]
    assert tree.rows() == [((), (0,))]
    assert ChoiceTree.of(["ab"], VOCABULARY).rows() == []
    assert ChoiceTree.of(["ab"], VOCABULARY).logprobs({}) == [0.0]


def test_a_long_common_beginning_has_too_many_spellings_but_one_of_the_tokenizer() -> None:
    texts = ["ab" * 40 + end for end in "ab"]
    with pytest.raises(ConfigError, match=rf"more than {MOST_NODES} .*pass paths=\"canonical\""):
        ChoiceTree.of(texts, VOCABULARY)
    tree = ChoiceTree.of(texts, VOCABULARY, in_order)
    (row,) = tree.rows()
    assert len(row.token_ids) == 80
    assert len(row.nodes) == 1  # all before it are forced


def test_tokens_behind_which_the_text_has_no_end_are_not_taken() -> None:
    vocabulary = Vocabulary((b"a", b"ab", b"bc", b"c", b""), (4,), 5)
    tree = ChoiceTree.of(["abc", "c"], vocabulary)
    legal = [branch.token_id for branch in tree.nodes[0].branches]
    assert sorted(legal) == [0, 1, 3]
    with pytest.raises(ConfigError, match="tokens cannot write it"):
        ChoiceTree.of(["ab", "b"], vocabulary)
