"""What the next step does: which prompts it reads, who decodes in it, and how much is drafted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from guided_spec.config import EngineConfig
from guided_spec.core import Proposer
from guided_spec.engine.prefixes import Prefixes
from guided_spec.engine.request import Request, State
from guided_spec.engine.scheduler import Scheduler
from guided_spec.engine.slow_texts import SlowTexts
from guided_spec.engine.steps.draft_length import PLAIN, DraftLengthPolicy, ForwardTimes
from guided_spec.engine.steps.in_flight import InFlight, Piece, Plan, StepInFlight
from guided_spec.engine.target.prompts import group_prompts, prompt_tokens_per_step
from guided_spec.models.causal_lm import CausalLM
from guided_spec.models.packed.graph_pool import CaptureWindow, bucket

# As many times as long as the forward of all texts those of both halves may take. What is above it
# is about what the host takes for a draft of so many.
WORTH = 1.35
STAYING = 0.75  # of the texts that turns begin with

# Whether a request has blocks for so many tokens in all. Steps in flight may be committed for it,
# and requests that came last go back to the queue.
Grow = Callable[[Request, int], bool]


class Turns(NamedTuple):
    """When the texts decode in two halves that take turns.

    A draft under masks waits for the host at each of its tokens, and meanwhile the device has
    nothing else to do. So one half of a large batch drafts, with the host, while the device
    verifies the other. Two forwards of half the tokens must not take much longer than one of all.

    least: texts that have to decode for it; None: never.
    """

    least: int | None = None

    @classmethod
    def from_times(cls, times: ForwardTimes, width: int, most: int) -> Turns:
        """The turns that pay.

        times: of forwards; empty where nothing was measured, and then no texts take turns. width:
        tokens of a text in a forward. most: texts at most.
        """
        least = None
        for num_texts in range(most, 1, -1) if times else ():
            half = -(-num_texts // 2)
            both = 2 * times.of(bucket(half * width))
            if both > WORTH * times.of(bucket(num_texts * width)):
                break
            least = num_texts
        return cls(least)

    def are_taken(self, num_texts: int, in_flight: InFlight) -> bool:
        """Whether ``num_texts`` texts decode in two halves."""
        if self.least is None:
            return False
        # Once begun, turns go on with somewhat fewer texts: each change costs about half a step.
        return num_texts >= (STAYING * self.least if in_flight.steps else self.least)


class PromptPlan(NamedTuple):
    """Prompt pieces. alone: of forwards of their own. joined: those that the verify forward reads,
    as a packed model's can."""

    alone: Sequence[Sequence[Piece]] = ()
    joined: Sequence[Piece] = ()


@dataclass(frozen=True)
class Planner:
    """Plans the steps of an engine, whose parts these are.

    layers: hidden states that the proposer reads. is_parallel: whether several processes run the
    model, which must all plan the same. policies: of draft lengths, by whether texts take turns.
    """

    proposer: Proposer
    scheduler: Scheduler
    prefixes: Prefixes
    slow: SlowTexts
    config: EngineConfig
    model: CausalLM
    window: CaptureWindow
    layers: tuple[int, ...]
    is_parallel: bool
    turns: Turns = Turns()
    policies: Mapping[bool, DraftLengthPolicy] = field(default_factory=dict)

    def with_times(self, times: ForwardTimes) -> Planner:
        """A planner whose steps draft as much as pays, and whose texts take turns where that does.

        times: of forwards, if they are captured.
        """
        count, num_slots = self.config.num_draft_tokens, self.model.num_slots
        turns, policies = self.turns, self.policies
        # A linear state is that of the last step alone. Who drafts nothing waits for nothing.
        if self.proposer.may_draft(count) and not self.model.has_linear_state:
            turns = Turns.from_times(times, 1 + count, num_slots)
        if count and self.config.drafting != "always":
            has_more = not self.layers and self.proposer.may_draft(0)
            policies = {
                turn: DraftLengthPolicy(count, times, has_more=has_more, in_halves=turn)
                for turn in (False, True)
            }
        return replace(self, turns=turns, policies=policies)

    def takes_turns(self, in_flight: InFlight) -> bool:
        """Whether one half of the texts drafts while the other one is verified."""
        texts = self.scheduler.running(State.DECODE)
        if not self.turns.are_taken(len(texts), in_flight):
            return False
        policy = self.policies.get(True)
        if policy is None or policy.drafts(len(texts)):
            return True
        return not all(map(self._is_free, texts))  # their steps draft whatever it says

    def waiting(self, in_flight: InFlight) -> list[Request]:
        """Requests whose prompts are to be read, by slot; not those that take them from others."""
        rows = self._between_steps(State.PREFILL, in_flight)
        return [request for request in rows if not self.prefixes.is_shared(request)]

    def prompts(self, waiting: Sequence[Request], in_flight: InFlight, grow: Grow) -> PromptPlan:
        """Which prompts are read next, at most ``prefill_tokens`` tokens in all.

        Texts that decode in the step that reads their prompts are in that state from here on. The
        last prompt token is left for the first speculative step.
        """
        # Who came first reads first: a later one may have to go, and to read it all again.
        unread = sorted((one for one in waiting if one.num_unread), key=lambda one: one.number)
        left = [request.num_unread for request in unread]
        if not self.model.is_packed:
            groups = group_prompts(left, self.config.prefill_tokens)
            read = [[Piece.next_of(unread[at], width) for at in rows] for rows, width in groups]
            return PromptPlan(alone=read)
        pieces = self._next_pieces(unread, self._budget(left, in_flight), in_flight, grow)
        for piece in [piece for piece in pieces if self.decodes_with_prompt(piece)]:
            piece.request.state = State.DECODE
        if self.scheduler.running(State.DECODE):
            return PromptPlan(joined=pieces)
        return PromptPlan(alone=[pieces] if pieces else ())

    def decodes_with_prompt(self, piece: Piece) -> bool:
        """Whether a text decodes in the step that reads the last piece of its prompt.

        One forward then reads a prompt and gives the first token, which no head drafts for.
        """
        request, tokens = piece
        return (
            tokens.start + len(tokens.token_ids) == len(request.text.tokens) - 1
            and request.after_prompt is State.DECODE
            and self._may_begin_undrafted(request)
            and not self.prefixes.is_awaited(request)
            and not self.slow.holds(request)
        )

    def decoding(self, pieces: Sequence[Piece], in_flight: InFlight, grow: Grow) -> list[Request]:
        """Requests that decode in the next step, each with blocks for the longest draft.

        pieces: prompt pieces that its forward reads.
        """
        requests = self._between_steps(State.DECODE, in_flight)
        if not self.is_parallel:  # else they would have to agree on who is ready
            requests = self.slow.ready(requests)
        if self.takes_turns(in_flight):
            most = -(-len(self.scheduler.running(State.DECODE)) // 2)
            coming = {piece.request for piece in pieces}  # their prompts come with them
            first = sorted(requests, key=lambda request: request not in coming)[:most]
            chosen = {*first, *(one for one in requests if one in coming)}
            requests = [request for request in requests if request in chosen]
        # However little of a draft a text may take itself: rows are as wide as the longest.
        lengths = [len(request.text.tokens) + self.config.longest_draft for request in requests]
        if self.model.holds([request.text.slot for request in requests], lengths):
            return requests
        for request, length in zip(requests, lengths, strict=True):
            if request.state is State.DECODE:  # else it had to go for one before it
                grow(request, length)
        return [request for request in requests if request.state is State.DECODE]

    def plan(
        self, requests: Sequence[Request], pieces: Sequence[Piece], in_flight: InFlight
    ) -> Plan:
        """The step in which ``requests`` decode."""
        # Some may have had to go for those who decode.
        pieces = [piece for piece in pieces if piece.request.state is not State.WAITING]
        num_texts, count = len(requests), self.config.num_draft_tokens
        halves = len(self.scheduler.running(State.DECODE))
        policy, is_half = self.policies.get(False), self.takes_turns(in_flight)
        if self.turns.are_taken(halves, in_flight):
            policy, num_texts = self.policies.get(True), halves
        if not all(map(self._is_free, requests)):
            policy = None
        if policy is not None:
            num_read = sum(len(piece.tokens.token_ids) for piece in pieces)
            count = policy.num_draft_tokens(num_texts, num_read)
            if self.takes_turns(in_flight) != is_half:  # from the next step on: it tells nothing
                policy = None
        return Plan(requests, pieces, self.begun(in_flight), count, policy, num_texts)

    def begun(self, in_flight: InFlight) -> list[Request]:
        """Requests whose prompts the proposer reads now, although they are not at their end.

        Not those whose prompts others take, together with the hidden states.
        """
        if not (self.layers and self.proposer.reads_prompts):
            return []
        return [
            request
            for request in self._between_steps(State.PREFILL, in_flight)
            if request.after_prompt is State.DECODE and not self.prefixes.is_awaited(request)
        ]

    def knows_next(self, flight: StepInFlight, in_flight: InFlight) -> bool:
        """Whether the forward after a step is known: all texts get one token in both, and nobody's
        prompt is to be read with it.

        in_flight: besides that step.
        """
        policy, now = flight.plan.policy, flight.plan.num_draft_tokens
        stays_plain = policy is not None and policy.stays_plain(flight.plan.num_decoding)
        most = max(0, now, 0 if stays_plain else self.config.num_draft_tokens)
        if self.is_parallel or in_flight.steps or self.slow:
            return False
        if not (stays_plain and now == PLAIN) and self.proposer.may_draft(most):
            return False
        return self.scheduler.all_decode and not self.scheduler.ready()

    def _between_steps(self, state: State, in_flight: InFlight) -> list[Request]:
        """Requests in ``state`` that are in no step in flight."""
        launched = in_flight.requests
        return [one for one in self.scheduler.running(state) if one not in launched]

    def _budget(self, left: Sequence[int], in_flight: InFlight) -> int:
        """Prompt tokens that are read next. left: of each text that waits, in reading order."""
        num_decoding = len(self.scheduler.running(State.DECODE))
        budget = self.config.prefill_tokens
        if num_decoding == 0:
            return budget
        together = -(-num_decoding // 2) if self.takes_turns(in_flight) else num_decoding
        num_own = together * (1 + in_flight.num_drafted)
        known = (left, in_flight.backlog, num_decoding, num_own, budget)
        return prompt_tokens_per_step(*known, self.window.sizes)

    def _next_pieces(
        self, unread: Sequence[Request], budget: int, in_flight: InFlight, grow: Grow
    ) -> list[Piece]:
        pieces = list[Piece]()
        reads = in_flight.reads  # once the steps in flight are done
        for request in unread:
            if budget == 0 or request.state is not State.PREFILL:
                break
            if not self.prefixes.take(request, reads):
                continue
            piece = Piece.next_of(request, budget)
            count = len(piece.tokens.token_ids)
            if count > budget and pieces:  # a picture that is read as a whole comes first then
                break
            if not grow(request, request.num_cached + count):
                break
            budget = max(0, budget - count)
            pieces.append(piece)
            reads[request.number] = request.num_cached + count
        # Who came last may have had to go for the others.
        return [piece for piece in pieces if piece.request.state is State.PREFILL]

    def _may_begin_undrafted(self, request: Request) -> bool:
        """Whether no head need draft for its first token.

        Where that is its last one, the head would not read what others take from the prefix cache.
        """
        goes_on = request.text.draft_limit > 0 or not self.prefixes.takes
        return (self._is_free(request) and goes_on) or not self.layers

    def _is_free(self, request: Request) -> bool:
        """Whether who else is there may decide how much is drafted for it: its text does not
        depend on that, or nobody has asked for this text by a seed. Its law never does.
        """
        params = request.job.params
        return self.config.verifier == "coupled" or params.temperature == 0 or params.seed is None
