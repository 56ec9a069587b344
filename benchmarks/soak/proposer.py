"""Several proposers in one engine: they take turns, so that one LLM runs under all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from guided_spec.core import DecodeBatch, DraftInFlight, Proposer, ProposerContext
from guided_spec.masks.lookahead import Lookahead
from guided_spec.proposers import build_proposer


class Turns(NamedTuple):
    """names: of the proposers that take turns. length: steps of one turn."""

    names: tuple[str, ...] = (
        "none",
        "ngram",
        "grammar_forced",
        "draft_model",
        "chain:grammar_forced+ngram",
        "chain:grammar_forced+draft_model",
    )
    length: int = 100


class TurnTaking(Proposer):
    """A proposer that hands each step on to one of several.

    chosen: the name of the one that has every turn; None lets them take turns.
    num_steps: so far. held: slots that were drafted for and not released since.
    """

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, context: ProposerContext, turns: Turns) -> None:
        self._turns = turns
        self._proposers: Mapping[str, Proposer] = {
            name: build_proposer(name, context) for name in turns.names
        }
        self.chosen: str | None = None
        self.num_steps = 0
        self.held: set[int] = set()

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """The draft of whoever's turn it is."""
        names = self._turns.names
        name = self.chosen or names[self.num_steps // self._turns.length % len(names)]
        self.num_steps += 1
        self.held.update(batch.slots)
        return self._proposers[name].begin(batch, lookahead, carry)

    def release(self, slots: Sequence[int]) -> None:
        """Each of them may have drafted for these."""
        self.held.difference_update(slots)
        for proposer in self._proposers.values():
            proposer.release(slots)
