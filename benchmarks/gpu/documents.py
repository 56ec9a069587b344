"""Whole documents: tokens per second, acceptance and validity, by proposer and batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.subject import (
    Subject,
    json_documents,
    with_draft,
)
from guided_spec.engine.llm import LLM
from guided_spec.errors import GuidedSpecError
from guided_spec.evaluate.measurement import (
    Measurement,
    WorkItem,
    measure_completions,
    run_items,
    valid_share,
)
from guided_spec.types import SamplingParams

DOCUMENT_PROPOSERS = ("none", "ngram", "eagle3", "chain:grammar_forced+eagle3")
FEWEST_REQUESTS = 32


class DocumentPlan(NamedTuple):
    """What to run.

    requests: None is twice the batch, and 32 at least. options: further fields of ``EngineConfig``.
    """

    proposers: Sequence[str] = DOCUMENT_PROPOSERS
    batches: Sequence[int] = (1, 8, 64, 256)
    temperatures: Sequence[float] = (0.0, 0.7)
    num_draft_tokens: int = 5
    max_tokens: int = 256
    requests: int | None = None
    options: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DocumentRun:
    """One engine on one workload. problem: why there is no measurement, or what was left out."""

    engine: str
    batch: int
    temperature: float
    measurement: Measurement | None = None
    problem: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Every field, and those of the measurement beside them, for JSON."""
        names = ("engine", "batch", "temperature", "problem")
        own = {name: getattr(self, name) for name in names}
        return own | ({} if self.measurement is None else self.measurement.as_dict())


def num_documents(plan: DocumentPlan, batch: int) -> int:
    """How many requests are sent with ``batch`` of them at a time."""
    return plan.requests or max(FEWEST_REQUESTS, 2 * batch)


def measure_documents(
    subject: Subject, plan: DocumentPlan, report: Callable[[str], None]
) -> Iterator[list[DocumentRun]]:
    """Write held-out documents with one proposer after another; ``report`` is told which is next.

    At temperature 0 ``same_text`` compares the texts with those of the first proposer. An engine
    that cannot be made (no memory) is reported with its problem.
    """
    for batch in plan.batches:
        for temperature in plan.temperatures:
            texts: list[str] = []
            for proposer in with_draft(subject, plan.proposers):
                report(f"documents: {proposer}, {batch} requests, temperature {temperature}")
                case = DocumentRun(proposer, batch, temperature)
                yield [_measure(subject, plan, case, texts)]


def _measure(
    subject: Subject, plan: DocumentPlan, case: DocumentRun, texts: list[str]
) -> DocumentRun:
    """``texts``: of the first proposer, filled by its run."""
    name, batch, temperature = case.engine, case.batch, case.temperature
    items = json_documents(num_documents(plan, batch))
    params = SamplingParams(max_tokens=plan.max_tokens, temperature=temperature, seed=0)
    depth = 0 if name == "none" else plan.num_draft_tokens
    options: dict[str, Any] = {"tokenizer": subject.tokenizer, "max_batch_size": batch}
    options |= {"max_model_len": _longest(subject, items) + plan.max_tokens + 1}
    options |= {"prefix_cache": False, **plan.options}  # the rehearsal reads the same prompts
    try:
        with LLM(subject.model, name, depth, draft=subject.eagle3, **options) as llm:
            completions, seconds = run_items(llm, items, params, rehearse=True)
    except (GuidedSpecError, torch.OutOfMemoryError) as error:
        return DocumentRun(name, batch, temperature, problem=str(error))
    if not texts:
        texts.extend(completion.text for completion in completions)
    same = [c.text == text for c, text in zip(completions, texts, strict=True)]
    share = sum(same) / len(same)
    valid = valid_share(completions, items)
    found = measure_completions(name, completions, seconds, valid=valid, same_text=share)
    failed = next((str(c.error) for c in completions if c.error is not None), None)
    return DocumentRun(name, batch, temperature, found, failed)


def _longest(subject: Subject, items: Sequence[WorkItem]) -> int:
    """Tokens of the longest prompt."""
    return max(len(subject.tokenizer(str(item.prompt))["input_ids"]) for item in items)
