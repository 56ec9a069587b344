"""Prompt lookup: what followed the last time these tokens stood here.

Saxena, "Prompt lookup decoding" (2023): match the last n tokens of the text against its own past
and propose what came after the match; longer matches first, later ones before earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from guided_spec.core import DecodeBatch
from guided_spec.grammar.lookahead import Lookahead
from guided_spec.proposers.context import ProposerContext
from guided_spec.proposers.drafting import host_draft
from guided_spec.types import Draft

__all__ = ["NGram", "continue_ngram"]

LONGEST = 4
SHORTEST = 1


class NGram:
    """Drafts by prompt lookup; keeps nothing between steps."""

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, context: ProposerContext) -> None:
        del context

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        """Up to ``batch.num_draft_tokens`` tokens a request, cut at the first illegal one."""
        drafts: list[list[int]] = []
        rows = zip(batch.contexts, lookahead.drafted, lookahead.is_open, strict=True)
        for context, drafted, is_open in rows:
            tokens = np.array([*context, *drafted], dtype=np.int64) if is_open else None
            found = [] if tokens is None else continue_ngram(tokens, batch.num_draft_tokens)
            drafts.append(found)
        return host_draft(batch, lookahead.extend(drafts))

    def release(self, slots: Sequence[int]) -> None:
        """Nothing is kept."""


def continue_ngram(tokens: NDArray[np.int64], length: int) -> list[int]:
    """Up to ``length`` tokens that followed the last earlier occurrence of the longest suffix."""
    if length == 0:
        return []
    size = len(tokens)
    # An occurrence ends before the last token, at an index where that token stood before.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    best: NDArray[np.int64] = ends[:0]
    for n in range(SHORTEST, min(LONGEST, size - 1) + 1):
        if n > 1:
            ends = ends[ends >= n - 1]
            ends = ends[tokens[ends - (n - 1)] == tokens[size - n]]
        if len(ends) == 0:
            break
        best = ends
    if len(best) == 0:
        return []
    start = int(best[-1]) + 1
    found: list[int] = tokens[start : start + length].tolist()
    return found
