"""Many mixed requests through one engine, and no leaks: ``python -m benchmarks.soak.run``.

A random toy model serves JSON schemas, regexes, choices and free text under several proposers that
take turns, with all kinds of settings, broken requests and cancellations. Every request has to end
as it should, every finished text has to match its grammar (by jsonschema and re), and whenever the
engine is idle, nothing of the requests may be left. The exit code says whether all of that held.

Many requests in flight at one LLM: submitted, cancelled now and then, and judged as they end.

Whether a completion of the soak is what its case asks for: the first thing that is wrong.
"""

from __future__ import annotations

import queue
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from benchmarks.soak.census import Census, count_alive, find_leaks, take_census
from benchmarks.soak.model import CONTEXT, make_toy
from benchmarks.soak.proposer import Turns, TurnTaking
from benchmarks.soak.requests import GRAMMARS, Case, CaseSource
from guided_spec.cli.console import failures_as_messages, stderr, stdout
from guided_spec.core import ProposerContext
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Chunk, Completion, Manner
from guided_spec.engine.request import Request
from guided_spec.errors import BudgetTooSmallError, RequestCancelledError
from guided_spec.evaluate.measurement import is_valid
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.proposers import PROPOSERS
from guided_spec.types import SamplingParams


def find_wrong(case: Case, completion: Completion, vocabulary: Vocabulary) -> str | None:
    """What is wrong, None if nothing is. Texts are judged by jsonschema and re."""
    error = completion.error
    if case.is_cancelled and isinstance(error, RequestCancelledError):
        return _wrong_counts(case, completion)
    expected = case.error
    if type(error) is not (type(None) if expected is None else expected):
        wanted = "no error" if expected is None else expected.__name__
        return f"{wanted} was expected, not {type(error).__name__}: {error}"
    if error is not None:
        is_error = completion.finish_reason == "error"
        return None if is_error else f"an error with finish_reason={completion.finish_reason}"
    # A text that was steered to its end has reached it, though by its length.
    ended_by = "stop" if completion.is_complete else completion.finish_reason
    if ended_by not in case.reasons:
        return f"it ended by {ended_by}"
    return _wrong_counts(case, completion) or _wrong_text(case, completion, vocabulary)


def _wrong_counts(case: Case, completion: Completion) -> str | None:
    params, tokens = case.params, completion.token_ids
    if len(tokens) > params.max_tokens:
        return f"{len(tokens)} tokens of at most {params.max_tokens}"
    if len(tokens) != completion.stats.output_tokens:
        return f"{len(tokens)} tokens, {completion.stats.output_tokens} in the statistics"
    if (completion.logprobs is None) != (params.logprobs is None):
        return "logprobs are missing, or nobody asked for them"
    if completion.logprobs is not None:
        if [entry.token_id for entry in completion.logprobs] != tokens:
            return "logprobs of other tokens"
        if not all(entry.logprob <= 1e-6 for entry in completion.logprobs):
            return "a logprob above 0"
    return None


def _wrong_text(case: Case, completion: Completion, vocabulary: Vocabulary) -> str | None:
    text = completion.text
    if case.params.echo and isinstance(case.prompt, str):
        if not text.startswith(case.prompt):
            return "no echo of the prompt"
        text = text[len(case.prompt) :]
    if any(stop in text for stop in case.params.stop):
        return f"a stop string stands in {text!r}"
    has_ended = completion.token_ids[-1:] and completion.token_ids[-1] in vocabulary.stop_token_ids
    if completion.finish_reason == "stop" and not has_ended and not case.params.stop:
        return "it stopped without an end-of-text token"
    if has_ended and not is_valid(text, case.judged_by):
        return f"{text!r} does not match {case.judged_by}"
    return None


PATIENCE = 120.0  # seconds without any chunk: a request does not end
_CANCEL = 0.2  # chance of each that is to be cancelled, whenever another one ends


@dataclass(slots=True)
class Tally:
    """What became of the requests so far.

    requests: submitted. ends: completions by (kind of case, how it ended). tokens: generated.
    wrong: what was not as it has to be.
    """

    requests: int = 0
    tokens: int = 0
    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, case: Case, completion: Completion, wrong: str | None) -> None:
        """Count one completion."""
        self.tokens += len(completion.token_ids)
        end = str(completion.finish_reason)
        if isinstance(completion.error, RequestCancelledError):
            end = "cancelled"
        self.ends[case.kind, end] += 1
        if wrong is not None:
            self.wrong.append(f"{case.kind}: {wrong}; {case.prompt!r:.60} {case.params}")


class _Flight(NamedTuple):
    """A case on its way. requests: None for those that failed at once. missing: its completions."""

    case: Case
    requests: list[Request | None]
    missing: list[int]


class SoakRun:
    """Keeps a number of requests in flight; every end is judged.

    in_flight: requests at once. seed: of the cancellations.
    """

    def __init__(self, llm: LLM, cases: CaseSource, *, in_flight: int = 48, seed: int = 0) -> None:
        self._llm = llm
        self._cases = cases
        self._in_flight = in_flight
        self._dice = random.Random(seed)
        self._flights: dict[int, _Flight] = {}
        self._chunks: queue.SimpleQueue[tuple[int, Chunk]] = queue.SimpleQueue()
        self.tally = Tally()

    def run(self, num_requests: int) -> None:
        """So many more requests, each to its end; some of them stream."""
        last = self.tally.requests + num_requests
        while self.tally.requests < last or self._flights:
            while self.tally.requests < last and len(self._flights) < self._in_flight:
                self._submit()
            if not self._take():
                self.tally.wrong.append(f"{len(self._flights)} requests do not end")
                self._flights.clear()
                return

    def _submit(self) -> None:
        number = self.tally.requests
        self.tally.requests += 1
        case = self._cases.draw()
        missing = list(range(case.params.n))
        manner = Manner(is_streamed=self._dice.random() < 0.2, is_traced=False)
        requests = self._llm.submit(
            [case.prompt], case.params, lambda chunk: self._chunks.put((number, chunk)), manner
        )
        self._flights[number] = _Flight(case, requests, missing)

    def _take(self) -> bool:
        """One chunk; False where none comes any more."""
        try:
            number, chunk = self._chunks.get(timeout=PATIENCE)
        except queue.Empty:
            return False
        if chunk.completion is None:
            return True
        flight = self._flights.get(number)
        if flight is None or chunk.sample_index not in flight.missing:
            self.tally.wrong.append(f"request {number} ended twice")
            return True
        flight.missing.remove(chunk.sample_index)
        wrong = find_wrong(flight.case, chunk.completion, self._llm.vocabulary)
        self.tally.add(flight.case, chunk.completion, wrong)
        if not flight.missing:
            del self._flights[number]
        self._cancel_some()
        return True

    def _cancel_some(self) -> None:
        for flight in self._flights.values():
            if flight.case.is_cancelled and self._dice.random() < _CANCEL:
                for request in flight.requests:
                    if request is not None:
                        request.is_cancelled = True


_NAME = "soak"
_MOST_SHOWN = 20
_WITNESSES = (
    SamplingParams(max_tokens=30),
    SamplingParams(max_tokens=30, temperature=1.0, seed=1),
    SamplingParams(max_tokens=60, grammar=GRAMMARS["json"][0]),
    SamplingParams(max_tokens=60, grammar=GRAMMARS["regex"][1], temperature=1.0, seed=2),
)


class Plan(NamedTuple):
    """How much of what.

    requests, steps: the run goes on until there were as many of both. seed: of all that is drawn.
    checks: how often the engine is left idle and looked through. in_flight: requests at once;
    batch: those that decode together. growth: resident bytes that may come on top of what the
    process takes after the first tenth. cache_bytes: for compiled grammars. turns: of proposers.
    """

    requests: int = 20_000
    steps: int = 0
    seed: int = 0
    checks: int = 20
    in_flight: int = 96
    batch: int = 32
    growth: int = 96 * 2**20
    cache_bytes: int = 4 * 2**20
    turns: Turns = Turns()


class SoakReport(NamedTuple):
    """What was found. censuses: of every check, the first one after the warm-up."""

    tally: Tally
    steps: int
    seconds: float
    censuses: tuple[Census, ...]
    wrong: tuple[str, ...]


def main(
    requests: Annotated[int, typer.Option(help="Requests at least.")] = 20_000,
    steps: Annotated[int, typer.Option(help="Engine steps at least.")] = 0,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    in_flight: Annotated[int, typer.Option(help="Requests at once.")] = 96,
    batch: Annotated[int, typer.Option(help="Requests that decode together.")] = 32,
) -> None:
    """Mixed requests until there were as many requests, and as many engine steps, as asked for."""
    with failures_as_messages():
        report = soak(Plan(requests, steps, seed, in_flight=in_flight, batch=batch))
    _print(report)
    if report.wrong:
        raise typer.Exit(1)


def soak(plan: Plan) -> SoakReport:
    """Run the plan on a toy model of its own."""
    others = count_alive()
    toy, made = make_toy(), list[TurnTaking]()
    started = time.perf_counter()
    with (
        _registered(plan.turns, made),
        LLM(
            toy.model,
            _NAME,
            4,
            draft=toy.draft,
            tokenizer=toy.tokenizer,
            max_forced_tokens=8,
            max_model_len=CONTEXT,
            max_batch_size=plan.batch,
            grammar_cache_bytes=plan.cache_bytes,
        ) as llm,
    ):
        proposer = made.pop()
        before = _witness(plan, llm, proposer)
        run = SoakRun(llm, CaseSource(plan.seed, _least(llm)), in_flight=plan.in_flight)
        censuses, wrong = _run_checked(plan, run, llm, proposer, others)
        wrong = [*run.tally.wrong, *wrong]
        if _witness(plan, llm, proposer) != before:
            wrong.append("a request that came first gives another text at the end")
        seconds = time.perf_counter() - started
        return SoakReport(run.tally, proposer.num_steps, seconds, censuses, tuple(wrong))


@contextmanager
def _registered(turns: Turns, made: list[TurnTaking]) -> Iterator[None]:
    """The proposer of the soak, under its name; what the engine makes of it goes to ``made``."""

    def make(context: ProposerContext) -> TurnTaking:
        made.append(TurnTaking(context, turns))
        return made[0]

    PROPOSERS[_NAME] = make
    try:
        yield
    finally:
        del PROPOSERS[_NAME]


class _Checked(NamedTuple):
    censuses: tuple[Census, ...]
    wrong: list[str]


def _run_checked(
    plan: Plan, run: SoakRun, llm: LLM, proposer: TurnTaking, others: Counter[type]
) -> _Checked:
    censuses, wrong = list[Census](), list[str]()
    share = max(1, plan.requests // plan.checks)
    while run.tally.requests < plan.requests or proposer.num_steps < plan.steps:
        run.run(share)
        counts = f"{run.tally.requests} requests, {proposer.num_steps} steps"
        stderr().print(f"{counts}, {len(run.tally.wrong) + len(wrong)} wrong")
        if run.tally.requests * 10 < plan.requests:
            continue  # still warming up
        censuses.append(take_census(llm, proposer, others))
        leaks = find_leaks(censuses[0], censuses[-1], plan.growth)
        wrong += [f"after {run.tally.requests} requests: {leak}" for leak in leaks]
    return _Checked(tuple(censuses), wrong)


def _least(llm: LLM) -> Mapping[GrammarSpec, int]:
    """The smallest ``max_tokens`` that is taken for each of the grammars that recur."""
    found = {}
    for spec in (spec for specs in GRAMMARS.values() for spec in specs):
        try:
            llm.generate("A", SamplingParams(max_tokens=1, grammar=spec, complete=True))
            found[spec] = 1
        except BudgetTooSmallError as error:
            found[spec] = error.least or 1
    return found


def _witness(plan: Plan, llm: LLM, proposer: TurnTaking) -> list[list[int]]:
    """The texts of a few requests, each alone, under every proposer."""
    texts = []
    for name in plan.turns.names:
        proposer.chosen = name
        for params in _WITNESSES:
            texts.append(llm.generate("The name of the cat", params)[0].token_ids)
    proposer.chosen = None
    return texts


def _print(report: SoakReport) -> None:
    tally, console = report.tally, stdout()
    ends = ("stop", "length", "error", "cancelled")
    table = Table("kind of request", *ends)
    for kind in sorted({kind for kind, _ in tally.ends}):
        table.add_row(kind, *(str(tally.ends[kind, end]) for end in ends))
    table.add_row("all", *(str(_sum(tally, end)) for end in ends))
    console.print(table)
    if report.censuses:
        console.print(_census_table(report.censuses))
    console.print(
        f"{tally.requests} requests, {tally.tokens} tokens, {report.steps} steps, "
        f"{report.seconds:.0f} s; {len(report.censuses)} checks while idle"
    )
    for wrong in report.wrong[:_MOST_SHOWN]:
        console.print(f"WRONG: {wrong}")
    console.print(f"{len(report.wrong)} wrong" if report.wrong else "nothing wrong")


def _sum(tally: Tally, end: str) -> int:
    return sum(count for (_, each), count in tally.ends.items() if each == end)


def _census_table(censuses: Sequence[Census]) -> Table:
    """What is alive while the engine is idle: after the warm-up, at most, and at the end."""
    table = Table("alive while idle", "after the warm-up", "most", "at the end")
    rows = {name: [c.alive[name] for c in censuses] for name in censuses[0].alive}
    names = ("busy_slots", "held_slots", "tensors", "threads", "native_threads")
    rows |= {name.replace("_", " "): [getattr(c, name) for c in censuses] for name in names}
    for name, label in (("cached_bytes", "cached grammars"), ("resident_bytes", "resident")):
        rows[f"{label} MiB"] = [getattr(c, name) // 2**20 for c in censuses]
    for name, counts in rows.items():
        table.add_row(name, *(str(count) for count in (counts[0], max(counts), counts[-1])))
    return table


if __name__ == "__main__":
    typer.run(main)
