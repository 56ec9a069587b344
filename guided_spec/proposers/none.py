"""No drafts: plain constrained decoding, for comparison."""

from __future__ import annotations

from collections.abc import Sequence

from guided_spec.core import DecodeBatch
from guided_spec.grammar.lookahead import Lookahead
from guided_spec.proposers.context import ProposerContext
from guided_spec.proposers.drafting import no_draft
from guided_spec.types import Draft

__all__ = ["NoDraft"]


class NoDraft:
    """Proposes nothing, so that every step yields one token."""

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, context: ProposerContext) -> None:
        del context

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        """An empty draft, [B, 0]."""
        del lookahead
        return no_draft(batch)

    def release(self, slots: Sequence[int]) -> None:
        """Nothing is kept."""
