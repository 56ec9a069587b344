"""Steps as values: planned, launched, and what one round of an engine leaves to the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from guided_spec.core import DecodeBatch, PromptPiece, TargetModel
from guided_spec.engine.request import Request
from guided_spec.engine.steps.draft_length import DraftLengthPolicy
from guided_spec.step import Step


class Piece(NamedTuple):
    """The next tokens of a request's prompt."""

    request: Request
    tokens: PromptPiece

    @classmethod
    def next_of(cls, request: Request, most: int) -> Piece:
        """Up to ``most`` tokens of what is not read of a request; more where a picture has more
        that is read as a whole."""
        start, tokens = request.num_cached, request.fed
        end = start + min(most, request.num_unread)
        for span in request.spans:
            if span.start < end < span.stop:
                end = span.start if span.start > start else span.stop
        return cls(request, PromptPiece(request.text.slot, start, list(tokens[start:end]), tokens))


class Plan(NamedTuple):
    """What a step is to do.

    requests: those that decode, by slot. pieces: prompt pieces that its forward reads. begun:
    requests whose prompts the proposer reads as far as the target has. num_draft_tokens: of the
    longest draft, or ``PLAIN``. policy: that chose this length, and measures it; None: nobody does.
    num_decoding: texts that decode, in this step or by turns.
    """

    requests: Sequence[Request]
    pieces: Sequence[Piece]
    begun: Sequence[Request]
    num_draft_tokens: int
    policy: DraftLengthPolicy | None = None
    num_decoding: int = 0

    @property
    def everyone(self) -> list[Request]:
        """Requests that decode or read a prompt in this step; some of them twice."""
        return [*self.requests, *(piece.request for piece in self.pieces)]


class StepInFlight(NamedTuple):
    """A launched step. batch: of the plan's requests. started: time of the launch, in seconds."""

    plan: Plan
    batch: DecodeBatch
    step: Step
    started: float


class InFlight(NamedTuple):
    """What one round of an engine leaves to the next.

    num_drafted: draft tokens of the step launched last. steps: launched and not yet committed, one
    or two that take turns, the oldest first. draft_state: of the proposer, from the step committed
    last, for the one launched next. ahead: verifies that one by a forward that is launched already.
    ended: when the last step was committed, in seconds; None where nobody has decoded since.
    backlog: prompt tokens that waited at most since none did.
    """

    num_drafted: int
    steps: tuple[StepInFlight, ...] = ()
    draft_state: object | None = None
    ahead: TargetModel | None = None
    ended: float | None = None
    backlog: int = 0

    def launched(self, step: StepInFlight) -> InFlight:
        """With a step more, which took what the step before left to it."""
        count, steps = max(0, step.plan.num_draft_tokens), (*self.steps, step)
        return InFlight(count, steps, ended=self.ended, backlog=self.backlog)

    def dropped(self) -> InFlight:
        """Without any step, none of which is committed: their requests have failed."""
        return InFlight(self.num_drafted, ended=self.ended, backlog=self.backlog)

    def with_backlog(self, waiting: Sequence[Request]) -> InFlight:
        """Once the prompts of ``waiting`` are next."""
        unread = sum(request.num_unread for request in waiting)
        return self._replace(backlog=max(self.backlog, unread) if unread else 0)

    @property
    def requests(self) -> set[Request]:
        """Requests that decode or read a prompt in any of the steps."""
        return {request for step in self.steps for request in step.plan.everyone}

    @property
    def reads(self) -> dict[int, int]:
        """Prompt tokens read once the steps are done, by the requests' numbers."""
        return {
            request.number: tokens.start + len(tokens.token_ids)
            for step in self.steps
            for request, tokens in step.plan.pieces
        }
