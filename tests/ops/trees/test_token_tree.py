"""Trees of tokens, described by the parents of their tokens alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guided_spec.ops.trees.token_tree import TokenTree, tree_share

WIDTH = 63

parents = st.integers(0, WIDTH).flatmap(
    lambda count: st.tuples(*(st.integers(max(at - 5, 0), at) for at in range(count)))
)


def way(own: list[int], place: int) -> list[int]:
    """The places from the text to ``place``."""
    return [place] if place == 0 else [*way(own, own[place - 1]), place]


@given(st.lists(parents, min_size=1, max_size=3))
def test_every_place_knows_what_it_follows(rows: list[tuple[int, ...]]) -> None:
    width = max(map(len, rows))
    tree = TokenTree.of(rows, width)
    children, branches, onward = tree.children(), tree.branches(), tree.ways()
    assert branches.shape[2] == tree.depth + 1
    deepest = 0
    for row, own_parents in enumerate(rows):
        count = len(own_parents)
        own = [*own_parents, *[0] * (width - count)]
        ways = [way(own, place) for place in range(width + 1)]
        deepest = max(deepest, *(len(one) - 1 for one in ways[: count + 1]))
        assert tree.parents[row].tolist() == own
        assert tree.depths[row].tolist() == [len(one) - 1 for one in ways]
        seen = [sum(1 << at for at in one) for one in ways]
        assert [int(bits) % 2**64 for bits in tree.ancestors[row]] == seen
        assert tree.ranks[row, count:].tolist() == [-1] * (width - count)
        for place in range(width + 1):
            follow = [at for at, parent in enumerate(own_parents) if parent == place]
            found = children[:, row, place].tolist()
            assert found == follow + [-1] * (len(found) - len(follow))
            assert [tree.ranks[row, at] for at in follow] == list(range(len(follow)))
            if place <= count:
                whole = ways[place][1:]
                while follow:
                    whole.append(follow[0] + 1)
                    follow = [at for at, parent in enumerate(own_parents) if parent == whole[-1]]
                rest = [-1] * (tree.depth - len(whole))
                assert onward[row, place].tolist() == whole + rest
        reached = set()
        for branch in branches[:, row].tolist():
            end = branch[-1]
            assert branch == ways[end] + [end] * (tree.depth + 1 - len(ways[end]))
            reached |= set(branch)
        assert reached == set(range(count + 1))
    assert tree.depth == deepest


def test_a_line_holds_the_first_places_of_each_row() -> None:
    tree = TokenTree.of([[0, 0, 2], [0]], 3)
    assert tree.line([4, 2]).tolist() == [[0, 1, 1, 2, 0, 1], [1, 3, 5, 13, 1, 3]]
    assert tree.line([4, 1]).tolist() == [[0, 1, 1, 2, 0], [1, 3, 5, 13, 1]]
    assert TokenTree.of([[], []], 0).line([1, 1]).tolist() == [[0, 0], [1, 1]]


def test_trees_are_for_few_requests() -> None:
    assert [tree_share(requests, 7) for requests in (1, 2, 4, 5, 64)] == [63, 31, 15, 0, 0]
    assert [tree_share(requests, 5) for requests in (5, 6)] == [11, 0]
