"""Prompt lookup: what followed the last occurrence of these tokens.

Saxena, "Prompt lookup decoding" (2023): match the last n tokens of the text against its own past
and propose what came after the match; longer matches first, later ones before earlier ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from guided_spec.core import DecodeBatch, ProposerContext
from guided_spec.masks.lookahead import Lookahead
from guided_spec.proposers.drafting import host_draft
from guided_spec.types import Draft

LONGEST = 4
SHORTEST = 1
LOOKS_BACK = 1 << 16  # tokens that are searched, so that a step costs no more in a longer text


class NGram:
    """Drafts by prompt lookup; keeps each slot's text, so that a step reads only what is new."""

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, context: ProposerContext) -> None:
        del context
        self._texts: dict[int, _Text] = {}

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        """Up to ``batch.num_draft_tokens`` tokens a request, cut at the first illegal one."""
        drafts: list[list[int]] = []
        rows = zip(batch.slots, batch.contexts, lookahead.drafted, lookahead.is_open, strict=True)
        for slot, context, drafted, is_open in rows:
            found: list[int] = []
            if is_open and batch.num_draft_tokens > 0:
                text = self._texts.setdefault(slot, _Text())
                found = continue_ngram(text.read(context, drafted), batch.num_draft_tokens)
            drafts.append(found)
        return host_draft(batch, lookahead.extend(drafts))

    def release(self, slots: Sequence[int]) -> None:
        """Forget the texts of ended requests."""
        for slot in slots:
            self._texts.pop(slot, None)


class _Text:
    """A text that grows, in memory that grows by doubling."""

    def __init__(self) -> None:
        self._tokens = np.empty(0, dtype=np.int32)
        self._length = 0

    def read(self, context: Sequence[int], drafted: Sequence[int]) -> NDArray[np.int32]:
        """The last ``LOOKS_BACK`` tokens of both, to be read before the next call.

        Of ``context`` only what is new is read, where it still ends as it did before.
        """
        known, length = self._length, len(context)
        end = [*context[max(0, known - LONGEST) : known]]
        if end != self._tokens[max(0, known - LONGEST) : known].tolist():
            known = 0  # another text
        size = length + len(drafted)
        if size > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty(2 * size, dtype=np.int32)])
        self._tokens[known:length] = context[known:]
        self._tokens[length:size] = drafted
        self._length = length
        return self._tokens[max(0, size - LOOKS_BACK) : size]


def continue_ngram(tokens: NDArray[np.int32], length: int) -> list[int]:
    """Up to ``length`` tokens that followed the last earlier occurrence of the longest suffix."""
    if length == 0:
        return []
    size = len(tokens)
    # An occurrence ends before the last token, at an earlier index of that token.
    ends = np.flatnonzero(tokens[:-1] == tokens[-1])
    best = ends[:0]
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
