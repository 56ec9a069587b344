"""Counts of runs against counting by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.proposers.suffix import CountedText, Match, SuffixCounts

Texts = list[list[int]]
texts = st.lists(st.lists(st.integers(0, 2), max_size=14), max_size=6)
depths = st.sampled_from([1, 3, 8])
Runs = Counter[tuple[int, ...]]


def runs_of(text: Sequence[int], longest: int) -> Runs:
    """Every run of up to ``longest`` + 1 tokens, and how often it stands in the text."""
    ends = range(len(text) + 1)
    return Counter(tuple(text[s:e]) for e in ends for s in range(max(0, e - longest - 1), e))


def all_runs(texts: Texts, longest: int) -> Runs:
    return sum((runs_of(text, longest) for text in texts), Runs())


def count(counts: SuffixCounts, texts: Texts) -> list[CountedText]:
    counted = []
    for text in texts:
        counted.append(CountedText())
        counts.append(counted[-1], text)
    return counted


def count_of(counts: SuffixCounts, run: Sequence[int]) -> int:
    """How often a run stands in the texts."""
    node = counts._root
    for depth, token in enumerate(run):
        if node.followers is None:
            rest = [*run[depth:]]
            return int(node.text[node.at : node.at + len(rest)] == rest)
        if token not in node.followers:
            return 0
        node = node.followers[token]
    return node.count


def check(counts: SuffixCounts, expected: Runs, asked: Runs) -> None:
    for run in asked | Runs([(0,), (1, 2), (2, 2, 2)]):
        assert count_of(counts, run) == expected[run]


def slow_find(expected: Runs, tail: Sequence[int], longest: int) -> tuple[int, Runs]:
    """The longest end of ``tail`` that goes on, and what followed it."""
    for length in range(min(longest, len(tail)), 0, -1):
        end = tuple(tail[-length:])
        after = {r[-1:]: n for r, n in expected.items() if len(r) == length + 1 and r[:-1] == end}
        if after:
            return length, Runs(after)
    return 0, Runs()


def check_match(match: Match | None, length: int, after: Runs) -> None:
    if match is None:
        assert length == 0
        return
    token_ids, share = match.followers()
    order = sorted(after, key=lambda run: (-after[run], run))
    assert match.length == length
    assert token_ids == [token for (token,) in order]
    assert share == pytest.approx(after[order[0]] / after.total())


@given(depths, texts)
def test_runs_are_counted(longest: int, texts: Texts) -> None:
    counts = SuffixCounts(longest)
    count(counts, texts)
    expected = all_runs(texts, longest)
    check(counts, expected, expected)


@given(depths, st.lists(st.lists(st.integers(0, 1), max_size=4), max_size=8))
def test_a_text_grows_as_if_it_came_at_once(longest: int, pieces: Texts) -> None:
    counts, text = SuffixCounts(longest), CountedText()
    count(counts, pieces[:1])
    for at, piece in enumerate(pieces):
        counts.append(text, piece)
        grown = [token for part in pieces[: at + 1] for token in part]
        expected = all_runs([*pieces[:1], grown], longest)
        check(counts, expected, expected)


@given(depths, texts, st.data())
def test_a_removed_text_was_never_there(longest: int, texts: Texts, data: st.DataObject) -> None:
    counts = SuffixCounts(longest)
    counted = count(counts, texts)
    gone = data.draw(st.sets(st.integers(0, len(texts) - 1))) if texts else set()
    for at in gone:
        counts.remove(counted[at])
    left = [text for at, text in enumerate(texts) if at not in gone]
    check(counts, all_runs(left, longest), all_runs(texts, longest))
    more = [[0, 1, 2, 0], [2, 2]]
    count(counts, more)
    check(counts, all_runs(left + more, longest), all_runs(texts + more, longest))


@given(depths, texts, st.lists(st.integers(0, 2), max_size=12))
def test_the_longest_match_and_what_followed_it(
    longest: int, texts: Texts, tail: list[int]
) -> None:
    counts = SuffixCounts(longest)
    count(counts, texts)
    check_match(counts.find(tail), *slow_find(all_runs(texts, longest), tail, longest))


@given(depths, texts, st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_a_followed_match_is_one_that_is_found(longest: int, texts: Texts, tail: list[int]) -> None:
    """It may be longer than those that are searched, where a run stands in the texts once."""
    counts = SuffixCounts(longest)
    count(counts, texts)
    expected = all_runs(texts, longest)
    match = counts.find(tail[:1])
    for end in range(2, len(tail) + 1):
        if match is None:
            match = counts.find(tail[:end])
            continue
        match = counts.extend(match, tail[:end])
        length, after = slow_find(expected, tail[:end], longest)
        if match is not None and match.length > longest:
            assert length == longest
            assert match.followers().share == 1.0
            assert any(_goes_on(text, tail[end - match.length : end], match) for text in texts)
        else:
            check_match(match, length, after)


def _goes_on(text: Sequence[int], run: list[int], match: Match) -> bool:
    (token,) = match.followers().token_ids
    longer, width = [*run, token], len(run) + 1
    return any([*text[s : s + width]] == longer for s in range(len(text)))


def test_removed_texts_are_not_kept() -> None:
    """Nor by the nodes that they have in common with others."""
    counts = SuffixCounts()
    first, second = count(counts, [[0, 1, 2] * 9, [0, 1, 2] * 9])
    counts.remove(first)
    left = [counts._root]
    while left:
        node = left.pop()
        assert node.text is not first.tokens
        left += (node.followers or {}).values()
    counts.remove(second)
    assert not counts._root.followers
