"""What stands where SGLang's n-gram worker expects its corpus: drafts of our own, as trees.

SGLang verifies a tree of a fixed number of nodes for each request. A draft is one chain in it; the
nodes behind a short draft hang nowhere, so that no verifier comes to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.constraint import Constraint
from guided_spec.integrations.host_drafter import (
    CHECKED,
    HostDrafter,
    HostRequest,
    HostTexts,
)
from guided_spec.integrations.sglang_backend import GuidedGrammar

__all__ = ["Drafts", "Trees", "chains"]


class Trees(NamedTuple):
    """The trees of B requests with D nodes each, both flat.

    token_ids: int64 [B * D]; node 0 is the last committed token.
    mask: int64 [B * D * D]; 1 where the second node is the first one or an ancestor of it.
    """

    token_ids: NDArray[np.int64]
    mask: NDArray[np.int64]


class Drafts:
    """The corpus of SGLang's n-gram worker, as far as a worker without a corpus asks for one.

    num_nodes: D, the nodes of a tree.
    """

    def __init__(self, drafter: HostDrafter, num_nodes: int) -> None:
        self._drafter = drafter
        self._num_nodes = num_nodes
        self._texts = HostTexts()
        self._requests: Sequence[Any] = ()

    def see(self, requests: Sequence[Any]) -> None:
        """Take note of SGLang's ``Req`` objects that the next ``batch_get`` is about."""
        self._requests = requests

    def synchronize(self) -> None:
        """Nothing runs beside this."""

    def batch_get(
        self, names: Sequence[str], ends: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> Trees:
        """Draft behind each request's text.

        names: [B] the requests' names. ends: [B] the last ``Drafts.end_length`` tokens of prompt
        and output, or all. lengths: of the texts.
        """
        texts = [
            self._texts.follow(name, length, _Reader(end, length, request).read)
            for name, end, length, request in zip(names, ends, lengths, self._requests, strict=True)
        ]
        self._drafter.release(self._texts.take_ended())
        drafts = self._drafter.draft(
            [
                HostRequest(
                    slot=text.slot,
                    text=text.token_ids,
                    prompt_length=len(request.origin_input_ids_unpadded),
                    limit=self._num_nodes - 1,
                    constraint=_constraint_of(request.grammar),
                )
                for text, request in zip(texts, self._requests, strict=True)
            ]
        )
        return chains([end[-1] for end in ends], drafts, self._num_nodes)

    @property
    def end_length(self) -> int:
        """Tokens that a step may add to a text, and some of those before it.

        SGLang's own drafts look no further back than their trie is deep.
        """
        return self._num_nodes + CHECKED

    def erase_match_state(self, names: Iterable[str]) -> None:
        """Forget requests that have left the batch."""
        self._texts.forget(names)
        self._drafter.release(self._texts.take_ended())

    def reset(self) -> None:
        """Forget all requests."""
        self._texts.forget(self._texts)
        self._drafter.release(self._texts.take_ended())


class _Reader(NamedTuple):
    """Reads a text of which SGLang shows the end: the rest is among its request's tokens."""

    end: Sequence[int]
    length: int
    request: Any

    def read(self, start: int, stop: int) -> list[int]:
        behind = self.length - len(self.end)
        if start >= behind:
            return [*self.end[start - behind : stop - behind]]
        known = [*self.request.origin_input_ids_unpadded, *self.request.output_ids]
        return [*known[:behind], *self.end][start:stop]


def chains(roots: Sequence[int], drafts: Sequence[Sequence[int]], num_nodes: int) -> Trees:
    """Each draft as a chain below its root.

    roots: [B] the last committed tokens. drafts: [B], ``num_nodes - 1`` tokens at most.
    """
    token_ids = np.zeros((len(roots), num_nodes), dtype=np.int64)
    mask = np.zeros((len(roots), num_nodes, num_nodes), dtype=np.int64)
    mask[:] = np.eye(num_nodes, dtype=np.int64)
    for row, (root, draft) in enumerate(zip(roots, drafts, strict=True)):
        size = 1 + len(draft)
        token_ids[row, :size] = [root, *draft]
        mask[row, :size, :size] = np.tri(size, dtype=np.int64)
    return Trees(token_ids.reshape(-1), mask.reshape(-1))


def _constraint_of(grammar: Any) -> Constraint | None:
    """The grammar that binds the request's next token, where it is one of ours."""
    if isinstance(grammar, GuidedGrammar):
        return grammar.constraint()
    # SGLang's wrapper: its grammar binds nothing until the reasoning has ended.
    is_active = getattr(grammar, "_grammar_active", None)
    return _constraint_of(grammar.grammar) if is_active is not None and is_active() else None
