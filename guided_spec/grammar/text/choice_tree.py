"""The ways to write one of several texts in tokens, as a tree down to where the text is decided."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from guided_spec.errors import ConfigError
from guided_spec.grammar.vocabulary import Vocabulary

ChoicePaths = Literal["all", "canonical"]

MOST_NODES = 4096  # each is a context that the model has to read

_Arcs = list[tuple[tuple[int, int], ...]]
"""One text: by position the tokens that go on from there, each with the position after it."""

_Places = list[tuple[int, int]]
"""Texts that are still possible, each with the position reached in it."""


class Branch(NamedTuple):
    """A token that may come next. It leads to ``node``, or decides for ``choice``; else None."""

    token_id: int
    node: int | None
    choice: int | None


class Node(NamedTuple):
    """A beginning of several texts. path: its tokens. parent: index of the node before it."""

    path: tuple[int, ...]
    parent: int | None
    branches: tuple[Branch, ...]


class TokenRow(NamedTuple):
    """Tokens after a prompt, for one row of a forward.

    nodes: those asked about, each a beginning of ``token_ids`` as long as its path.
    """

    token_ids: tuple[int, ...]
    nodes: tuple[int, ...]


class ChoiceTree:
    """Every context in which a choice between texts is made; made by ``of``.

    A path of tokens is a context of its own: two paths that spell the same text are two. A path
    ends where one text alone is left, for whatever follows has probability 1 in all.

    nodes: parents before their children; none where there is one text only.
    """

    def __init__(self, nodes: Sequence[Node], num_choices: int) -> None:
        self.nodes = tuple(nodes)
        self.num_choices = num_choices

    @classmethod
    def of(
        cls,
        texts: Sequence[str],
        vocabulary: Vocabulary,
        spell: Callable[[bytes], list[int]] | None = None,
    ) -> ChoiceTree:
        """The tree of distinct ``texts``, none of them empty.

        spell: the only tokens that a text may be written in; None admits all its spellings. Stop
        tokens distinguish a text from a longer one that begins with it.

        Raises ConfigError for a text that the tokens cannot write, and for more than 4096 nodes.
        """
        arcs = [
            _one_path(t, spell) if spell else _all_ways(t, vocabulary) for t in map(_utf8, texts)
        ]
        for text, ways in zip(texts, arcs, strict=True):
            if not ways[0]:
                raise ConfigError("choices", text, "the model's tokens cannot write it; drop it")
        nodes: list[Node] = []
        found: list[tuple[tuple[int, ...], int | None, _Places]] = []
        if len(texts) > 1:
            found.append(((), None, [(choice, 0) for choice in range(len(texts))]))
        while len(nodes) < len(found):
            path, parent, places = found[len(nodes)]
            branches = []
            for token_id, rest in _moves(arcs, places, vocabulary.stop_token_ids).items():
                is_open = len(rest) > 1
                node, choice = (len(found), None) if is_open else (None, rest[0][0])
                branches.append(Branch(token_id, node, choice))
                if is_open:
                    found.append(((*path, token_id), len(nodes), rest))
            if len(found) > MOST_NODES:
                fix = f"their common beginnings have more than {MOST_NODES} spellings in tokens: "
                raise ConfigError("choices", list(texts), f'{fix}pass paths="canonical"')
            nodes.append(Node(path, parent, tuple(branches)))
        return cls(nodes, len(texts))

    def rows(self) -> list[TokenRow]:
        """The fewest rows of tokens that cover every node with a choice of tokens."""
        covered = [len(node.branches) == 1 for node in self.nodes]  # forced: nothing to ask
        rows = []
        for last in range(len(self.nodes) - 1, -1, -1):
            if not covered[last]:
                nodes = [at for at in self._upwards(last) if not covered[at]]
                for at in nodes:
                    covered[at] = True
                rows.append(TokenRow(self.nodes[last].path, tuple(reversed(nodes))))
        return rows[::-1]

    def logprobs(self, scores: Mapping[int, Sequence[float]]) -> list[float]:
        """The log-probability of each text: over all of its paths, the tokens' product.

        scores: of every node with more than one branch, the branches' log-probabilities.
        """
        reached = [0.0] * len(self.nodes)
        ends: list[list[float]] = [[] for _ in range(self.num_choices)]
        for at, node in enumerate(self.nodes):
            for branch, score in zip(node.branches, scores.get(at, (0.0,)), strict=True):
                if branch.node is not None:
                    reached[branch.node] = reached[at] + score
                if branch.choice is not None:
                    ends[branch.choice].append(reached[at] + score)
        return [_log_sum(logprobs) for logprobs in ends] if self.nodes else [0.0]

    def _upwards(self, at: int | None) -> Iterator[int]:
        while at is not None:
            yield at
            at = self.nodes[at].parent


def _moves(arcs: Sequence[_Arcs], places: _Places, stops: Sequence[int]) -> dict[int, _Places]:
    """By legal token, the texts that are possible after it."""
    moves: dict[int, _Places] = {}
    for choice, at in places:
        for token_id, behind in arcs[choice][at]:
            moves.setdefault(token_id, []).append((choice, behind))
        if at == len(arcs[choice]) - 1:
            moves.update((token_id, [(choice, at)]) for token_id in stops)
    return moves


def _all_ways(text: bytes, vocabulary: Vocabulary) -> _Arcs:
    """Without tokens after which the rest of the text cannot be written."""
    ids, longest = vocabulary.ids_by_bytes, vocabulary.longest_token
    arcs: _Arcs = [()] * (len(text) + 1)
    for start in range(len(text) - 1, -1, -1):
        ends = range(start + 1, min(len(text), start + longest) + 1)
        arcs[start] = tuple(
            (token_id, end)
            for end in ends
            if arcs[end] or end == len(text)
            for token_id in ids.get(text[start:end], ())
        )
    return arcs


def _one_path(text: bytes, spell: Callable[[bytes], list[int]]) -> _Arcs:
    return [*(((token_id, at + 1),) for at, token_id in enumerate(spell(text))), ()]


def _utf8(text: str) -> bytes:
    return text.encode()


def _log_sum(logprobs: Sequence[float]) -> float:
    largest = max(logprobs, default=-math.inf)
    if largest == -math.inf:
        return largest
    return largest + math.log(math.fsum(math.exp(value - largest) for value in logprobs))
