"""Texts to draw for a target: pieces in any order, seeds with mistakes, and depth."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.targets import Target

_ANY = st.text(max_size=4) | st.text(st.characters(codec=None), max_size=2)
_TIMES = st.sampled_from([2, 3, 9, 9, 60, 60, 300, 3000])


def texts(target: Target) -> st.SearchStrategy[str]:
    """Texts of a target's kind; most are broken, some are right, a few are deep or long."""
    pieces = st.sampled_from(target.fragments) | _ANY
    joined = st.lists(pieces, max_size=14).map("".join)
    return st.one_of(
        joined,
        _mistaken(target, joined),
        _mistaken(target, pieces),
        st.builds(_nested, pieces, joined, pieces, _TIMES),
    )


def _mistaken(target: Target, inserted: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """A seed of which a stretch is replaced by something else, or by a part of another seed."""
    seeds = st.sampled_from(target.seeds)
    parts = seeds.flatmap(
        lambda seed: st.tuples(st.just(seed), st.integers(0, len(seed)), st.integers(0, 12)).map(
            lambda cut: cut[0][cut[1] : cut[1] + 3 * cut[2]]
        )
    )
    return seeds.flatmap(
        lambda seed: st.tuples(
            st.just(seed), st.integers(0, len(seed)), st.integers(0, 8), inserted | parts
        )
    ).map(lambda cut: cut[0][: cut[1]] + cut[3] + cut[0][cut[1] + cut[2] :])


def _nested(opening: str, inner: str, closing: str, times: int) -> str:
    return opening * times + inner + closing * times
