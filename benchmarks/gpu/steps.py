"""How long one engine step takes, with and without a grammar, by proposer and batch size."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.subject import (
    Subject,
    json_documents,
    with_draft,
)
from guided_spec.config import EngineConfig
from guided_spec.engine.options import Options
from guided_spec.engine.outputs import Chunk
from guided_spec.engine.process import frozen_heap
from guided_spec.engine.request import Job, Request, State
from guided_spec.engine.setup import Setup, plan_slots
from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams

STEP_PROPOSERS = ("none", "ngram", "eagle3:mask", "eagle3:validate")
TABLES: dict[str, dict[str, Any]] = {
    "off": {"grammar_tables": "off"},
    "host": {"grammar_tables": "always", "device_table_bytes": 0},
    "device": {"grammar_tables": "always"},
}
"""Who looks masks up in tables of the grammar, and what an engine is told for it."""
FILLER_DOCUMENTS = 32
RECORD = ("name", "age", "status", "tags", "address")
FLAT_RECORD = RECORD[:3]  # a list of them has few enough states for a table
ALIKE = 8  # tokens; texts that differ by more in their lengths are not compared
FEWEST_ITEMS = 100  # some 2,500 tokens at least, more than any run writes before it is stopped


class StepPlan(NamedTuple):
    """What to time.

    context: prompt tokens of every request. steps: how many are timed, after ``warm_up`` others in
    which all requests decode. num_draft_tokens: K of every proposer but ``none``. options: further
    fields of ``EngineConfig``. tables: of ``TABLES``, each an engine of its own, under a schema
    that fits a table; () leaves them to ``options``. drafts: folders of draft models and heads by
    proposer, without policies; what is not among them has the subject's EAGLE-3 head.

    Raises ConfigError for other tables.
    """

    proposers: Sequence[str] = STEP_PROPOSERS
    batches: Sequence[int] = (1, 8, 32, 64, 128, 256)
    temperatures: Sequence[float] = (0.0,)
    num_draft_tokens: int = 5
    context: int = 1000
    steps: int = 60
    warm_up: int = 16
    options: Mapping[str, Any] = MappingProxyType({})
    tables: Sequence[str] = ()
    drafts: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StepTime:
    """Milliseconds from commit to commit, all requests of the batch decoding.

    steps: how many were timed. tokens, drafted: per request and step. context: tokens of a text, on
    average over these steps. tabled: the share of the
    requests' steps whose masks the device took from tables. problem: why there are no figures, or
    fewer than asked for.
    """

    proposer: str
    num_draft_tokens: int
    batch: int
    temperature: float
    grammar: bool
    tables: str | None = None
    steps: int = 0
    median_ms: float | None = None
    p90_ms: float | None = None
    mean_ms: float | None = None
    tokens: float | None = None
    drafted: float | None = None
    context: float | None = None
    tabled: float | None = None
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Every field, for JSON."""
        return asdict(self)


class _Case(NamedTuple):
    proposer: str
    num_draft_tokens: int
    batch: int
    temperature: float
    grammar: bool
    tables: str | None


class _Counts(NamedTuple):
    """Over all requests so far. tabled: steps whose masks the device took from tables."""

    tokens: int
    drafted: int
    tabled: int


def endless_schema(properties: Sequence[str] = RECORD) -> dict[str, Any]:
    """A list of records that cannot end within a benchmark: one mask after another is filled.

    properties: that each of them has.
    """
    address = {"type": "object", "properties": {"street": {"type": "string"}}}
    known: dict[str, Any] = {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "status": {"enum": ["active", "paused"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {**address, "required": ["street"], "additionalProperties": False},
    }
    used = {name: known[name] for name in properties}
    record = {"type": "object", "properties": used, "required": [*used]}
    items = {**record, "additionalProperties": False}
    return {"type": "array", "items": items, "minItems": FEWEST_ITEMS}


def measure_steps(
    subject: Subject, plan: StepPlan, report: Callable[[str], None]
) -> Iterator[list[StepTime]]:
    """Time every combination, engine by engine; ``report`` is told each before it runs.

    Each proposer and batch size has an engine, on which steps without a grammar and with one are
    timed after one another, the same number of them, behind texts of one length: under a grammar
    more drafts are accepted, and longer texts take longer to attend to. So those without one are
    timed again behind longer prompts where that makes a difference. A batch for which there is no
    memory is reported with its problem.
    """
    if unknown := [name for name in plan.tables if name not in TABLES]:
        raise ConfigError("tables", ",".join(unknown), f"must be of {', '.join(TABLES)}")
    for proposer in with_draft(subject, plan.proposers):
        for batch in plan.batches:
            for tables in plan.tables or (None,):
                yield _measure_engine(subject, plan, (proposer, batch, tables), report)


def _measure_engine(
    subject: Subject,
    plan: StepPlan,
    which: tuple[str, int, str | None],
    report: Callable[[str], None],
) -> list[StepTime]:
    proposer, batch, tables = which
    depth = 0 if proposer == "none" else plan.num_draft_tokens
    kinds = [(t, grammar) for t in plan.temperatures for grammar in (False, True)]
    cases = [_Case(proposer, depth, batch, t, grammar, tables) for t, grammar in kinds]
    if tables is not None:
        plan = plan._replace(options={**plan.options, **TABLES[tables]})
    config = _config(subject, plan, batch, depth)
    if (problem := _lack_of_memory(subject, config)) is not None:
        return [StepTime(*case, problem=problem) for case in cases]
    options = Options(tokenizer=subject.tokenizer, config=config)
    draft = plan.drafts.get(proposer.partition(":")[0], subject.eagle3)
    setup = Setup.build(subject.model, proposer, draft, options)
    try:
        found = []
        for free, guided in zip(cases[::2], cases[1::2], strict=True):
            pair = [_time(setup, subject, plan, case, report) for case in (free, guided)]
            if longer := _difference(plan, *pair):
                behind = plan._replace(context=plan.context + longer)
                pair[0] = _time(setup, subject, behind, free, report)
            found += pair
        return found
    except torch.OutOfMemoryError:
        return [StepTime(*case, problem="out of memory") for case in cases]
    finally:
        setup.grammars.queue.close()


def _config(subject: Subject, plan: StepPlan, batch: int, depth: int) -> EngineConfig:
    config: Any = subject.model.config.get_text_config(decoder=True)
    piece = plan.options.get("prefill_tokens", EngineConfig().prefill_tokens)
    joining = -(-batch * plan.context // piece)  # steps in which the first requests decode already
    length = plan.context + (joining + plan.steps + plan.warm_up + 2) * (depth + 1) + 1
    own: dict[str, Any] = {
        "num_draft_tokens": depth,
        "max_batch_size": batch,
        "max_model_len": min(length, config.max_position_embeddings),
        "drafting": "always",
    }
    return EngineConfig(**{**own, **plan.options})


def _lack_of_memory(subject: Subject, config: EngineConfig) -> str | None:
    try:
        fitting = plan_slots(subject.model, config).num_slots
    except ConfigError as error:  # not even one
        return str(error)
    return None if fitting == config.max_batch_size else f"memory for {fitting} requests"


def _difference(plan: StepPlan, free: StepTime, guided: StepTime) -> int:
    """How much longer the prompts of free texts have to be for texts of one length."""
    if free.context is None or guided.context is None:
        return 0
    longer = round(guided.context - free.context)
    return longer if abs(longer) > ALIKE and plan.context + longer > 1 else 0


@torch.inference_mode()
def _time(
    setup: Setup, subject: Subject, plan: StepPlan, case: _Case, report: Callable[[str], None]
) -> StepTime:
    by = "" if case.tables is None else f", tables: {case.tables}"
    switch = "on" if case.grammar else "off"
    report(f"steps: {case.proposer}, {case.batch} requests, grammar {switch}{by}")
    requests, ended = _requests(setup, subject, plan, case)
    engine = setup.engine
    for request in requests:
        engine.add(request)
    clock: list[float] = []
    counts: list[_Counts] = []
    with frozen_heap():
        while engine.has_work and len(clock) <= plan.warm_up + plan.steps:
            engine.step()
            if all(request.state is State.DECODE and request.stats.steps for request in requests):
                clock.append(time.perf_counter())
                counts.append(_counts(requests))
            elif clock:
                break  # one has come to its end
    engine.cancel_all()
    failed = next((c.completion.error for c in ended if c.completion and c.completion.error), None)
    timed = clock[plan.warm_up :]
    if len(timed) < 2:
        return StepTime(*case, problem=str(failed or "the requests ended before the warm-up did"))
    steps = len(timed) - 1
    tokens, drafted, tabled = (
        (last - first) / (steps * case.batch)
        for first, last in zip(counts[plan.warm_up], counts[-1], strict=True)
    )
    context = statistics.fmean(one.tokens for one in counts[plan.warm_up :]) / case.batch
    spans = [(b - a) * 1e3 for a, b in zip(timed, timed[1:], strict=False)]
    problem = None if steps == plan.steps else "ended early"
    median, p90, mean = statistics.median(spans), _p90(spans), statistics.fmean(spans)
    return StepTime(*case, steps, median, p90, mean, tokens, drafted, context, tabled, problem)


def _requests(
    setup: Setup, subject: Subject, plan: StepPlan, case: _Case
) -> tuple[list[Request], list[Chunk]]:
    grammar = None
    if case.grammar:
        schema = endless_schema(RECORD if case.tables is None else FLAT_RECORD)
        grammar = setup.grammars.queue.submit(GrammarSpec.json_schema(schema))
        grammar.result()
    ended: list[Chunk] = []
    room = setup.max_model_len - plan.context
    params = SamplingParams(max_tokens=room, temperature=case.temperature, ignore_eos=True)
    requests = []
    prompts = _prompts(subject, plan.context, case.batch)
    for seed, prompt in enumerate(prompts):
        job = Job(prompt, params, setup.max_model_len, seed, grammar, is_streamed=False)
        requests.append(Request(job, setup.vocabulary, ended.append))
    return requests, ended


def _prompts(subject: Subject, length: int, count: int) -> Iterator[list[int]]:
    """Held-out documents one after another, each prompt from another place on."""
    documents = json_documents(max(FILLER_DOCUMENTS, count))
    texts = [f"{item.prompt}{item.answer}\n\n" for item in documents]
    rows = subject.tokenizer(texts, add_special_tokens=False)["input_ids"]
    for index in range(count):
        tokens: list[int] = []
        for row in itertools.islice(itertools.cycle(rows), index, None):
            tokens += row
            if len(tokens) >= length:
                break
        yield tokens[:length]


def _counts(requests: Sequence[Request]) -> _Counts:
    stats = [request.stats for request in requests]
    return _Counts(
        tokens=sum(len(request.text.tokens) for request in requests),
        drafted=sum(sum(one.drafted) for one in stats),
        tabled=sum(one.device_steps for one in stats),
    )


def _p90(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))]
