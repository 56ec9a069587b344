"""Several proposers behind one another: each continues where the one before it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

from guided_spec.core import DecodeBatch, Proposer
from guided_spec.errors import ConfigError
from guided_spec.grammar.lookahead import Lookahead
from guided_spec.proposers import build_proposer
from guided_spec.proposers.context import ProposerContext
from guided_spec.proposers.drafting import concatenate, no_draft
from guided_spec.types import Draft

__all__ = ["Chain", "Lead"]


@runtime_checkable
class Lead(Protocol):
    """A proposer that can tell whether it has something to say, so that others give way to it."""

    def leads(self, batch: DecodeBatch, lookahead: Lookahead, request: int) -> bool:
        """Whether it would draft anything after the request's draft so far."""
        ...


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
        """The members in turn, each from where the draft stands, until none has more to say.

        The members behind the first draft K tokens a request between them at most. They stop where
        the first one leads again, and go on behind it.
        """
        lead, *fillers = self._members
        for filler in fillers:
            if filler.aux_hidden_layers:
                # Hidden states come once: it has to get them even if its turn never comes.
                filler.propose(replace(batch, num_draft_tokens=0), lookahead)
        draft = lead.propose(batch, lookahead)
        left = batch.num_draft_tokens
        while left > 0 and any(lookahead.is_open):
            before = left
            for filler in fillers:
                more = self._fill(filler, replace(batch, num_draft_tokens=left), lookahead)
                draft = concatenate(draft, more)
                left -= more.token_ids.shape[1]
            if left == before or not any(lookahead.is_open):
                break
            draft = concatenate(draft, lead.propose(batch, lookahead))
        # Where drafts are ragged, columns are left that no request uses: more, maybe, than there
        # are mask rows. One column stays for an illegal token, which is not among ``drafted``.
        longest = max(map(len, lookahead.drafted)) + 1
        width = min(draft.token_ids.shape[1], longest, batch.mask_rows.depths - 1)
        return draft.cut(width)

    def _fill(self, filler: Proposer, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        lead = self._members[0]
        if batch.num_draft_tokens == 0 or not any(lookahead.is_open):
            return no_draft(batch)
        if not isinstance(lead, Lead):
            return filler.propose(batch, lookahead)
        with lookahead.pausing(lambda request: lead.leads(batch, lookahead, request)):
            return filler.propose(batch, lookahead)

    def release(self, slots: Sequence[int]) -> None:
        """Every member forgets these slots."""
        for member in self._members:
            member.release(slots)
