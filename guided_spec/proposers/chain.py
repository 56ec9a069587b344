"""Several proposers behind one another: each continues where the one before it stopped."""

from __future__ import annotations

from collections.abc import Sequence

from guided_spec.core import DecodeBatch, Proposer
from guided_spec.errors import ConfigError
from guided_spec.grammar.lookahead import Lookahead
from guided_spec.proposers import build_proposer
from guided_spec.proposers.context import ProposerContext
from guided_spec.proposers.drafting import concatenate
from guided_spec.types import Draft

__all__ = ["Chain"]


class Chain:
    """``chain:first+second+...``: the first leads, the others fill its gaps, then it leads again.

    With ``chain:grammar_forced+draft_model`` the forced text comes first, the draft model goes on
    from there, and what its own words force comes behind them.
    """

    def __init__(self, context: ProposerContext) -> None:
        names = [name for name in context.argument.split("+") if name]
        if len(names) < 2 or "chain" in names:
            fix = "name at least two proposers, such as chain:grammar_forced+ngram"
            raise ConfigError("proposer", f"chain:{context.argument}", fix)
        self._members: list[Proposer] = [build_proposer(name, context) for name in names]
        layers = {layer for member in self._members for layer in member.aux_hidden_layers}
        if any(
            member.aux_hidden_layers not in ((), tuple(sorted(layers))) for member in self._members
        ):
            fix = "its members want different hidden states of the target; use one of them"
            raise ConfigError("proposer", f"chain:{context.argument}", fix)
        self.aux_hidden_layers: tuple[int, ...] = tuple(sorted(layers))

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        """The members' drafts in turn, then the first member's once more."""
        draft = self._members[0].propose(batch, lookahead)
        for member in (*self._members[1:], self._members[0]):
            if any(lookahead.is_open):
                draft = concatenate(draft, member.propose(batch, lookahead))
        return draft

    def release(self, slots: Sequence[int]) -> None:
        """Every member forgets these slots."""
        for member in self._members:
            member.release(slots)
