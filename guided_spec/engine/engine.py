"""The loop: admit, read prompts, speculate, commit. One call of ``step`` is one round of it.

An engine is used by one thread; ``guided_spec.engine.llm`` runs it in a thread of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue

import torch

from guided_spec.config import EngineConfig
from guided_spec.core import FinishedText, Proposer
from guided_spec.engine.outputs import Load
from guided_spec.engine.parallel import is_parallel
from guided_spec.engine.prefixes import Prefixes
from guided_spec.engine.request import Request, State
from guided_spec.engine.scheduler import Intake, Scheduler
from guided_spec.engine.slow_texts import SlowTexts
from guided_spec.engine.steps.draft_length import ForwardTimes
from guided_spec.engine.steps.in_flight import InFlight, Piece
from guided_spec.engine.steps.planner import Planner
from guided_spec.engine.steps.step_runner import StepRunner
from guided_spec.engine.steps.suspects import Suspects
from guided_spec.engine.target.pictures import PicturePlaces
from guided_spec.engine.target.scores import score_rows, scored_length
from guided_spec.engine.target.target import make_target
from guided_spec.errors import GuidedSpecError, RequestCancelledError
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.guide import Batches
from guided_spec.models.causal_lm import CausalLM
from guided_spec.models.packed.graph_pool import CaptureWindow, Stage
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.noise import noise_key
from guided_spec.ops.side_stream import SideStream

_LOG = logging.getLogger(__name__)


class Engine:
    """Continuous batching over fixed KV slots: requests enter and leave at any step.

    model: the target, with one slot for each request that may run at once.
    proposer: see ``guided_spec.proposers``. window: in which both capture CUDA graphs.
    pictures: the places of those of requests; None where the model reads none.

    Attributes: model, proposer, as they were passed. config: likewise, with K = 0 where the
        proposer never drafts. target: of the model. planner: of the next step. in_flight: what the
        last round left to the next one. pictures: the rows that requests hold.
    """

    def __init__(
        self,
        model: CausalLM,
        proposer: Proposer,
        config: EngineConfig,
        window: CaptureWindow | None = None,
        pictures: PicturePlaces | None = None,
    ) -> None:
        if not proposer.may_draft(config.num_draft_tokens):  # no lengths to choose from
            config = replace(config, num_draft_tokens=0)
        self.model, self.config, self.proposer = model, config, proposer
        self._window = window or CaptureWindow()
        # Who drafts nothing asks for no hidden states.
        layers = self._layers = proposer.aux_hidden_layers if config.num_draft_tokens else ()
        self.target = make_target(model, layers)
        scheduler = self._scheduler = Scheduler(model.num_slots)
        self._is_parallel = is_parallel(model.model)
        # Drafts then depend on what other texts sampled, equal requests with equal noise included.
        # Coupled texts do not depend on drafts.
        self._keys_vary = proposer.learns and config.verifier == "rejection"
        self._num_added = 0
        self._cancelled = SimpleQueue[Request]()  # since the last step, by any thread
        self._suspects = Suspects(scheduler)
        limits = config.grammar_limits or GrammarLimits()
        self._slow = SlowTexts(num_mask_words(model.vocab_size), limits.text_seconds)
        known = (scheduler, model, self.target.states, layers)
        prefixes = Prefixes(*known, uses_cache=config.prefix_cache)
        self.pictures = pictures or PicturePlaces(None)
        own = (scheduler, model, config.longest_draft, self.pictures, self.target.routes)
        self._intake = Intake(*own, is_parallel=self._is_parallel)
        self._batches = Batches(config, model.num_slots, model.vocab_size, model.device)
        shared = (proposer, scheduler, prefixes, self._slow)
        settings = (config, model, self._window)
        self.planner = Planner(*shared, *settings, layers=layers, is_parallel=self._is_parallel)
        side = SideStream.none() if model.blocks is None else model.blocks.side
        self._runner = StepRunner(
            *shared, target=self.target, intake=self._intake, batches=self._batches, side=side
        )
        self.in_flight = InFlight(config.num_draft_tokens)

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
        yield from self.proposer.capture()

    def set_draft_lengths(self) -> None:
        """From here on, steps draft as much as pays, and texts take turns where that does.

        What forwards take is measured if they are captured.
        """
        if not self._is_parallel:  # the clocks of several processes differ
            times = ForwardTimes(self.model.forward_seconds(self._layers))
            self.planner = self.planner.with_times(times)

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
        self.in_flight = self.in_flight.dropped()
        for request in self._scheduler:
            self._slow.forget(request)
            request.cancel()
        self._drop_ended()

    @torch.inference_mode()
    def step(self) -> None:
        """One round. A request that fails is ended with its error; the others go on."""
        self._drop_ended()
        if not self._scheduler.running(State.DECODE):  # there may have been nothing to do since
            self.in_flight = self.in_flight._replace(ended=None)
        try:
            self._round()
        except Exception as error:  # of the model, a proposer or a matcher: nobody knows whose
            self._take_apart(error)
        self._drop_ended()

    def _round(self) -> None:
        if self._suspects.has_passed:
            self._commit()
            for request in self._suspects.next_group():
                self._requeue(request)
        for request, error in self._slow.take_failed():
            self._scheduler.end(request, error)
        # A forward that is launched reads no prompts: they come with the next one.
        is_ahead = self.in_flight.ahead is not None and bool(self._scheduler.running(State.DECODE))
        if not is_ahead:
            self._intake.admit()
        if not self._scheduler.running():
            self._intake.wait()
            return
        if not self.planner.takes_turns(self.in_flight):
            self._commit()
        pieces = [] if is_ahead else self._read_prompts()
        self._score()
        requests = self.planner.decoding(pieces, self.in_flight, self._grow)
        if requests:
            plan = self.planner.plan(requests, pieces, self.in_flight)
            self.in_flight = self._runner.launch(plan, self.in_flight)
        self._commit(1 if requests and self.planner.takes_turns(self.in_flight) else 0)
        if not requests and self._scheduler.all_decode:
            self._slow.wait()

    def _read_prompts(self) -> Sequence[Piece]:
        """Read prompts; returns the pieces left to the forward of the next step.

        The forwards may still run when this returns.
        """
        waiting = self.planner.waiting(self.in_flight)
        self.in_flight = self.in_flight.with_backlog(waiting)
        prompts = self.planner.prompts(waiting, self.in_flight, self._grow)
        for pieces in prompts.alone:
            self._runner.read(pieces)
        self._runner.begin_decoding(waiting)
        return prompts.joined

    def _score(self) -> None:
        """One forward over the next row of every request that scores."""
        for request in self._scheduler.running(State.SCORE):
            if request.state is State.SCORE:  # else it had to go for one before it
                self._grow(request, scored_length(request))
        requests = self._scheduler.running(State.SCORE)
        if requests:
            score_rows(self.model, requests)

    def _commit(self, left: int = 0) -> None:
        """Commit steps in the order of their launch, until ``left`` are in flight."""
        while len(self.in_flight.steps) > left:
            oldest, *others = self.in_flight.steps
            self.in_flight = self.in_flight._replace(steps=tuple(others))
            self.in_flight = self._runner.commit(oldest, self.in_flight, self.planner)

    def _grow(self, request: Request, length: int) -> bool:
        """Whether the request has blocks for so many tokens in all.

        Where there is none, those who came last go back to the queue, and lose nothing but time;
        False where that is the request itself. Who has ended in this step leaves by itself.
        """
        while not self.model.grow(request.text.slot, length):
            if self.in_flight.steps:  # a request in flight cannot be requeued
                self._commit()
                continue
            going_on = [r for r in self._scheduler.running() if r.state is not State.FINISHED]
            last = max(going_on, key=lambda running: running.number)
            self._requeue(last)
            if last is request:
                return False
        return True

    def _take_apart(self, error: Exception) -> None:
        """End the request whose step raised; where several ran, each goes on without the others.

        Their keys and values, and what a proposer knows of them, are made anew.
        """
        running = [r for r in self._scheduler.running() if r.state is not State.FINISHED]
        if not running:
            raise error
        self.in_flight = self.in_flight.dropped()
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
                self.fail([request], error)
        self._learn()
        slots = self._scheduler.remove_finished(self.in_flight.requests)
        if slots:
            self._release(slots)
        self.pictures.release_ended(self.in_flight.requests)

    def _learn(self) -> None:
        """Show the proposer, where it wants to see them, the texts that have just ended well."""
        ended = self._scheduler.running(State.FINISHED) if self.proposer.learns else ()
        well = [request.text for request in ended if request.text.error is None]
        try:
            if well:
                texts = [FinishedText(one.source, one.tokens, one.prompt_length) for one in well]
                self.proposer.learn(texts)
        except Exception:  # it drafts worse, and texts are right whatever is drafted
            _LOG.exception("the proposer has not learned from %d texts", len(well))

    def _release(self, slots: Sequence[int]) -> None:
        self.target.states.drop(slots)
        self.target.routes.drop(slots)
        try:
            self.proposer.release(slots)
        except Exception as error:  # whose state it then mixes up, nobody knows
            self.fail(self._scheduler.running(), error)
        self.model.release(slots)
        self._batches.forget_ended()  # else the last requests would be kept alive

    def fail(self, requests: Iterable[Request], error: Exception) -> None:
        """End ``requests`` with ``error``, in a ModelError if it is not one of ours."""
        self._runner.fail(requests, error)
