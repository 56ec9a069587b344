"""Launches the steps that are planned, and commits those that are in flight."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from guided_spec.core import DecodeBatch, Proposer
from guided_spec.engine.prefixes import Prefixes
from guided_spec.engine.request import Request, State, count_step
from guided_spec.engine.scheduler import Intake, Scheduler
from guided_spec.engine.slow_texts import SlowTexts
from guided_spec.engine.steps.draft_length import PLAIN, StepTaken
from guided_spec.engine.steps.in_flight import InFlight, Piece, Plan, StepInFlight
from guided_spec.engine.steps.planner import Planner
from guided_spec.engine.target.target import Target
from guided_spec.errors import GuidedSpecError, ModelError
from guided_spec.guide import Batches
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.ops.host import named_range
from guided_spec.ops.side_stream import SideStream
from guided_spec.proposers.drafting import NoDraft
from guided_spec.step import Committed, commit, speculative_step
from guided_spec.trace.record import see_step


@dataclass(frozen=True)
class StepRunner:
    """Runs the steps of an engine, whose parts these are.

    side: the stream on which drafts are made.
    """

    proposer: Proposer
    scheduler: Scheduler
    prefixes: Prefixes
    slow: SlowTexts
    target: Target
    intake: Intake
    batches: Batches
    side: SideStream
    no_draft: NoDraft = field(default_factory=NoDraft)

    def launch(self, plan: Plan, last: InFlight) -> InFlight:
        """Launch a step; returns what is in flight then. last: what is in flight before."""
        if not last.steps:
            self.side.after_current()
        with self.side.use():
            batch = self._batch(plan)
        started = time.perf_counter()
        step = speculative_step(
            last.ahead or self.target,
            self.proposer if plan.num_draft_tokens != PLAIN else self.no_draft,
            batch,
            carry=last.draft_state,
            side=self.side if self.target.launches_at_once else None,
        )
        return last.launched(StepInFlight(plan, batch, step, started))

    def commit(self, flight: StepInFlight, last: InFlight, planner: Planner) -> InFlight:
        """Commit a step; returns what is in flight then. last: what is besides the step.

        What does not depend on the host is launched before the step is waited for.
        """
        plan, batch, step, started = flight
        draft_state, ahead = step.launch_carry(self.side), None
        if self.target.launches_at_once and planner.knows_next(flight, last):
            ahead = self.target.run_ahead(batch, step.accepted.token_ids)
        self.intake.bind_next()
        with named_range("commit"):
            committed = commit(batch, step.accepted, step.packed)
            self.target.commit(batch, [row.num_accepted for row in committed], step.output)
        count_step(plan.requests, step, committed)
        ended = time.perf_counter()
        if plan.policy is not None:
            drafted = step.num_drafted.wait().tolist()
            seconds, count = ended - (last.ended or started), plan.num_draft_tokens
            taken = StepTaken.of(batch, count, committed, drafted, seconds, plan.num_decoding)
            plan.policy.count(taken)
        self._append(flight, committed)
        if not planner.is_parallel:
            self.slow.note(plan.requests)
        self.begin_decoding([piece.request for piece in plan.pieces])
        return last._replace(draft_state=draft_state, ahead=ahead, ended=ended)

    def read(self, pieces: Sequence[Piece]) -> None:
        """Read prompts by a forward of their own, which may still run when this returns."""
        self.target.read([piece.tokens for piece in pieces])
        self._have_read(pieces)

    def begin_decoding(self, requests: Iterable[Request]) -> None:
        """Let those begin whose prompts are read."""
        for request in requests:
            if request.state is State.PREFILL and not request.num_unread:
                request.state = request.after_prompt
                self.prefixes.hand_on(request)

    def fail(self, requests: Iterable[Request], error: Exception) -> None:
        """End ``requests`` with ``error``, in a ModelError if it is not one of ours."""
        if not isinstance(error, GuidedSpecError):
            cause = error
            error = ModelError(f"the step failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        for request in requests:
            self.slow.forget(request)
            self.scheduler.end(request, error)

    def _batch(self, plan: Plan) -> DecodeBatch:
        """What the step reads and decodes."""
        texts, states = [request.text for request in plan.requests], self.target.states
        # The states of a prompt that this step reads are kept until all of them are there.
        coming = {piece.tokens.slot for piece in plan.pieces}
        slots = [text.slot for text in texts if text.slot not in coming]
        for request in plan.begun:
            if request.text.slot in states:
                request.is_begun = True
                slots.append(request.text.slot)
        return replace(
            self.batches.make(texts, max(0, plan.num_draft_tokens)),
            states=states.take(slots),
            traced=[at for at, request in enumerate(plan.requests) if request.trace is not None],
            prompts=[piece.tokens for piece in plan.pieces],
        )

    def _append(self, flight: StepInFlight, committed: Sequence[Committed]) -> None:
        """Give each request what the step committed to it, and share what is in the cache."""
        requests, step = flight.plan.requests, flight.step
        logprobs = step.token_logprobs(committed)
        self._have_read(flight.plan.pieces)
        seen = see_step(step, flight.batch, flight.started)
        for request, row, values, one in zip(requests, committed, logprobs, seen, strict=True):
            if request.state is State.FINISHED:  # it was cancelled meanwhile
                continue
            try:
                request.append(row, values, one)
            except Exception as error:  # such as an error of the caller's report function
                self.fail([request], error)
            length = len(request.text.tokens) - 1
            fills = length // BLOCK > (length - len(row.token_ids)) // BLOCK
            if fills and request.state is State.DECODE:
                self.prefixes.remember(request, length)

    def _have_read(self, pieces: Sequence[Piece]) -> None:
        for request, tokens in pieces:
            request.num_cached += len(tokens.token_ids)
            self.prefixes.remember(request, request.num_cached)
