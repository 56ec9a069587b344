"""Several proposers in sequence: each continues where the one before it stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from guided_spec.core import (
    DecodeBatch,
    DraftInFlight,
    FinishedText,
    Proposer,
    ProposerContext,
    TargetOutput,
)
from guided_spec.errors import ConfigError
from guided_spec.masks.lookahead import Lookahead, Turn
from guided_spec.ops.host import Download
from guided_spec.proposers import build_proposer
from guided_spec.proposers.drafting import concatenate, no_draft
from guided_spec.types import Accepted, Draft


class _Carried(tuple[object | None, ...]):
    """What each member carries on."""


class _Part(NamedTuple):
    """Consecutive drafts as one; most: see ``DraftInFlight``."""

    draft: Draft
    most: tuple[int, ...]

    def join(self, draft: Draft, most: tuple[int, ...]) -> _Part:
        """This part followed by ``draft``, without the columns that no request uses."""
        both = tuple(map(sum, zip(self.most, most, strict=True)))
        return _Part(concatenate(self.draft, draft).cut(max(both)), both)


class _Flying(NamedTuple):
    """The draft of a member that ends chains; the host need not know it yet.

    ends: [B] tokens that the whole drafts hold at most.
    """

    flight: DraftInFlight
    ends: Sequence[int]


class _Turns:
    """The turns that the members take in one step.

    advanced: what is drafted, and known to the host. flying: the draft after it, if there is one.
    last: [members] the last draft of each, None before its first turn.
    """

    def __init__(
        self,
        names: Sequence[str],
        members: Sequence[Proposer],
        batch: DecodeBatch,
        lookahead: Lookahead,
        carried: _Carried,
    ) -> None:
        self.advanced = _Part(no_draft(batch), (0,) * len(batch))
        self.flying: _Flying | None = None
        self.last: list[DraftInFlight | None] = [None] * len(members)
        self._names, self._members = names, members
        self._batch, self._lookahead = batch, lookahead
        self._carried = carried

    def draft_first(self, ends: Sequence[int]) -> None:
        """The first member drafts, up to ``ends`` [B] tokens of the draft."""
        starts = self._lookahead.lengths
        with self._lookahead.until(ends):
            self._advance(self._begin(0, self._batch), starts)

    def fill(self, member: int, left: Sequence[int]) -> list[int]:
        """Another one drafts ``left`` [B] tokens at most, and the first member after it.

        Returns what is left then. Nothing is drafted after a member that ends chains.
        """
        batch, lookahead, proposer = self._batch, self._lookahead, self._members[member]
        if self.flying is not None:
            if self.last[member] is None:
                serve_mailbox = self.flying.flight.serve_mailbox
                if serve_mailbox is not None:  # a member that reads may wait for the device
                    serve_mailbox()
                # Hidden states come once: it has to get them even if its turn never comes.
                self._begin(member, replace(batch, num_draft_tokens=0))
            return list(left)
        starts = lookahead.lengths
        ends = [start + most for start, most in zip(starts, left, strict=True)]
        # Nobody takes over from a member that ends chains: the device may have drawn it all.
        pause = None if proposer.ends_chains else self._members[0].interrupts(batch, lookahead)
        with lookahead.until(ends), lookahead.pausing(pause):
            limits = tuple(map(min, batch.limits, ends))
            flight = self._begin(member, replace(batch, limits=limits))
            if proposer.ends_chains:
                self.flying = _Flying(flight, ends)
                return list(left)
            self._advance(flight, starts)
        gained = [now - start for now, start in zip(lookahead.lengths, starts, strict=True)]
        if any(gained):
            self.draft_first([batch.mask_rows.depths * (count > 0) for count in gained])
        return [most - count for most, count in zip(left, gained, strict=True)]

    def _begin(self, member: int, batch: DecodeBatch) -> DraftInFlight:
        # What is carried is for the first turn.
        carry = self._carried[member] if self.last[member] is None else None
        if batch.num_draft_tokens or not member:  # else it drafts nothing
            self._lookahead.turns.append(Turn(self._names[member], self._lookahead.lengths))
        flight = self._members[member].begin(batch, self._lookahead, carry)
        self.last[member] = flight
        return flight

    def _advance(self, flight: DraftInFlight, starts: Sequence[int]) -> None:
        """Append a member's draft, which starts after ``starts`` [B] drafted tokens."""
        draft = flight.finish()
        # A token that the grammar refused may be left out of the draft, which is then shorter.
        lengths = zip(self._lookahead.lengths, starts, flight.most, strict=True)
        self.advanced = self.advanced.join(
            draft, tuple(min(now - start, most) for now, start, most in lengths)
        )


class _ChainDraft(NamedTuple):
    """The draft of a chain; see ``DraftInFlight``."""

    draft: Draft
    most: tuple[int, ...]
    turns: _Turns
    lookahead: Lookahead

    @property
    def is_advanced(self) -> bool:
        flying = self.turns.flying
        return flying is None or flying.flight.is_advanced

    @property
    def serve_mailbox(self) -> Callable[[], None] | None:
        flying = self.turns.flying
        return None if flying is None else flying.flight.serve_mailbox

    def finish(self) -> Draft:
        flying = self.turns.flying
        if flying is None:
            return self.draft
        with self.lookahead.until(flying.ends):
            last = flying.flight.finish()
        return self.turns.advanced.join(last, flying.flight.most).draft

    def carry(self, accepted: Accepted, output: TargetOutput, packed: Download) -> object | None:
        return _Carried(
            None if last is None else last.carry(accepted, output, packed)
            for last in self.turns.last
        )


class Chain(Proposer):
    """``chain:first+second+...``: the first drafts, the others fill its gaps, then it continues.

    With ``chain:grammar_forced+draft_model`` the forced text comes first, the draft model goes on
    from there, and what its own words force comes after them. A member that ``ends_chains``, as
    the head of ``chain:grammar_forced+eagle3`` on a GPU, is the last: what its words force comes
    first in the next step.
    """

    def __init__(self, context: ProposerContext) -> None:
        names = [name for name in context.argument.split("+") if name]
        if len(names) < 2 or "chain" in names:
            fix = "name at least two proposers, such as chain:grammar_forced+ngram"
            raise ConfigError("proposer", f"chain:{context.argument}", fix)
        members = [build_proposer(name, context) for name in names]
        layers = tuple(sorted({layer for member in members for layer in member.aux_hidden_layers}))
        if any(member.aux_hidden_layers not in ((), layers) for member in members):
            fix = "its members want different hidden states of the target; use one of them"
            raise ConfigError("proposer", f"chain:{context.argument}", fix)
        self._members, self.aux_hidden_layers, self._names = members, layers, names

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """The members in turn, each from the end of the draft, until none drafts more.

        The members after the first draft K tokens a request at most, together. What one request
        drafts never decides how much another does: both may draw with the same noise.
        """
        carried = carry if isinstance(carry, _Carried) else _Carried((None,) * len(self._members))
        turns = _Turns(self._names, self._members, batch, lookahead, carried)
        turns.draft_first([batch.mask_rows.depths] * len(batch))
        left, is_on = [batch.num_draft_tokens] * len(batch), True
        while is_on:
            before = left
            for member in range(1, len(self._members)):
                left = turns.fill(member, left)
            # A request that got nothing is done, however long others draft.
            left = [now * (now < was) for now, was in zip(left, before, strict=True)]
            pairs = zip(left, lookahead.is_open, strict=True)
            is_on = turns.flying is None and any(most and is_open for most, is_open in pairs)
        whole = turns.advanced
        if turns.flying is not None:
            whole = whole.join(turns.flying.flight.draft, turns.flying.flight.most)
        return _ChainDraft(*whole, turns, lookahead)

    def capture(self) -> Iterator[None]:
        """Capture the graphs of every member, one at each ``next``."""
        for member in self._members:
            yield from member.capture()

    def may_draft(self, num_draft_tokens: int) -> bool:
        """Whether any member may draft in such a batch."""
        return any(member.may_draft(num_draft_tokens) for member in self._members)

    @property
    def reads_prompts(self) -> bool:
        """Whether all members do that want states, which are passed once."""
        return all(one.reads_prompts for one in self._members if one.aux_hidden_layers)

    @property
    def runs_as(self) -> str:
        """How the members compute, separated by commas."""
        return ", ".join(filter(None, (member.runs_as for member in self._members)))

    @property
    def has_own_vocabulary(self) -> bool | None:
        """The value of the only member that knows; several members' drafts use the target's."""
        said = [one.has_own_vocabulary for one in self._members]
        known = [one for one in said if one is not None]
        return known[0] if len(known) == 1 else None

    @property
    def learns(self) -> bool:
        """Whether any member learns from other requests."""
        return any(member.learns for member in self._members)

    def learn(self, texts: Sequence[FinishedText]) -> None:
        """For the members that do."""
        for member in self._members:
            if member.learns:
                member.learn(texts)

    def release(self, slots: Sequence[int]) -> None:
        """Every member forgets these slots."""
        for member in self._members:
            member.release(slots)
