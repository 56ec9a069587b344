"""A table held against the matchers that it stands for, in every state and along random texts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion.endings import UnreadableGrammarError
from guided_spec.grammar.completion.rules import rules_of
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.limits import NoTableError, TableLimits
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher, legal_row
from guided_spec.grammar.rows import ids_of
from guided_spec.grammar.tables.automaton import Clock
from guided_spec.grammar.tables.table import build_table, without_tokens
from guided_spec.grammar.tables.token_table import ENDED, REFUSED, TokenTable
from guided_spec.grammar.unique_keys import UniqueKeysGrammar

__all__ = [
    "Difference",
    "Walked",
    "compare_steps",
    "proven_table",
    "tabled_part",
    "walk_both",
]

_LONGEST_WALK = 400  # tokens, then another text begins
_MOST_LACKING = 1024  # tokens that a matcher lacks: more are another language


class Difference(NamedTuple):
    """Where a table and a matcher disagree.

    token_ids: the text. more: tokens that the table alone allows behind it. fewer: that the
    matcher alone allows.
    """

    token_ids: tuple[int, ...]
    more: tuple[int, ...]
    fewer: tuple[int, ...]


class _Way(NamedTuple):
    """A text that leads to a state: the one of another state, and a token. depth: of it, tokens."""

    state: int
    before: int
    token_id: int
    depth: int


def tabled_part(compiled: CompiledGrammar) -> CompiledGrammar:
    """What a table can stand for: of a grammar whose keys are unique, the one inside."""
    return compiled.inner if isinstance(compiled, UniqueKeysGrammar) else compiled


def proven_table(compiled: CompiledGrammar, spelling: Spelling, limits: TableLimits) -> TokenTable:
    """The table of a compiled grammar; in each of its states a matcher has been asked.

    A mask may lack tokens that the rules allow: xgrammar 0.2.8 has no ``rror`` behind the ``e`` of
    ``error`` where there is a token ``ror``. The matcher is what counts: the table lacks them, too.

    Raises NoTableError where its rules are not known, where the table is beyond the limits, and
    where the matcher allows what the rules do not.
    """
    clock = Clock(limits.seconds)
    try:
        rules = rules_of(compiled)
    except UnreadableGrammarError as error:
        raise NoTableError(str(error)) from error
    table = build_table(rules, spelling, limits, clock)
    lacking = dict[int, list[int]]()
    for text, state, matcher in _every_state(table, compiled):
        clock.look()
        more, fewer = _differ(table, state, matcher) or ((), ())
        for token_id in more:
            lacking.setdefault(token_id, []).append(state)
        if fewer or len(lacking) > _MOST_LACKING:
            raise NoTableError(f"its matcher differs behind the tokens {list(text)}")
    return without_tokens(table, lacking, limits, clock) if lacking else table


def compare_steps(table: TokenTable, compiled: CompiledGrammar) -> Difference | None:
    """Compare the rows of every state, and behind one token of each class that is legal there.

    A state is reached by a shortest text. So each entry of the table is looked at, with what is
    legal behind it.
    """
    _, first = np.unique(table.classes, return_index=True)
    for text, state, matcher in _every_state(table, compiled):
        found = _differ(table, state, matcher)
        if found is not None:
            return Difference(text, *found)
        for token_class in np.flatnonzero(table.then[state] != REFUSED).tolist():
            then, token_id = int(table.then[state, token_class]), int(first[token_class])
            if not matcher.accept_token(token_id) or matcher.is_terminated() != (then == ENDED):
                return Difference(text, (token_id,), ())
            found = _differ(table, then, matcher) if then >= 0 else None
            matcher.rollback(1)
            if found is not None:
                return Difference((*text, token_id), *found)
    return None


class Walked(NamedTuple):
    """Random texts: how many tokens and texts, in how many states, and where they disagree."""

    steps: int
    texts: int
    states: int
    difference: Difference | None


def walk_both(table: TokenTable, compiled: CompiledGrammar, steps: int, seed: int) -> Walked:
    """Compare every row along random texts of ``steps`` tokens in all, up to the first difference.

    In each state a class of tokens is drawn, and a token of it: so the rare ones come as often as
    the thousands that a string may hold. Texts that leave the table, and long ones, are given up.
    """
    dice = random.Random(seed)
    members = _members(table)
    legal = [np.flatnonzero(then != REFUSED).tolist() for then in table.then]
    seen: set[int] = set()
    taken, texts = 0, 0
    while taken < steps:
        matcher, state, text = compiled.new_matcher(), 0, list[int]()
        texts += 1
        while state >= 0 and len(text) < _LONGEST_WALK and taken < steps:
            seen.add(state)
            found = _differ(table, state, matcher)
            if found is not None:
                return Walked(taken, texts, len(seen), Difference(tuple(text), *found))
            token_id = int(dice.choice(members[dice.choice(legal[state])]))
            state = table.after(state, token_id)
            taken += 1
            if not matcher.accept_token(token_id) or matcher.is_terminated() != (state == ENDED):
                return Walked(taken, texts, len(seen), Difference(tuple(text), (token_id,), ()))
            text.append(token_id)
    return Walked(taken, texts, len(seen), None)


def _differ(
    table: TokenTable, state: int, matcher: GrammarMatcher
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Tokens that the table alone allows, and that the matcher alone allows; None if none."""
    theirs, ours = legal_row(matcher, len(table.classes)), table.row(state)
    if np.array_equal(theirs, ours):
        return None
    return tuple(ids_of(ours & ~theirs)), tuple(ids_of(theirs & ~ours))


def _members(table: TokenTable) -> list[NDArray[np.int64]]:
    """By class, its tokens."""
    order = np.argsort(table.classes, kind="stable")
    ends = np.searchsorted(table.classes[order], np.arange(1, table.then.shape[1]))
    return np.split(order, ends)


def _ways(table: TokenTable) -> list[_Way]:
    """A way to each state, by the fewest tokens."""
    _, first = np.unique(table.classes, return_index=True)
    ways = {0: _Way(0, -1, -1, 0)}
    waiting = [0]
    for state in waiting:
        thens, at = np.unique(table.then[state], return_index=True)
        for then, token_class in zip(thens.tolist(), at.tolist(), strict=True):
            if then >= 0 and then not in ways:
                ways[then] = _Way(then, state, int(first[token_class]), ways[state].depth + 1)
                waiting.append(then)
    return [ways[state] for state in waiting]


def _every_state(
    table: TokenTable, compiled: CompiledGrammar
) -> Iterator[tuple[tuple[int, ...], int, GrammarMatcher]]:
    """A text that leads to each state, and one matcher that stands behind it.

    Raises NoTableError where the matcher does not go there.
    """
    after: dict[int, list[_Way]] = {}
    for way in _ways(table):
        after.setdefault(way.before, []).append(way)
    matcher, text = compiled.new_matcher(), list[int]()
    waiting = after.get(-1, []).copy()
    while waiting:
        way = waiting.pop()
        if way.depth:
            matcher.rollback(len(text) - way.depth + 1)
            text[way.depth - 1 :] = [way.token_id]
            if not matcher.accept_token(way.token_id):
                raise NoTableError(f"its matcher refuses the last of the tokens {text}")
        yield tuple(text), way.state, matcher
        waiting.extend(after.get(way.state, ()))
