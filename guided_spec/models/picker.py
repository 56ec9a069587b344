"""How the tokens of a draft are picked inside of the graph that makes it."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from guided_spec.models.draft_vocabulary import DraftVocabulary
from guided_spec.models.graph_pool import Inputs

__all__ = ["BestTokens", "GreedyWalk", "Picker"]


class GreedyWalk(NamedTuple):
    """A draft whose every token is the best one.

    tokens: int64 [R, count] target ids. logits: [R, count, D] that they are the best of.
    """

    tokens: Tensor
    logits: Tensor


class Picker(Protocol):
    """Picks the tokens of a draft inside of its graph.

    key: says all that ``pick`` depends on besides its arguments. ticket: of this draft, see
    ``Mailbox``.
    """

    @property
    def key(self) -> Hashable: ...
    @property
    def ticket(self) -> int: ...

    def inputs(self, graph: Hashable, size: int) -> Inputs:
        """What ``pick`` reads, for ``size`` rows; see ``GraphPool.run``.

        graph: the same for calls with the same key; it keeps what is left out.
        """
        ...

    def pick(self, ticket: Tensor, inputs: Inputs, depth: int, logits: Tensor) -> Tensor:
        """int64 [R] target ids from logits [R, D]; ticket: int64 [1].

        Nothing is waited for where the ticket is ``UNTICKETED``.
        """
        ...


class BestTokens:
    """Picks the best token at each position. vocabulary: what the logits score, None the target's.

    walk: what was picked.
    """

    def __init__(self, vocabulary: DraftVocabulary | None) -> None:
        self._vocabulary = vocabulary
        self._picked: list[GreedyWalk] = []

    def pick(self, _: int, logits: Tensor) -> Tensor:
        """int64 [R] target ids from logits [R, D]; one position after another."""
        best = logits.argmax(-1)
        tokens = best if self._vocabulary is None else self._vocabulary.to_target(best)
        self._picked.append(GreedyWalk(tokens, logits))
        return tokens

    @property
    def walk(self) -> GreedyWalk:
        """All of them, in this order."""
        return GreedyWalk(*(torch.stack(parts, 1) for parts in zip(*self._picked, strict=True)))
