"""One workload, several proposers and the baselines: what each costs, and are its texts valid?

Texts are judged by jsonschema and re, not by the grammar engine. While something is timed, Python's
garbage collector leaves the heap alone. The baseline is transformers' own ``generate`` with
xgrammar's logits processor, with the same weights.
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import torch
import xgrammar
from jsonschema.validators import validator_for

from guided_spec.bundled import bundled_asset
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.engine.process import frozen_heap
from guided_spec.errors import ConfigError
from guided_spec.evaluate.kinds import KindCounts
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.schema.dialect import for_python
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.unique_keys import UniqueKeysGrammar
from guided_spec.grammar.tools.reasoning import DEFAULT_MARKERS
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.kinds import require_one_of
from guided_spec.training.data.records import (
    GRAMMAR_KEYS,
    NOTE_KEYS,
    Line,
    read_file,
    read_grammar,
    refuse_unknown,
)
from guided_spec.types import SamplingParams

REQUEST_KEYS = ("prompt", "messages", "answer", *GRAMMAR_KEYS, *NOTE_KEYS)


class WorkItem(NamedTuple):
    """One request: a prompt (text or chat messages), its grammar, and the right ``answer``.

    task: of ``TASKS``; "" for a request of another workload.
    """

    prompt: Any
    grammar: GrammarSpec | None
    answer: Any = None
    task: str = ""


TASKS = ("extraction", "classification", "code", "tools", "arithmetic", "chat")
"""Workloads that come with the package; ``assets/tasks/README.md`` says where they are from."""


def load_tasks(names: Sequence[str], limit: int | None = None) -> list[WorkItem]:
    """Up to ``limit`` requests of each of ``TASKS`` that is named, one task after another.

    Raises ConfigError for a name that is none of them.
    """
    items = []
    for name in dict.fromkeys(names):
        require_one_of("tasks", name, TASKS)
        path = Path(bundled_asset("tasks")) / f"{name}.jsonl"
        items += [item._replace(task=name) for item in load_workload(path, limit)]
    return items


def load_workload(path: Path, limit: int | None = None) -> list[WorkItem]:
    """Read up to ``limit`` requests.

    A line is an object with ``prompt`` or ``messages``, a grammar as ``read_grammar`` takes it, and
    optionally ``answer``. Raises ConfigError naming the line.
    """
    items = [_read_item(line) for line in islice(read_file(path, "workload"), limit)]
    if not items:
        raise ConfigError("workload", str(path), "holds no requests")
    return items


def _read_item(line: Line) -> WorkItem:
    record = line.record
    prompt = record.get("prompt", record.get("messages"))
    if prompt is None:
        raise ConfigError("workload", line.source, "has neither prompt nor messages")
    try:
        refuse_unknown(record, REQUEST_KEYS)
        return WorkItem(prompt, read_grammar(record), record.get("answer"))
    except ConfigError as error:
        raise ConfigError("workload", line.source, str(error)) from error


@dataclass(frozen=True, slots=True)
class Measurement:
    """Totals over a workload.

    name: the proposer, or the engine compared with. batch_size: requests that decode together.
    requests, failed, tokens: counts; seconds: wall time of the whole workload.
    forwards: target forwards that decoded, a forward over a batch counted once a request.
    drafted, accepted: draft tokens; drafted_at, accepted_at: of them at each position of a draft.
    mask_microseconds: host time on masks per output token; None where it was not measured.
    valid: share of the finished outputs that match their grammar.
    same_text: share of the requests whose text equals that of ``none`` at the same batch size.
    task: of ``TASKS``; "" where all requests are measured together. draft: of the proposer's own,
    "" for that of the LLM. temperature: of all requests.
    kinds: drafts by kind of token, where the plan asked for it. error: of the first request that
    failed, "" if none did.
    """

    name: str
    requests: int
    failed: int
    tokens: int
    seconds: float
    forwards: int
    drafted: int = 0
    accepted: int = 0
    forced: int = 0
    mask_microseconds: float | None = None
    valid: float = 1.0
    same_text: float = 1.0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    batch_size: int = 1
    task: str = ""
    draft: str = ""
    temperature: float = 0.0
    kinds: KindCounts | None = None
    error: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of wall time."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def forwards_per_token(self) -> float:
        """Target forwards per output token."""
        return self.forwards / self.tokens if self.tokens else 0.0

    @property
    def acceptance_length(self) -> float:
        """Output tokens per target forward."""
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def percent_valid(self) -> str:
        """``valid`` as a table shows it, such as "98%"; "" where every request failed."""
        return f"{self.valid:.0%}" if self.failed < self.requests else ""

    def as_dict(self) -> dict[str, Any]:
        """Every field and every ratio, for JSON."""
        ratios = ("tokens_per_second", "forwards_per_token", "acceptance_length")
        kinds = None if self.kinds is None else self.kinds.as_dict()
        return asdict(self) | {name: getattr(self, name) for name in ratios} | {"kinds": kinds}


def measure_completions(
    name: str, completions: Sequence[Completion], seconds: float, *, valid: float, same_text: float
) -> Measurement:
    """Add up the statistics of one run of our engine."""
    stats = [completion.stats for completion in completions]
    errors = [completion.error for completion in completions if completion.error is not None]
    tokens = sum(s.output_tokens for s in stats)
    return Measurement(
        name=name,
        requests=len(completions),
        failed=len(errors),
        error=str(errors[0]) if errors else "",
        tokens=tokens,
        seconds=seconds,
        forwards=sum(s.steps for s in stats),
        drafted=sum(sum(s.drafted) for s in stats),
        accepted=sum(sum(s.accepted) for s in stats),
        forced=sum(s.forced_accepted for s in stats),
        mask_microseconds=sum(s.mask_seconds for s in stats) * 1e6 / max(tokens, 1),
        valid=valid,
        same_text=same_text,
        drafted_at=_by_position(s.drafted for s in stats),
        accepted_at=_by_position(s.accepted for s in stats),
    )


def _by_position(counts: Iterable[Sequence[int]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip_longest(*counts, fillvalue=0))


def valid_share(completions: Sequence[Completion], items: Sequence[WorkItem]) -> float:
    """The share of the finished texts that match their grammars; 1.0 where none has finished."""
    pairs = zip(completions, items, strict=True)
    return _share(is_valid(c.text, i.grammar) for c, i in pairs if c.finish_reason == "stop")


def is_valid(text: str, grammar: GrammarSpec | None) -> bool:
    """Whether ``text`` satisfies the spec; kinds without an independent judge pass.

    Of a spec with a start the part after the marker is judged; all of a text without the marker,
    which the prompt held then. A marker of token ids is not seen in a text: it passes.
    """
    if grammar is None:
        return True
    if grammar.start is not None:
        if not isinstance(grammar.start.marker, str | None):
            return True
        known = grammar.start.marker or next((m for m in DEFAULT_MARKERS if m in text), "")
        text = text.partition(known)[2] if known and known in text else text
    match grammar.kind:
        case "json_schema":
            return _is_valid_json(text, json.loads(grammar.source))
        case "json_object":
            return _is_valid_json(text, {"type": "object"})
        case "regex":
            with warnings.catch_warnings():  # of "[[", which Python may read otherwise one day
                warnings.simplefilter("ignore", FutureWarning)
                return re.fullmatch(grammar.source, text) is not None
        case "choice":
            return text in json.loads(grammar.source)
        case _:
            return True


def _is_valid_json(text: str, schema: Any) -> bool:
    """Under the draft that the schema names, formats included."""
    kind = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        value = json.loads(text)
    except ValueError:
        return False
    validator = kind(for_python(schema), format_checker=kind.FORMAT_CHECKER)
    return bool(validator.is_valid(value))


class BaselineRun(NamedTuple):
    """Texts in the order of the workload, output tokens in all, and wall seconds.

    ended: whether each text has come to its end within its tokens.
    """

    texts: list[str]
    tokens: int
    seconds: float
    ended: list[bool]


def run_transformers(
    model: Any,
    vocabulary: Vocabulary,
    prompts: Sequence[list[int]],
    items: Sequence[WorkItem],
    *,
    max_tokens: int,
) -> BaselineRun:
    """Greedy, one request at a time, grammars compiled beforehand (as they are for our engine)."""
    backend = XGrammarBackend(vocabulary)
    grammars = [None if i.grammar is None else backend.compile(i.grammar) for i in items]
    texts: list[str] = []
    ended: list[bool] = []
    tokens = 0
    with frozen_heap():
        started = time.perf_counter()
        for prompt, grammar in zip(prompts, grammars, strict=True):
            processors = []
            if grammar is not None:
                inner = grammar.inner if isinstance(grammar, UniqueKeysGrammar) else grammar
                processors.append(xgrammar.contrib.hf.LogitsProcessor(inner.compiled))
            input_ids = torch.tensor([prompt], device=model.device)
            with torch.inference_mode():
                output = model.generate(
                    input_ids,
                    attention_mask=torch.ones_like(input_ids),
                    do_sample=False,
                    max_new_tokens=max_tokens,
                    logits_processor=processors,
                    eos_token_id=list(vocabulary.stop_token_ids),
                    pad_token_id=vocabulary.stop_token_ids[0],
                )
            new = output[0, len(prompt) :].tolist()
            tokens += len(new)
            texts.append(vocabulary.decode(new))
            ended.append(bool(new) and new[-1] in vocabulary.stop_token_ids)
        seconds = time.perf_counter() - started
    return BaselineRun(texts, tokens, seconds, ended)


WARM_UP = 2  # requests run before the clock starts


class Plan(NamedTuple):
    """What to run.

    proposers: each is measured once, in this order, after plain constrained decoding (``none``,
        named here or not); ``name=draft`` is a proposer with another draft than the LLM's.
    with_transformers: its ``generate`` too, where one request decodes at a time, greedily.
    batch_sizes: requests that decode together, measured one after another.
    temperatures: measured one after another too; none of them leaves that to ``params``.
    by_kind: whether all texts are written once more, traced, for ``Measurement.kinds``.

    Items of different tasks are measured apart, one task after another.
    """

    items: Sequence[WorkItem]
    proposers: Sequence[str]
    params: SamplingParams
    with_transformers: bool
    batch_sizes: Sequence[int] = (1,)
    temperatures: Sequence[float] = ()
    by_kind: bool = False

    def rounds(self) -> list[Round]:
        """What an engine measures: every task at every temperature."""
        tasks: dict[str, list[WorkItem]] = {}
        for item in self.items:
            tasks.setdefault(item.task, []).append(item)
        sampled = [replace(self.params, temperature=each) for each in self.temperatures]
        return [
            Round(task, items, params)
            for params in sampled or [self.params]
            for task, items in tasks.items()
        ]


class Round(NamedTuple):
    """Requests that are timed together."""

    task: str
    items: Sequence[WorkItem]
    params: SamplingParams

    @property
    def key(self) -> tuple[str, float]:
        """Whose texts are compared."""
        return self.task, self.params.temperature


def run_plan(llm: LLM, plan: Plan, report: Callable[[str], None]) -> list[Measurement]:
    """Measure transformers (if asked), ``none`` and every proposer on the same weights.

    ``llm`` is closed: each measurement has an engine of its own, which drafts in every step.
    ``report`` is called with the name of each before it starts. Grammars are compiled before the
    clock starts. The texts of ``none`` are what the others' are compared with.
    """
    llm.close()  # its thread would share the cores with those that are measured

    def engine(name: str, draft: str | None, size: int) -> LLM:
        # What a proposer's drafts are worth must not decide whether they are made.
        changes: dict[str, Any] = {"max_batch_size": size, "drafting": "always"}
        return llm.with_proposer(name, draft, **changes)

    return measure_engines(engine, plan, report, llm if plan.with_transformers else None)


def measure_engines(
    engine: Callable[[str, str | None, int], LLM],
    plan: Plan,
    report: Callable[[str], None],
    stock: LLM | None = None,
) -> list[Measurement]:
    """``run_plan`` of engines that are made by ``engine(proposer, its own draft, requests)``.

    stock: whose model transformers runs; None leaves it out.
    """
    return [
        replace(measurement, batch_size=size)
        for size in plan.batch_sizes
        for measurement in _run_batch(engine, plan, size, report, stock)
    ]


def _run_batch(
    engine_of: Callable[[str, str | None, int], LLM],
    plan: Plan,
    size: int,
    report: Callable[[str], None],
    stock: LLM | None,
) -> Iterator[Measurement]:
    texts: dict[tuple[str, float], list[str]] = {}
    for proposer in dict.fromkeys(("none", *plan.proposers)):
        name, _, draft = proposer.partition("=")
        report(name)
        with engine_of(name, draft or None, size) as engine:
            for number, each in enumerate(plan.rounds()):
                # What steps capture, they do in the first round.
                most = max(WARM_UP, 0 if number else size)
                rehearse(engine, each.items, each.params, most)
                measured, written = _run_round(engine, each, plan, texts.get(each.key))
                texts.setdefault(each.key, written)
                yield replace(measured, name=name, draft=draft)
        if proposer == "none" and stock is not None and size == 1:
            report("transformers")
            for each in plan.rounds():
                if each.params.temperature == 0:
                    # In its own thread, as our engine is: its pool of CPU threads ends with it.
                    with ThreadPoolExecutor(1) as pool:
                        yield pool.submit(_run_baseline, stock, each, texts[each.key]).result()


class _Measured(NamedTuple):
    measurement: Measurement
    texts: list[str]


def _run_round(engine: LLM, each: Round, plan: Plan, texts: Sequence[str] | None) -> _Measured:
    """texts: of plain decoding; None where these are they."""
    completions, seconds = time_items(engine, each.items, each.params)
    written = [completion.text for completion in completions]
    pairs = zip(written, written if texts is None else texts, strict=True)
    measured = measure_completions(
        engine.proposer,
        completions,
        seconds,
        valid=valid_share(completions, each.items),
        same_text=_share(text == plain for text, plain in pairs),
    )
    kinds = _count_kinds(engine, each) if plan.by_kind else None
    about: dict[str, Any] = {"task": each.task, "temperature": each.params.temperature}
    return _Measured(replace(measured, kinds=kinds, **about), written)


def _count_kinds(engine: LLM, each: Round) -> KindCounts:
    matched = [replace(each.params, grammar=item.grammar) for item in each.items]
    prompts = [item.prompt for item in each.items]
    outputs = engine.generate(prompts, matched, on_error="return", trace=True)
    return KindCounts.from_traces(one.trace for one in outputs if one.trace is not None)


class Timed(NamedTuple):
    """One completion an item, in their order, and the wall seconds that all took together."""

    completions: list[Completion]
    seconds: float


def run_items(llm: LLM, items: Sequence[WorkItem], params: SamplingParams) -> Timed:
    """``time_items`` after a warm-up of as many requests as decode together; closes ``llm``."""
    with llm:
        rehearse(llm, items, params, max(WARM_UP, llm.config.max_batch_size))
        return time_items(llm, items, params)


def rehearse(
    llm: LLM, items: Sequence[WorkItem], params: SamplingParams, most: int | None = None
) -> None:
    """Compile the grammars, and run the first ``most`` items, or all: what steps capture then, no
    later one does."""
    llm.compile(item.grammar for item in items if item.grammar is not None)
    time_items(llm, items[:most], params)


def time_items(llm: LLM, items: Sequence[WorkItem], params: SamplingParams) -> Timed:
    """Generate for all items, each under its own grammar."""
    matched = [replace(params, grammar=item.grammar) for item in items]
    with frozen_heap():
        started = time.perf_counter()
        outputs = llm.generate([item.prompt for item in items], matched, on_error="return")
        seconds = time.perf_counter() - started
    return Timed([output.completions[0] for output in outputs], seconds)


def _run_baseline(llm: LLM, each: Round, texts: Sequence[str]) -> Measurement:
    prompts = [llm.encode(item.prompt) for item in each.items]
    model, vocabulary = llm.model, llm.vocabulary
    limit = each.params.max_tokens
    warm_up = slice(WARM_UP)
    run_transformers(model, vocabulary, prompts[warm_up], each.items[warm_up], max_tokens=limit)
    run = run_transformers(model, vocabulary, prompts, each.items, max_tokens=limit)
    judged = zip(run.texts, each.items, run.ended, strict=True)
    return Measurement(
        name="transformers",
        requests=len(prompts),
        failed=0,
        tokens=run.tokens,
        seconds=run.seconds,
        forwards=run.tokens,
        valid=_share(is_valid(t, i.grammar) for t, i, ended in judged if ended),
        same_text=_share(a == b for a, b in zip(run.texts, texts, strict=True)),
        task=each.task,
    )


def _share(flags: Iterable[bool]) -> float:
    counted = list(flags)
    return sum(counted) / len(counted) if counted else 1.0
