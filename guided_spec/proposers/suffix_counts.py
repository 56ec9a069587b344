"""How often each run of tokens stands in some texts, and what followed it.

The suffix tree of Oliaro et al., "SuffixDecoding: extreme speculative decoding for emerging AI
applications" (2024, arXiv:2411.04975), cut at a depth. A run that stands in the texts once has no
nodes below it: where it stands says what follows. So a new token costs as many look-ups as the
longest run before it that has stood there already, and nothing is built anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest
from typing import NamedTuple

__all__ = ["LONGEST", "CountedText", "Followers", "Match", "SuffixCounts"]

LONGEST = 8  # tokens of a run whose followers are counted
CANDIDATES = 4  # followers that are named, for a grammar to choose from
_NOTHING: list[int] = []


class CountedText:
    """A text that is counted, and may grow.

    runs: the nodes of its last 1, 2, ... tokens, as far as they stood in the texts before.
    """

    __slots__ = ("runs", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.runs: list[_Node] = []


class _Node:
    """A run of tokens. count: how often it stands in the texts.

    followers: the runs that are one token longer, by that token; None of a run that stood in the
    texts once when it was last seen. It then goes on at ``text[at]``, if anywhere.
    ranked: what ``rank`` found; None where that is out of date.
    """

    __slots__ = ("at", "count", "followers", "ranked", "text")

    def __init__(self, text: list[int], at: int) -> None:
        self.count = 1
        self.followers: dict[int, _Node] | None = None
        self.ranked: Followers | None = None
        self.text = text
        self.at = at

    def open(self) -> None:
        """Give the only occurrence so far its node below this one."""
        self.followers = {}
        if self.at < len(self.text):
            self.followers[self.text[self.at]] = _Node(self.text, self.at + 1)
        self.text = _NOTHING  # else the node would keep a text that is removed

    def rank(self) -> Followers:
        """The followers, of which there are some, by their counts."""
        found = self.ranked
        if found is None:
            assert self.followers
            found = self.ranked = _rank(self.followers)
        return found


class Followers(NamedTuple):
    """What followed a run.

    token_ids: the most frequent tokens, the most frequent first, the smallest id among equals.
    share: how much of all that followed the first of them is.
    """

    token_ids: list[int]
    share: float


class Match(NamedTuple):
    """A run that stands in the texts and goes on there; length: its tokens.

    at: where its only occurrence goes on in ``node.text``; -1 where ``node.followers`` says that.
    """

    length: int
    node: _Node
    at: int = -1

    def followers(self) -> Followers:
        """What followed the run."""
        node = self.node
        if self.at >= 0:
            return Followers([node.text[self.at]], 1.0)
        return node.rank()


def _rank(followers: dict[int, _Node]) -> Followers:
    if len(followers) == 1:
        return Followers([*followers], 1.0)
    counts = [(follower.count, -token) for token, follower in followers.items()]
    best = nlargest(CANDIDATES, counts)
    total = sum(count for count, _ in counts)
    return Followers([-token for _, token in best], best[0][0] / total)


class SuffixCounts:
    """Counts of all runs of up to ``longest`` + 1 tokens of texts that come and go.

    The last text may grow until another one begins.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        self._longest = longest
        self._root = _Node(_NOTHING, 0)
        self._root.followers = {}

    def count(self, run: Sequence[int]) -> int:
        """How often ``run`` stands in the texts, 1 to ``longest`` + 1 tokens."""
        node = self._root
        for depth, token in enumerate(run):
            if node.followers is None:
                rest = [*run[depth:]]
                return int(node.text[node.at : node.at + len(rest)] == rest)
            follower = node.followers.get(token)
            if follower is None:
                return 0
            node = follower
        return node.count

    def append(self, text: CountedText, token_ids: Sequence[int]) -> None:
        """Let a text go on; one that is empty begins here."""
        tokens, root, longest = text.tokens, self._root, self._longest
        for token in token_ids:
            tokens.append(token)
            end = len(tokens)
            runs: list[_Node] = []
            for node in (root, *text.runs):
                followers = node.followers
                assert followers is not None  # it was opened when it stood there again
                node.ranked = None
                follower = followers.get(token)
                if follower is None:
                    followers[token] = _Node(tokens, end)
                    continue
                follower.count += 1
                if len(runs) < longest:
                    if follower.followers is None:
                        follower.open()
                    runs.append(follower)
                else:
                    follower.text = _NOTHING  # nobody goes below
            text.runs = runs

    def remove(self, text: CountedText) -> None:
        """Take a whole text out; it must not be used again."""
        tokens = text.tokens
        for start in range(len(tokens)):
            node = self._root
            for token in tokens[start : start + self._longest + 1]:
                followers = node.followers
                assert followers is not None  # else the run stood there once, and is gone
                node.ranked = None
                node = followers[token]
                node.count -= 1
                if node.count == 0:
                    del followers[token]
                    break

    def find(self, tail: list[int]) -> Match | None:
        """The longest end of ``tail``, of ``longest`` tokens at most, that goes on in the texts.

        If a run goes on, so do its own ends: their lengths are searched by halves.
        """
        found, size = None, len(tail)
        least, most = 0, min(self._longest, size)
        while least < most:
            length = (least + most + 1) // 2
            match = self._walk(tail[size - length :])
            if match is None:
                most = length - 1
            else:
                least, found = length, match
        return found

    def follow(self, match: Match, tail: list[int]) -> Match | None:
        """``find``, where ``match`` was the match before the last token of ``tail``."""
        length, node, at = match
        token = tail[-1]
        if at >= 0:
            if node.text[at] == token and at + 1 < len(node.text):
                return Match(length + 1, node, at + 1)
        elif length < self._longest and node.followers is not None:
            follower = node.followers.get(token)
            found = None if follower is None else _match(follower, length + 1)
            if found is not None:
                return found
        return self.find(tail[-length:])

    def _walk(self, run: list[int]) -> Match | None:
        node = self._root
        for depth, token in enumerate(run):
            if node.followers is None:
                at, left = node.at, len(run) - depth
                goes_on = at + left < len(node.text)
                if goes_on and node.text[at : at + left] == run[depth:]:
                    return Match(len(run), node, at + left)
                return None
            follower = node.followers.get(token)
            if follower is None:
                return None
            node = follower
        return _match(node, len(run))


def _match(node: _Node, length: int) -> Match | None:
    if node.followers is None:
        return Match(length, node, node.at) if node.at < len(node.text) else None
    return Match(length, node) if node.followers else None
