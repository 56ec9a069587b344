"""Trees beside a draft: every place has its own row, and the forks end where they should."""

from __future__ import annotations

import numpy as np
import torch

from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.mask_words import num_mask_words
from tests.toys import CPU, EOS, VOCAB_SIZE, VOCABULARY, ToyCompiled, hashed_rule, text_rule

DEPTHS = 20


def legal(row: object) -> set[int]:
    words = torch.from_numpy(np.array(row)).view(1, -1)
    return set(unpack_bitmask(words, VOCAB_SIZE)[0].nonzero().flatten().tolist())


def begin(*compiled: ToyCompiled | None) -> tuple[Lookahead, list[Constraint | None]]:
    constraints = [None if one is None else Constraint(one) for one in compiled]
    rows = MaskRows(len(compiled), DEPTHS, VOCAB_SIZE, CPU)
    rows.clear()
    return Lookahead.fork(constraints, rows, [8] * len(compiled)), constraints


def first(rule: object, prefix: tuple[int, ...], skip: int = 0) -> int:
    found: list[int] = sorted(rule(prefix) - {EOS})  # type: ignore[operator]
    return found[skip % len(found)]


def test_every_place_has_the_row_of_its_branch() -> None:
    rule = hashed_rule(5, share=0.6)
    grammar = ToyCompiled(rule)
    lookahead, (constraint, _) = begin(grammar, None)
    trunk = [first(rule, ())]
    trunk.append(first(rule, tuple(trunk)))
    assert lookahead.extend([trunk, [1, 2]]) == [trunk, [1, 2]]
    texts = {0: (), 1: tuple(trunk[:1]), 2: tuple(trunk)}
    for parent, skip in ((0, 1), (3, 0), (1, 1), (3, 1), (4, 0)):
        token = first(rule, texts[parent], skip)
        place = lookahead.grow(0, parent, token)
        assert place == len(texts)
        texts[place] = (*texts[parent], token)
    illegal = min(set(range(EOS)) - rule(texts[4]))
    assert lookahead.grow(0, 4, illegal) is None
    assert lookahead.grow(1, 1, 7) == 3  # free text
    assert lookahead.row_at(1, 3) is None
    row = lookahead.row_at(0, 4)
    assert row is not None
    assert legal(row) == rule(texts[4])
    found = lookahead.finish(len(texts) - 1)
    assert found is not None
    assert found.shape == (2, len(texts), num_mask_words(VOCAB_SIZE))
    for place, text in texts.items():
        assert legal(found[0, place].numpy()) == rule(text)
        assert grammar.fills[text] == 1  # filled once, used twice
    assert bool((found[1] == -1).all())

    # The verifier went along another branch, and the text goes on from there.
    lookahead.follow([[3, 4, 7, -1], [1, -1, -1, -1]])
    assert lookahead.drafted[0] == list(texts[7])
    assert lookahead.num_rows[0] == 4
    assert constraint is not None
    constraint.commit(list(texts[4]))
    assert constraint.fork().matcher.fork().accept_token(first(rule, texts[4]))


def test_nothing_stands_behind_the_end_of_a_text() -> None:
    lookahead, _ = begin(ToyCompiled(text_rule([b"a", b"ab"])))
    lookahead.extend([[0, 1]])
    ended = lookahead.grow(0, 1, EOS)
    assert ended == 3
    assert lookahead.row_at(0, ended) is None
    assert lookahead.grow(0, ended, 0) is None
    found = lookahead.finish(3)
    assert found is not None
    assert bool((found[0, 3] == -1).all())
    lookahead.follow([[1, 3]])
    assert lookahead.drafted == [[0, EOS]]
    assert lookahead.num_rows == [2]


def test_forced_tokens_that_were_left_are_forgotten() -> None:
    lookahead, _ = begin(ToyCompiled(text_rule([b"ab", b"cd"])))
    lookahead.extend([[0]])
    lookahead.extend_forced([[1]])
    assert lookahead.grow(0, 0, 2) == 3
    lookahead.follow([[3]])
    assert (lookahead.drafted, lookahead.forced) == ([[2]], [[]])


def test_a_draft_with_an_illegal_token_grows_nothing() -> None:
    lookahead, _ = begin(ToyCompiled(text_rule([b"ab"])), None)
    assert lookahead.can_grow(0)
    lookahead.extend([[0, 0], []])
    assert [lookahead.can_grow(request) for request in (0, 1)] == [False, True]


def test_a_branch_that_is_refused_leaves_what_the_budget_cut() -> None:
    grammar = EndingsCache(VOCABULARY).bound(
        ToyCompiled(text_rule([b"abc", b"abcdefgh", b"abdefgha"])), 4, is_required=True
    )
    steered = []
    for refused in ((), (0, 1)):
        constraint = Constraint(grammar, VOCABULARY.stop_token_ids)
        rows = MaskRows(1, DEPTHS, VOCAB_SIZE, CPU)
        rows.clear()
        lookahead = Lookahead.fork([constraint], rows, [8])
        assert lookahead.extend([[0, 1, 2]]) == [[0, 1, 2]]
        assert lookahead.peek(0) is not None
        for parent in refused:
            assert lookahead.grow(0, parent, 4) is None
        lookahead.finish(3)
        lookahead.follow([[1, 2, 3]])
        assert constraint.commit([0, 1, 2, EOS]) == [0, 1, 2, EOS]
        steered.append(constraint.steered)
    assert steered[0] == steered[1] != []
