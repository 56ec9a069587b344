"""Steps that are launched and not committed: one, or two that take turns.

A draft under masks waits for the host at each of its tokens, and meanwhile the device has nothing
else to do. So the texts of a large batch decode in two halves: one drafts, with the host, while the
device verifies the other. Two forwards of half the tokens each must not take much longer than one
of all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from guided_spec.core import DecodeBatch, PromptPiece
from guided_spec.engine.pace import ForwardTimes, Pace
from guided_spec.engine.request import Request
from guided_spec.engine.target.target import Target
from guided_spec.models.packed.graph_pool import bucket
from guided_spec.ops.host import named_range
from guided_spec.step import Committed, Step, commit

# As many times as long as the forward of all texts those of both halves may take. What is above it
# is about what the host takes for a draft of so many.
WORTH = 1.35
STAYING = 0.75  # of the texts that turns begin with


class Piece(NamedTuple):
    """The next tokens of a request's prompt."""

    request: Request
    tokens: PromptPiece

    @classmethod
    def next_of(cls, request: Request, most: int) -> Piece:
        """Up to ``most`` tokens of what is not read of a request."""
        start, tokens = request.num_cached, request.text.tokens
        end = start + min(most, request.num_unread)
        return cls(request, PromptPiece(request.text.slot, start, tokens[start:end], tokens[end]))


class Flight(NamedTuple):
    """A step that is launched.

    requests: of ``batch``. along: of prompts, which its forward reads. pace: that hears of it, if
    any. num_drafted: as that said, or K. started: when it was.
    """

    requests: Sequence[Request]
    along: Sequence[Piece]
    batch: DecodeBatch
    step: Step
    pace: Pace | None
    num_drafted: int
    started: float

    @property
    def everyone(self) -> Iterator[Request]:
        """Those that decode or read in it; some of them twice."""
        yield from self.requests
        yield from (piece.request for piece in self.along)

    def commit(self, target: Target) -> list[Committed]:
        """What it gave every text; waits for it."""
        batch, step = self.batch, self.step
        with named_range("commit"):
            committed = commit(batch, step.accepted, step.packed)
            num_accepted = [row.num_accepted for row in committed]
            target.commit(batch, num_accepted, step.output)
        return committed


class Flights:
    """Those of an engine, in the order in which they were launched.

    turns_from: texts that have to decode for two halves of them to take turns; None: never.
    """

    def __init__(self) -> None:
        self._flights = deque[Flight]()
        self.turns_from: int | None = None

    def __len__(self) -> int:
        return len(self._flights)

    def measure(self, times: ForwardTimes, width: int, most: int) -> None:
        """From here on, texts may take turns.

        times: of forwards; none where nothing was measured, and nobody takes turns. width: tokens
        of a text in a forward. most: texts at most.
        """
        for num_texts in range(most, 1, -1) if times else ():
            half = -(-num_texts // 2)
            both = 2 * times.of(bucket(half * width))
            if both > WORTH * times.of(bucket(num_texts * width)):
                break
            self.turns_from = num_texts

    def take_turns(self, num_texts: int) -> bool:
        """Whether so many texts that decode do so in two halves."""
        if self.turns_from is None:
            return False
        # Who has begun goes on with somewhat fewer: each change takes about half a step.
        return num_texts >= (STAYING * self.turns_from if self._flights else self.turns_from)

    def launch(self, flight: Flight) -> None:
        """It is launched."""
        self._flights.append(flight)

    def land(self) -> Flight:
        """The first one, which is to be committed."""
        return self._flights.popleft()

    def drop(self) -> None:
        """Nobody commits them: their requests have failed."""
        self._flights.clear()

    @property
    def requests(self) -> set[Request]:
        """All that decode or read in them."""
        return {request for flight in self._flights for request in flight.everyone}

    @property
    def reads(self) -> dict[int, int]:
        """Tokens that the requests which read have read behind them, by their numbers."""
        return {
            request.number: tokens.start + len(tokens.token_ids)
            for flight in self._flights
            for request, tokens in flight.along
        }
