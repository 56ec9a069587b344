"""Several proposers behind one another: each continues where the one before it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, Proposer, ProposerContext
from guided_spec.errors import ConfigError
from guided_spec.masks.lookahead import Lookahead, Turn
from guided_spec.ops.host import Download
from guided_spec.proposers import build_proposer
from guided_spec.proposers.drafting import concatenate, no_draft
from guided_spec.types import Accepted, Draft

__all__ = ["Chain", "Lead"]


@runtime_checkable
class Lead(Protocol):
    """A proposer that can tell whether it has something to say, so that others give way to it."""

    def leads(self, batch: DecodeBatch, lookahead: Lookahead, request: int) -> bool:
        """Whether it would draft anything after the request's draft so far."""
        ...


class _Carried(tuple[object | None, ...]):
    """What each member carries on."""


class _Turns:
    """One member's turns in a step: what it carries is for the first, and comes from the last."""

    def __init__(self, proposer: Proposer, carry: object | None) -> None:
        self.proposer = proposer
        self.last: DraftInFlight | None = None
        self._carry = carry

    def draft(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        """The member's next tokens, walked."""
        carry, self._carry = self._carry, None
        self.last = self.proposer.begin(batch, lookahead, carry)
        return self.last.finish()


class _ChainDraft(NamedTuple):
    """The draft of a chain, which the host has walked; see ``DraftInFlight``."""

    draft: Draft
    turns: Sequence[_Turns]

    @property
    def is_walked(self) -> bool:
        return True

    def finish(self) -> Draft:
        return self.draft

    def carry(
        self, accepted: Accepted, hidden_states: Tensor | None, packed: Download
    ) -> object | None:
        return _Carried(
            None if turns.last is None else turns.last.carry(accepted, hidden_states, packed)
            for turns in self.turns
        )


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
        self._names = names
        self._members: list[Proposer] = [build_proposer(name, context) for name in names]
        layers = {layer for member in self._members for layer in member.aux_hidden_layers}
        if any(
            member.aux_hidden_layers not in ((), tuple(sorted(layers))) for member in self._members
        ):
            fix = "its members want different hidden states of the target; use one of them"
            raise ConfigError("proposer", f"chain:{context.argument}", fix)
        self.aux_hidden_layers: tuple[int, ...] = tuple(sorted(layers))

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """The members in turn, each from where the draft stands, until none has more to say.

        The members behind the first draft K tokens of each request between them at most. They stop
        where the first one leads again, and go on behind it. What one request drafts never decides
        how much another does: both may draw with the same noise.
        """
        carried = carry if isinstance(carry, _Carried) else _Carried((None,) * len(self._members))
        turns = [_Turns(*pair) for pair in zip(self._members, carried, strict=True)]
        lead, *fillers = turns
        for filler in fillers:
            if filler.proposer.aux_hidden_layers:
                # Hidden states come once: it has to get them even if its turn never comes.
                filler.draft(replace(batch, num_draft_tokens=0), lookahead)
        lookahead.turns.append(Turn(self._names[0], [0] * len(batch)))
        draft = lead.draft(batch, lookahead)
        left = [batch.num_draft_tokens] * len(batch)
        while any(_rooms(lookahead, left)):
            before = left
            for name, filler in zip(self._names[1:], fillers, strict=True):
                starts = _lengths(lookahead)
                lookahead.turns.append(Turn(name, starts))
                draft = _join(draft, self._fill(filler, batch, lookahead, left), batch, lookahead)
                rows = zip(left, starts, _lengths(lookahead), strict=True)
                left = [room - (end - start) for room, start, end in rows]
            # Who got nothing is done, however long others go on.
            gained = [now < was for now, was in zip(left, before, strict=True)]
            left = [room if is_on else 0 for room, is_on in zip(left, gained, strict=True)]
            ends = [batch.mask_rows.depths * is_on for is_on in gained]
            with lookahead.pausing(_never, ends):
                if any(lookahead.is_open):
                    lookahead.turns.append(Turn(self._names[0], _lengths(lookahead)))
                    draft = _join(draft, lead.draft(batch, lookahead), batch, lookahead)
        return _ChainDraft(draft, turns)

    def _fill(
        self, filler: _Turns, batch: DecodeBatch, lookahead: Lookahead, left: Sequence[int]
    ) -> Draft:
        """``left[request]`` tokens of each request at most."""
        lead, most = self._members[0], max(_rooms(lookahead, left))
        if most == 0:
            return no_draft(batch)
        ends = [start + room for start, room in zip(_lengths(lookahead), left, strict=True)]
        limits = tuple(map(min, batch.limits, ends))
        batch = replace(batch, num_draft_tokens=most, limits=limits)
        leads = partial(lead.leads, batch, lookahead) if isinstance(lead, Lead) else _never
        with lookahead.pausing(leads, ends):
            return filler.draft(batch, lookahead)

    def release(self, slots: Sequence[int]) -> None:
        """Every member forgets these slots."""
        for member in self._members:
            member.release(slots)


def _never(request: int) -> bool:
    del request
    return False


def _lengths(lookahead: Lookahead) -> list[int]:
    return [len(drafted) for drafted in lookahead.drafted]


def _rooms(lookahead: Lookahead, left: Sequence[int]) -> list[int]:
    """[B] what is left to the requests that may go on."""
    return [room * is_open for room, is_open in zip(left, lookahead.is_open, strict=True)]


def _join(first: Draft, second: Draft, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
    """Both drafts, without the columns that no request uses.

    Ragged ones leave some: more, maybe, than there are mask rows. One column stays for an illegal
    token, which is not among ``drafted``.
    """
    joined = concatenate(first, second)
    longest = max(_lengths(lookahead)) + 1
    return joined.cut(min(joined.token_ids.shape[1], longest, batch.mask_rows.depths - 1))
