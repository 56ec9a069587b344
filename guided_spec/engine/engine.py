"""The loop: admit, read prompts, speculate, commit. One call of ``step`` is one round of it.

An engine is used by one thread; ``guided_spec.engine.llm`` runs it in a thread of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import torch

from guided_spec.config import EngineConfig
from guided_spec.core import (
    BegunPrompt,
    DecodeBatch,
    FinishedText,
    Proposer,
)
from guided_spec.engine.draft_length import PLAIN, DraftLengthPolicy, ForwardTimes, StepTaken
from guided_spec.engine.in_flight import Piece, StepInFlight, StepsInFlight
from guided_spec.engine.intake import Intake
from guided_spec.engine.parallel import is_parallel
from guided_spec.engine.prefixes import Prefixes
from guided_spec.engine.request import Request, State, count_step
from guided_spec.engine.scheduler import Load, Scheduler
from guided_spec.engine.slow_texts import SlowTexts
from guided_spec.engine.suspects import Suspects
from guided_spec.engine.target.prompts import group_prompts, prompt_tokens_per_step
from guided_spec.engine.target.scores import score_rows, scored_length
from guided_spec.engine.target.target import make_target
from guided_spec.errors import GuidedSpecError, ModelError, RequestCancelledError
from guided_spec.grammar.document import GrammarLimits
from guided_spec.guide import Batches
from guided_spec.models.causal_lm import CausalLM
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed.graph_pool import CaptureWindow, Stage
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.noise import noise_key
from guided_spec.ops.side_stream import SideStream
from guided_spec.proposers.drafting import NoDraft
from guided_spec.step import speculative_step
from guided_spec.trace.record import see_step

_LOG = logging.getLogger(__name__)


class Engine:
    """Continuous batching over fixed KV slots: requests enter and leave at any step.

    model: the target, with one slot for each request that may run at once.
    proposer: see ``guided_spec.proposers``. window: in which both capture CUDA graphs.

    Attributes: model, config, as they were passed.
    """

    def __init__(
        self,
        model: CausalLM,
        proposer: Proposer,
        config: EngineConfig,
        window: CaptureWindow | None = None,
    ) -> None:
        self.model = model
        self._window = window or CaptureWindow()
        self.config = config
        self._proposer, self._no_draft = proposer, NoDraft()
        # Who drafts nothing asks for no hidden states.
        self._layers = proposer.aux_hidden_layers if config.num_draft_tokens else ()
        self._target = make_target(model, self._layers)
        self._scheduler = Scheduler(model.num_slots)
        self._is_parallel = is_parallel(model.model)
        known = (self._scheduler, model, self._target.states, self._layers)
        self._prefixes = Prefixes(*known, uses_cache=config.prefix_cache)
        # Drafts then depend on what other texts sampled, equal requests with equal noise included.
        # Coupled texts do not depend on drafts.
        self._keys_vary = proposer.learns and config.verifier == "rejection"
        self._num_added = 0
        self._cancelled = SimpleQueue[Request]()  # since the last step, by any thread
        longest = config.longest_draft
        self._suspects = Suspects(self._scheduler)
        limits = config.grammar_limits or GrammarLimits()
        self._slow = SlowTexts(num_mask_words(model.vocab_size), limits.text_seconds)
        self._intake = Intake(self._scheduler, model, longest, is_parallel=self._is_parallel)
        self._in_flight = StepsInFlight()
        self._side = SideStream.none() if model.blocks is None else model.blocks.side
        self._carry: object | None = None  # of the last step that was committed, for the next one
        self._backlog = 0  # tokens of prompts that waited at most since none did
        self._batches = Batches(config, model.num_slots, model.vocab_size, model.device)
        self._policies: dict[bool, DraftLengthPolicy] = {}  # by whether they take turns
        self._num_drafted = config.num_draft_tokens  # of the last step
        self._ended: float | None = None  # when it did; None where nobody went on decoding

    @property
    def has_own_vocabulary(self) -> bool | None:
        """As of its proposer."""
        return self._proposer.has_own_vocabulary

    @property
    def takes_prefixes(self) -> bool:
        """Whether requests take from others what a prefix cache has of their prompts."""
        return self._prefixes.takes

    @property
    def turns_from(self) -> int | None:
        """How many texts have to decode for two halves of them to take turns; None: never."""
        return self._in_flight.turns_from

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended, or a step has to be cleared up."""
        return bool(self._scheduler) or bool(self._suspects)

    @property
    def load(self) -> Load:
        """As of now; what has ended in the current step may still be among them."""
        blocks, num_slots = self.model.blocks, self.model.num_slots
        running = num_slots - self._scheduler.num_free
        return Load(
            num_slots=num_slots,
            running=running,
            waiting=self._scheduler.num_waiting,
            num_blocks=num_slots if blocks is None else blocks.num_blocks,
            used_blocks=running if blocks is None else blocks.num_blocks - blocks.num_free,
        )

    def __iter__(self) -> Iterator[Request]:
        """Every request that has not ended."""
        return iter(self._scheduler)

    def add(self, request: Request) -> None:
        """Queue a request; it is admitted by a later ``step``."""
        self._num_added += 1
        request.number = self._num_added
        request.report_cancelled(self._cancelled.put)
        if self._keys_vary:
            request.text.noise_key = noise_key(request.text.noise_key, [self._num_added])
        self._scheduler.add(request)

    def capture(self) -> Iterator[None]:
        """Capture the CUDA graphs of steps of any size, one at each ``next``."""
        yield from self.model.capture(self._layers)
        yield from self._proposer.capture()

    def set_draft_lengths(self) -> None:
        """From here on, steps draft as much as pays, and texts take turns where that does.

        What forwards take is measured if they are captured.
        """
        if self._is_parallel:  # the clocks of several processes differ
            return
        times = ForwardTimes(self.model.forward_seconds(self._layers))
        count, num_slots = self.config.num_draft_tokens, self.model.num_slots
        # A linear state is that of the last step alone. Who drafts nothing waits for nothing.
        if self._proposer.may_draft(count) and not self.model.has_linear_state:
            self._in_flight.measure(times, 1 + count, num_slots)
        if count and self.config.drafting != "always":
            has_more = not self._layers and self._proposer.may_draft(0)
            turns = (False, True)
            self._policies = {
                turn: DraftLengthPolicy(count, times, has_more=has_more) for turn in turns
            }

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Inside, ``capture`` goes through what the graphs hold, and captures nothing."""
        self._window.stage = Stage.COMPILE
        try:
            yield
        finally:
            self._window.stage = Stage.CAPTURE

    def close_captures(self) -> None:
        """From here on, no step captures a graph."""
        self._window.stage = Stage.CLOSED

    def cancel_all(self) -> None:
        """End every request; the engine may go on with new ones."""
        self._in_flight.drop()
        for request in self._scheduler:
            self._slow.forget(request)
            request.cancel()
        self._drop_ended()

    @torch.inference_mode()
    def step(self) -> None:
        """One round. A request that fails is ended with its error; the others go on."""
        self._drop_ended()
        if not self._scheduler.running(State.DECODE):  # there may have been nothing to do since
            self._ended = None
        try:
            self._round()
        except Exception as error:  # of the model, a proposer or a matcher: nobody knows whose
            self._take_apart(error)
        self._drop_ended()

    def _round(self) -> None:
        if self._suspects.has_passed:
            self._commit(0)
            for request in self._suspects.next_group():
                self._requeue(request)
        for request, error in self._slow.take_failed():
            self._scheduler.end(request, error)
        # A forward that is launched reads no prompts: they come with the next one.
        is_ahead = self._target.is_ahead and bool(self._scheduler.running(State.DECODE))
        if not is_ahead:
            self._intake.admit()
        if not self._scheduler.running():
            self._intake.wait()
            return
        if not self._takes_turns():
            self._commit(0)
        pieces = [] if is_ahead else self._prefill()
        self._score()
        is_launched = self._launch(pieces)
        self._commit(1 if is_launched and self._takes_turns() else 0)
        if not is_launched and self._all_decode():
            self._slow.wait()

    def _take_apart(self, error: Exception) -> None:
        """End the request whose step raised; where several ran, each goes on without the others.

        Their keys and values, and what a proposer knows of them, are made anew.
        """
        running = [r for r in self._scheduler.running() if r.state is not State.FINISHED]
        if not running:
            raise error
        self._in_flight.drop()
        self._target.drop_ahead()
        self._carry = None
        if len(running) == 1 or self._is_parallel:
            self.fail(running, error)
            return
        self._batches.synchronize()
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self._suspects.split(running, error)
        for request in sorted(running, key=lambda one: -one.number):
            self._slow.forget(request)
            self._requeue(request)
            try:
                request.restart()
            except GuidedSpecError as failure:
                self._scheduler.end(request, failure)

    def _requeue(self, request: Request) -> None:
        """Take its slot from a request, which is admitted next and reads its text again."""
        slot = request.text.slot
        self._scheduler.requeue(request)
        self._release([slot])

    def _drop_ended(self) -> None:
        while not self._cancelled.empty():
            error = RequestCancelledError("the request was cancelled")
            request = self._cancelled.get()
            if self._slow.is_busy(request):
                self._slow.end_later(request, error)
            else:
                self._end(request, error)
        self._learn()
        slots = self._scheduler.remove_finished(self._in_flight.requests)
        if slots:
            self._release(slots)

    def _learn(self) -> None:
        """Show the proposer, where it wants to see them, the texts that have just ended well."""
        if not self._proposer.learns:
            return
        ended = [request.text for request in self._scheduler.running(State.FINISHED)]
        texts = [
            FinishedText(text.source, text.tokens, text.prompt_length)
            for text in ended
            if text.error is None
        ]
        if not texts:
            return
        try:
            self._proposer.learn(texts)
        except Exception:  # it drafts worse, and texts are right whatever is drafted
            _LOG.exception("the proposer has not learned from %d texts", len(texts))

    def _release(self, slots: Sequence[int]) -> None:
        self._target.states.drop(slots)
        try:
            self._proposer.release(slots)
        except Exception as error:  # whose state it then mixes up, nobody knows
            self.fail(self._scheduler.running(), error)
        self.model.release(slots)
        self._batches.forget_ended()  # else the last requests would be kept alive

    def fail(self, requests: Iterable[Request], error: Exception) -> None:
        """End ``requests`` with ``error``, in a ModelError if it is not one of ours."""
        if not isinstance(error, GuidedSpecError):
            cause = error
            error = ModelError(f"the step failed: {type(cause).__name__}: {cause}")
            error.__cause__ = cause
        for request in requests:
            self._end(request, error)

    def _end(self, request: Request, error: GuidedSpecError) -> None:
        self._slow.forget(request)
        self._scheduler.end(request, error)

    def _prefill(self) -> list[Piece]:
        """Read prompts, at most ``prefill_tokens`` tokens in all.

        Returns the pieces left to the verify forward of this step: a packed model reads them in the
        same forward as texts that decode. The last prompt token is left for the first speculative
        step. The forwards may still run when this returns.
        """
        rows = [r for r in self._between_steps(State.PREFILL) if not self._prefixes.is_shared(r)]
        # Who came first reads first: a later one may have to go, and to read it all again.
        unread = sorted((r for r in rows if r.num_unread), key=lambda request: request.number)
        pieces = list[Piece]()
        if self.model.is_packed:
            pieces = self._read_lines(unread)
        else:
            left = [request.num_unread for request in unread]
            for members, width in group_prompts(left, self.config.prefill_tokens):
                self._read([Piece.next_of(unread[at], width) for at in members])
        self._begin_decoding(rows)
        return pieces

    def _read_lines(self, unread: Sequence[Request]) -> list[Piece]:
        """Read the next pieces of prompts now, or return them for the verify forward."""
        num_decoding = len(self._scheduler.running(State.DECODE))
        budget = self.config.prefill_tokens
        left = [request.num_unread for request in unread]
        self._backlog = max(self._backlog, sum(left)) if left else 0
        if num_decoding:
            together = -(-num_decoding // 2) if self._takes_turns() else num_decoding
            num_own = together * (1 + self._num_drafted)
            known = (left, self._backlog, num_decoding, num_own, budget)
            budget = prompt_tokens_per_step(*known, self._window.sizes)
        pieces = self._next_pieces(unread, budget)
        for piece in [piece for piece in pieces if self._decodes_with_prompt(piece)]:
            piece.request.state = State.DECODE
        if self._scheduler.running(State.DECODE):
            return pieces
        if pieces:
            self._read(pieces)
        return []

    def _decodes_with_prompt(self, piece: Piece) -> bool:
        """Whether a text decodes in the step that reads the last piece of its prompt.

        One forward then reads a prompt and gives the first token, which no head drafts for.
        """
        request, tokens = piece
        return (
            tokens.start + len(tokens.token_ids) == len(request.text.tokens) - 1
            and request.after_prompt is State.DECODE
            and self._may_begin_undrafted(request)
            and not self._prefixes.is_awaited(request)
            and not self._slow.holds(request)
        )

    def _may_begin_undrafted(self, request: Request) -> bool:
        """Whether no head need draft for its first token.

        Where that is its last one, the head would not read what others take from the prefix cache.
        """
        goes_on = request.text.draft_limit > 0 or not self._prefixes.takes
        return (self._is_free(request) and goes_on) or not self._layers

    def _next_pieces(self, unread: Sequence[Request], budget: int) -> list[Piece]:
        pieces = list[Piece]()
        reads = self._in_flight.reads  # once the steps in flight are done
        for request in unread:
            if budget == 0 or request.state is not State.PREFILL:
                break
            if not self._prefixes.take(request, reads):
                continue
            piece = Piece.next_of(request, budget)
            count = len(piece.tokens.token_ids)
            if not self._grow(request, request.num_cached + count):
                break
            budget -= count
            pieces.append(piece)
            reads[request.number] = request.num_cached + count
        # Who came last may have had to go for the others.
        return [piece for piece in pieces if piece.request.state is State.PREFILL]

    def _begun(self) -> list[BegunPrompt]:
        """What the proposer reads now of prompts that are not at their end.

        Not of those that others take, together with the hidden states.
        """
        if not (self._layers and self._proposer.reads_prompts):
            return []
        prefill = self._between_steps(State.PREFILL)
        begun = [
            r
            for r in prefill
            if r.after_prompt is State.DECODE and not self._prefixes.is_awaited(r)
        ]
        told = list[BegunPrompt]()
        found = self._target.states.take([request.text.slot for request in begun])
        for request, states in zip(begun, found, strict=True):
            if states is not None:
                request.is_begun = True
                text = request.text
                told.append(BegunPrompt(text.slot, text.tokens, request.num_cached, states))
        return told

    def _read(self, pieces: Sequence[Piece]) -> None:
        self._target.read([piece.tokens for piece in pieces])
        self._have_read(pieces)

    def _have_read(self, pieces: Sequence[Piece]) -> None:
        for request, tokens in pieces:
            request.num_cached += len(tokens.token_ids)
            self._prefixes.remember(request, request.num_cached)

    def _grow(self, request: Request, length: int) -> bool:
        """Whether the request has blocks for so many tokens in all.

        Where there is none, those who came last go back to the queue, and lose nothing but time;
        False where that is the request itself. Who has ended in this step leaves by itself.
        """
        while not self.model.grow(request.text.slot, length):
            if self._in_flight:  # a request in flight cannot be requeued
                self._commit(0)
                continue
            going_on = [r for r in self._scheduler.running() if r.state is not State.FINISHED]
            last = max(going_on, key=lambda running: running.number)
            self._requeue(last)
            if last is request:
                return False
        return True

    def _begin_decoding(self, requests: Sequence[Request]) -> None:
        """Those whose prompts are read."""
        for request in requests:
            if request.state is State.PREFILL and not request.num_unread:
                request.state = request.after_prompt
                self._prefixes.hand_on(request)

    def _score(self) -> None:
        """One forward over the next row of every request that scores."""
        for request in self._scheduler.running(State.SCORE):
            if request.state is State.SCORE:  # else it had to go for one before it
                self._grow(request, scored_length(request))
        requests = self._scheduler.running(State.SCORE)
        if requests:
            score_rows(self.model, requests)

    def _decoding(self, pieces: Sequence[Piece]) -> list[Request]:
        """Requests that decode in this step, each with blocks for the longest draft."""
        requests = self._between_steps(State.DECODE)
        if not self._is_parallel:  # else they would have to agree on who is ready
            requests = self._slow.ready(requests)
        if self._takes_turns():
            most = -(-len(self._scheduler.running(State.DECODE)) // 2)
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
                self._grow(request, length)
        return [request for request in requests if request.state is State.DECODE]

    def _policy_of(self, requests: Sequence[Request]) -> DraftLengthPolicy | None:
        """The policy that chooses the draft length of their step; None: it drafts K tokens."""
        policy = self._policies.get(self._takes_turns())
        return policy if all(map(self._is_free, requests)) else None

    def _is_free(self, request: Request) -> bool:
        """Whether who else is there may decide how much is drafted for it: its text does not
        depend on that, or nobody has asked for this text by a seed. Its law never does.
        """
        params = request.job.params
        return self.config.verifier == "coupled" or params.temperature == 0 or params.seed is None

    def _batch(
        self, requests: Sequence[Request], pieces: Sequence[Piece], num_draft_tokens: int
    ) -> DecodeBatch:
        """What the step reads and decodes."""
        slots = [request.text.slot for request in requests]
        coming = {piece.tokens.slot for piece in pieces}
        features = self._target.states.take(slots, coming) if self._layers else ()
        texts = [request.text for request in requests]
        return replace(
            self._batches.make(texts, num_draft_tokens),
            features=features,
            traced=[at for at, request in enumerate(requests) if request.trace is not None],
            prompts=[piece.tokens for piece in pieces],
            begun=self._begun(),
        )

    def _launch(self, pieces: Sequence[Piece]) -> bool:
        """Launch a speculative step, if any text decodes. pieces: prompt pieces that it reads."""
        requests = self._decoding(pieces)
        if not requests:
            return False
        if not self._in_flight:
            self._side.after_current()
        # Some may have had to go for those who decode.
        pieces = [piece for piece in pieces if piece.request.state is not State.WAITING]
        policy, count = self._policy_of(requests), self.config.num_draft_tokens
        if policy is not None:
            num_read = sum(len(piece.tokens.token_ids) for piece in pieces)
            count = policy.num_draft_tokens(len(requests), num_read)
        with self._side.use():
            batch = self._batch(requests, pieces, max(0, count))
        started, self._num_drafted = time.perf_counter(), max(0, count)
        carry, self._carry = self._carry, None
        step = speculative_step(
            self._target,
            self._proposer if count != PLAIN else self._no_draft,
            batch,
            carry=carry,
            side=self._side if self._target.launches_at_once else None,
        )
        self._in_flight.launch(StepInFlight(requests, pieces, batch, step, policy, count, started))
        return True

    def _takes_turns(self) -> bool:
        """Whether one half of the texts drafts while the other one is verified."""
        return self._in_flight.take_turns(len(self._scheduler.running(State.DECODE)))

    def _between_steps(self, state: State) -> list[Request]:
        """Requests in ``state`` that are in no step in flight."""
        in_flight = self._in_flight.requests
        return [one for one in self._scheduler.running(state) if one not in in_flight]

    def _commit(self, left: int) -> None:
        """Commit steps in the order of their launch, until ``left`` are in flight."""
        while len(self._in_flight) > left:
            self._commit_step(self._in_flight.pop())

    def _commit_step(self, flight: StepInFlight) -> None:
        """Launch what does not depend on the host, then wait for the step and commit it."""
        requests, pieces, batch, step, policy, num_drafted, started = flight
        self._carry = step.launch_carry(self._side)
        if self._runs_ahead(flight):
            self._target.run_ahead(batch, step.accepted.token_ids)
        self._intake.bind_next()
        committed = flight.commit(self._target)
        count_step(requests, step, committed)
        ended = time.perf_counter()
        if policy is not None:
            drafted = step.num_drafted.wait().tolist()
            taken = ended - (self._ended or started)
            policy.count(StepTaken.of(batch, num_drafted, committed, drafted, taken))
        logprobs = step.token_logprobs(committed)
        self._have_read(pieces)
        seen = see_step(step, batch, started)
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
                self._prefixes.remember(request, length)
        if not self._is_parallel:
            self._slow.note(requests)
        self._begin_decoding([piece.request for piece in pieces])
        self._ended = ended

    def _runs_ahead(self, flight: StepInFlight) -> bool:
        """Whether the next forward is known now: all texts get one token in this step and the next,
        and nobody's prompt is to be read with it.
        """
        policy, now = flight.policy, flight.num_drafted
        stays_plain = policy is not None and policy.stays_plain(len(flight.batch))
        most = max(0, now, 0 if stays_plain else self.config.num_draft_tokens)
        drafts_nothing = stays_plain and now == PLAIN
        may_launch = not self._is_parallel and self._target.launches_at_once
        if not may_launch or self._in_flight or self._slow:
            return False
        if not drafts_nothing and self._proposer.may_draft(most):
            return False
        return self._all_decode() and not self._scheduler.ready()

    def _all_decode(self) -> bool:
        running = self._scheduler.running()
        return all(request.state is State.DECODE for request in running)
