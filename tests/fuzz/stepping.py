"""Runs workloads on an engine that is stepped by hand, so that each run of one is the same.

What comes of it is compared with each request alone, see ``check``.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

from guided_spec.engine import runner
from guided_spec.engine.llm import LLM
from guided_spec.engine.options import Options
from guided_spec.engine.outputs import ChoiceOutput, Chunk, Completion, Load
from guided_spec.engine.request import Job, Request
from guided_spec.engine.runner import Wanted
from guided_spec.engine.setup import Setup
from guided_spec.errors import RequestCancelledError
from guided_spec.grammar import pipeline
from guided_spec.masks.constraint import Constraint
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed_form import PackedForm
from guided_spec.types import TokenLogprobs
from tests.fuzz.workloads import CHOICES, Ask, Workload, headed
from tests.models.tiny import kv_bytes_per_token
from tests.tiny_llm import make_llm

MOST_STEPS = 3000
CLOSE = 2e-3  # log-probabilities of forwards over other rows


class SteppedRunner:
    """The package's engine in the caller's thread. ``step`` is one round of it."""

    def __init__(self, wanted: Wanted) -> None:
        options = Options.from_dict(dict(wanted.options))
        self.setup = Setup.build(wanted.model, wanted.proposer, wanted.draft, options)
        self.engine = self.setup.engine

    @property
    def load(self) -> Load:
        """As of now."""
        return self.engine.load

    def require(self, job: Job) -> None:
        """It does all that a job can ask for."""

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.add(request)

    def step(self) -> None:
        """One round, behind all grammars: how long one compiles would be chance."""
        wait([request.job.grammar for request in self.engine if request.job.grammar is not None])
        self.engine.step()

    def close(self) -> None:
        self.engine.cancel_all()


class LateTables:
    """Stands where tables are made in a thread: each is made when it is told to, between steps."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def put(self, make: Callable[[], None] | None) -> None:
        if make is not None:
            self._waiting.append(make)

    def make_one(self) -> None:
        """The one that waited longest."""
        if self._waiting:
            self._waiting.pop(0)()


def stepped_llm(workload: Workload) -> LLM:
    """The engine of a workload."""
    target, draft = headed(workload.target)
    options = dict(workload.options)
    memory = None
    if workload.num_blocks is not None:
        memory = workload.num_blocks * BLOCK * kv_bytes_per_token(target)
        form = PackedForm.of(target, options["kernels"], options["max_model_len"])
        if form is not None:
            longest = 1 + options["num_draft_tokens"] + options["max_forced_tokens"]
            memory += options["max_batch_size"] * form.state_bytes(longest)
    with mock.patch.dict(runner.ENGINES, stepped="tests.fuzz.stepping:SteppedRunner"):
        return make_llm(
            target,
            workload.proposer,
            draft,
            engine="stepped",
            kv_memory_bytes=memory,
            **options,
        )


@cache
def plain_llm(target: str, kernels: str, verifier: str) -> LLM:
    """One that writes a text at a time, and keeps nothing of it."""
    options = {"kernels": kernels, "verifier": verifier, "prefix_cache": False}
    options |= {"grammar_tables": "off", "max_batch_size": 1, "max_model_len": 256}
    return stepped_llm(Workload("none", target, {**SIZES, **options}, None, None, ()))


SIZES = {"num_draft_tokens": 0, "max_forced_tokens": 0}


class Text(NamedTuple):
    """One sample: its completion, and all that was reported of it."""

    completion: Completion
    chunks: Sequence[Chunk]


class Run:
    """A workload on its way.

    chunks: what was reported, by request and sample. scores: of choices, by request.
    """

    def __init__(self, llm: LLM, workload: Workload) -> None:
        self.chunks: dict[tuple[int, int], list[Chunk]] = {}
        self.scores: dict[int, Future[ChoiceOutput]] = {}
        self._llm, self._asks = llm, workload.asks
        self._engine: Any = llm._runner
        self._late = _late_tables(llm, workload)
        self._leaving: list[tuple[int, Request]] = []

    def run(self) -> None:
        """To its end."""
        left = sorted(enumerate(self._asks), key=lambda pair: pair[1].joins)
        for number in range(MOST_STEPS):
            while left and left[0][1].joins <= number:
                self._submit(*left.pop(0))
            for when, request in self._leaving:
                if when == number:
                    request.cancel()
            if self._late is not None and number % 3 == 2:
                self._late.make_one()
            if not left and not self._engine.engine.has_work:
                return
            self._engine.step()
        raise AssertionError("it does not come to an end")

    def text(self, at: int, sample: int) -> Text:
        """What a request wrote."""
        chunks = self.chunks[at, sample]
        (end,) = (chunk.completion for chunk in chunks if chunk.completion is not None)
        assert chunks[-1].completion is end
        return Text(end, chunks)

    def _submit(self, at: int, ask: Ask) -> None:
        def report(chunk: Chunk) -> None:
            self.chunks.setdefault((at, chunk.sample_index), []).append(chunk)

        if ask.params is None:
            (asked,) = self._llm._chooser._ask([ask.prompt], CHOICES, "all")
            self.scores[at], requests = asked.output, [*asked.requests]
        else:
            sent = self._llm.submit([ask.prompt], ask.params, report, ask.manner)
            requests = [request for request in sent if request is not None]
        if ask.leaves is not None:
            self._leaving += [(ask.leaves, request) for request in requests]


def _late_tables(llm: LLM, workload: Workload) -> LateTables | None:
    """From here on tables come when the workload says so."""
    if workload.late_tables is None:
        return None
    late = LateTables()
    pipeline: Any = llm._grammars._backend
    pipeline._tables._waiting, pipeline._tables._thread = late, object()
    pipeline._tables._make = pipeline._table_here
    return late


def check(workload: Workload) -> None:
    """Run a workload, and fail where anything is other than it would be alone."""
    texts = 32 if workload.late_tables is None else workload.late_tables
    with mock.patch.object(pipeline, "TEXTS", texts), stepped_llm(workload) as llm:
        found = Run(llm, workload)
        found.run()
        _check_leaks(llm)
        for at, ask in enumerate(workload.asks):
            if ask.params is None:
                _check_scores(found.scores[at], workload, ask, f"request {at}")
            for sample in range(ask.num_samples):
                place, text = f"request {at}, sample {sample}", found.text(at, sample)
                check_alone(text, place)
                expected = _expected(llm, workload, ask, sample)
                if expected is not None:
                    _compare(text.completion, expected, place)


@contextmanager
def keeps_nothing() -> Iterator[None]:
    """Fail where anything of a request is alive after it, once nobody holds what it gave."""
    before = _alive()  # held, so that no id is given again
    known = {id(one) for one in before}
    yield
    kept = [one for one in _alive() if id(one) not in known]
    assert not kept, f"{len(kept)} requests and constraints are left"


def _alive() -> list[Request | Constraint]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) in (Request, Constraint)]


def _plain(workload: Workload) -> LLM:
    options = workload.options
    return plain_llm(workload.target, options["kernels"], options["verifier"])


def _expected(llm: LLM, workload: Workload, ask: Ask, sample: int) -> Completion | None:
    """What a sample of the request is alone; None where nothing is promised."""
    params = ask.params
    assert params is not None
    if params.temperature == 0 or workload.options["verifier"] == "coupled":
        llm = _plain(workload)
    elif "suffix" in workload.proposer:
        return None
    seed = None if params.seed is None else params.seed + sample
    alone = Ask(ask.prompt, replace(params, n=1, seed=seed))
    one = Run(llm, workload._replace(asks=[alone], late_tables=None))
    one.run()
    return one.text(0, 0).completion


def _check_scores(found: Future[ChoiceOutput], workload: Workload, ask: Ask, place: str) -> None:
    if isinstance(found.exception(), RequestCancelledError):
        return
    one = workload._replace(asks=[ask._replace(leaves=None)], late_tables=None)
    alone = Run(_plain(workload), one)
    alone.run()
    expected = alone.scores[0].result().logprobs
    for choice, logprob in found.result().logprobs.items():
        where = f"{place}: {choice!r} has {logprob}, alone {expected[choice]}"
        assert math.isclose(logprob, expected[choice], abs_tol=CLOSE), where


def _compare(found: Completion, expected: Completion, place: str) -> None:
    """A text that was cancelled is compared as far as it goes."""
    if isinstance(found.error, RequestCancelledError):
        length = len(found.token_ids)
        assert found.token_ids == expected.token_ids[:length], place
        return
    names = ("token_ids", "text", "finish_reason", "is_complete", "answer")
    for name in names:
        one, other = getattr(found, name), getattr(expected, name)
        assert one == other, f"{place}: {name} is {one!r}, alone {other!r}"
    one, other = repr(found.error), repr(expected.error)
    assert one == other, f"{place}: {one}, alone {other}"
    for name in ("prompt_tokens", "output_tokens", "steered", "ends_lost"):
        one, other = getattr(found.stats, name), getattr(expected.stats, name)
        assert one == other, f"{place}: {name} is {one}, alone {other}"
    _compare_logprobs(found.logprobs, expected.logprobs, place)


def _compare_logprobs(
    found: list[TokenLogprobs] | None, expected: list[TokenLogprobs] | None, place: str
) -> None:
    assert (found is None) == (expected is None), place
    for at, (one, other) in enumerate(zip(found or (), expected or (), strict=True)):
        where = f"{place}, token {at}: {one}, alone {other}"
        assert one.token_id == other.token_id, where
        assert len(one.top) == len(other.top), where
        pairs = [(one.logprob, other.logprob)]
        pairs += [(a.logprob, b.logprob) for a, b in zip(one.top, other.top, strict=True)]
        assert all(a == b or math.isclose(a, b, abs_tol=CLOSE) for a, b in pairs), where


def check_alone(text: Text, place: str) -> None:
    """What holds of every text, whatever else there is."""
    completion, stats = text.completion, text.completion.stats
    length = len(completion.token_ids)
    assert stats.resyncs == 0, place
    assert stats.output_tokens == length, place
    assert 0 <= stats.cached_tokens < max(stats.prompt_tokens, 1), place
    assert length <= stats.steps + sum(stats.accepted), place
    assert stats.steps <= length + (completion.error is not None), place
    pairs = zip(stats.accepted, stats.drafted, strict=False)
    assert all(taken <= most for taken, most in pairs), place
    assert stats.forced_accepted <= stats.forced <= sum(stats.drafted), place
    assert stats.tabled <= length, place
    assert stats.device_steps <= stats.steps, place
    if completion.logprobs is not None:
        assert [one.token_id for one in completion.logprobs] == completion.token_ids, place
    if len(text.chunks) > 1:
        assert "".join(chunk.text for chunk in text.chunks) == completion.text, place
        tokens = [token for chunk in text.chunks for token in chunk.token_ids]
        assert tokens == completion.token_ids, place
        logprobs = [one for chunk in text.chunks for one in chunk.logprobs]
        assert logprobs == (completion.logprobs or []), place
    if completion.trace is not None:
        steps = completion.trace.steps
        kept = [token.id for step in steps for token in step.tokens[: step.num_kept]]
        assert kept == completion.token_ids, place


def _check_leaks(llm: LLM) -> None:
    """An engine with nothing to do has all its slots and blocks."""
    engine: Any = llm._runner.engine  # type: ignore[attr-defined]
    load = engine.load
    assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0)
    assert not engine.target.states
