"""Whole documents: tokens per second, acceptance and validity, by proposer and batch size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.limit import device_limit
from benchmarks.gpu.subject import (
    Subject,
    json_documents,
    with_draft,
)
from guided_spec.engine.llm import LLM
from guided_spec.errors import GuidedSpecError
from guided_spec.evaluate.measurement import (
    Measurement,
    Timed,
    WorkItem,
    measure_completions,
    rehearse,
    time_items,
    valid_share,
)
from guided_spec.proposers import takes_draft
from guided_spec.types import SamplingParams

DOCUMENT_PROPOSERS = ("none", "ngram", "eagle3", "chain:grammar_forced+eagle3")
FEWEST_REQUESTS = 32


class DocumentPlan(NamedTuple):
    """What to run.

    requests: None is twice the batch, and 32 at least. options: further fields of ``EngineConfig``.
    repeats: runs of each engine; where there are several, all engines are there at once and take
        turns, so that what else a shared host does meanwhile hits all of them alike.
    """

    proposers: Sequence[str] = DOCUMENT_PROPOSERS
    batches: Sequence[int] = (1, 8, 64, 256)
    temperatures: Sequence[float] = (0.0, 0.7)
    num_draft_tokens: int = 5
    max_tokens: int = 256
    requests: int | None = None
    options: Mapping[str, Any] = MappingProxyType({})
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class DocumentRun:
    """One engine on one workload. problem: why there is no measurement, or what was left out.

    seconds: of each run, where there were several and ``measurement`` is the median one.
    limit: tokens per second, see ``device_limit``.
    """

    engine: str
    batch: int
    temperature: float
    measurement: Measurement | None = None
    problem: str | None = None
    seconds: tuple[float, ...] = ()
    limit: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Every field, and those of the measurement beside them, for JSON."""
        own: dict[str, Any] = {
            "engine": self.engine,
            "batch": self.batch,
            "temperature": self.temperature,
        }
        own |= {"problem": self.problem, "seconds_of_runs": self.seconds, "limit": self.limit}
        measured = {} if self.measurement is None else self.measurement.as_dict()
        return own | measured | own


def num_documents(plan: DocumentPlan, batch: int) -> int:
    """How many requests are sent with ``batch`` of them at a time."""
    return plan.requests or max(FEWEST_REQUESTS, 2 * batch)


def measure_documents(
    subject: Subject, plan: DocumentPlan, report: Callable[[str], None]
) -> Iterator[list[DocumentRun]]:
    """Write held-out documents with each proposer; ``report`` is told which is next.

    At temperature 0 ``same_text`` compares the texts with those of the first proposer. An engine
    that cannot be made (no memory) is reported with its problem.
    """
    for batch, temperature in itertools.product(plan.batches, plan.temperatures):
        texts: list[str] = []
        names = with_draft(subject, plan.proposers)
        cases = [DocumentRun(name, batch, temperature) for name in names]
        # Those that take turns are there at once, and want the memory for it.
        for together in [cases] if plan.repeats > 1 else [[case] for case in cases]:
            yield _measure(subject, plan, together, texts, report)


def _measure(
    subject: Subject,
    plan: DocumentPlan,
    cases: Sequence[DocumentRun],
    texts: list[str],
    report: Callable[[str], None],
) -> list[DocumentRun]:
    """Runs of engines that take turns. ``texts``: of the first proposer, filled by its run."""
    batch, temperature = cases[0].batch, cases[0].temperature
    items = json_documents(num_documents(plan, batch))
    params = SamplingParams(max_tokens=plan.max_tokens, temperature=temperature, seed=0)
    engines, found = list[tuple[int, LLM]](), [*cases]
    with ExitStack() as opened:
        for at, case in enumerate(cases):
            report(f"documents: {case.engine}, {batch} requests, temperature {temperature}")
            try:
                llm = opened.enter_context(_make(subject, plan, case, items))
                rehearse(llm, items, params)
                engines.append((at, llm))
            except (GuidedSpecError, torch.OutOfMemoryError) as error:
                found[at] = replace(case, problem=str(error))
        rounds = [
            [time_items(llm, items, params) for _, llm in engines] for _ in range(plan.repeats)
        ]
        for (at, llm), *runs in zip(engines, *rounds, strict=True):
            judged = _judge(cases[at], items, runs, texts)
            found[at] = replace(judged, limit=_limit(subject, plan, llm, judged, runs[0]))
    return found


def _limit(
    subject: Subject, plan: DocumentPlan, llm: LLM, run: DocumentRun, timed: Timed
) -> float | None:
    head = subject.eagle3 if takes_draft(run.engine) else None
    depth = 0 if run.engine == "none" else plan.num_draft_tokens
    return device_limit(llm, timed.completions, run.batch, depth, head)


def _make(
    subject: Subject, plan: DocumentPlan, case: DocumentRun, items: Sequence[WorkItem]
) -> LLM:
    options: dict[str, Any] = {"tokenizer": subject.tokenizer, "max_batch_size": case.batch}
    options |= {"max_model_len": _longest(subject, items) + plan.max_tokens + 1}
    options |= {"prefix_cache": False, **plan.options}  # the rehearsal reads the same prompts
    depth = 0 if case.engine == "none" else plan.num_draft_tokens
    draft = subject.eagle3 if takes_draft(case.engine) else None
    return LLM(subject.model, case.engine, depth, draft=draft, **options)


def _judge(
    case: DocumentRun, items: Sequence[WorkItem], runs: Sequence[Timed], texts: list[str]
) -> DocumentRun:
    """The median of the runs, by its time."""
    completions, seconds = sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]
    if not texts:
        texts.extend(completion.text for completion in completions)
    same = [c.text == text for c, text in zip(completions, texts, strict=True)]
    share = sum(same) / len(same)
    valid = valid_share(completions, items)
    found = measure_completions(case.engine, completions, seconds, valid=valid, same_text=share)
    failed = next((str(c.error) for c in completions if c.error is not None), None)
    return replace(
        case, measurement=found, problem=failed, seconds=tuple(run.seconds for run in runs)
    )


def _longest(subject: Subject, items: Sequence[WorkItem]) -> int:
    """Tokens of the longest prompt."""
    return max(len(subject.tokenizer(str(item.prompt))["input_ids"]) for item in items)
