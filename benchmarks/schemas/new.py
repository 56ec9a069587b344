"""What schemas that nobody has sent before cost who decodes: ``python -m benchmarks.schemas.new``.

Printed is this thread's CPU time. *Prepare*: the Python of a schema, native compiles aside, in this
process, and where a worker process has done what it can. *A token*: of a text that is drafted five
tokens at a time and taken whole, in two matchers and with a row each, behind bounds of its tokens
and without one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.table import Table

from benchmarks.schemas.corpus import padded_vocabulary
from benchmarks.serving.requests import make_requests
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.engine.process import frozen_heap
from guided_spec.evaluate.measurement import load_workload
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.ops.mask_words import num_mask_words

_DRAFT = 5  # tokens
_PROFILE = {
    "name": "Maria Lopez",
    "city": "Madrid",
    "occupation": "engineer",
    "company": "Acme Inc",
    "email": "mlopez@acme.com",
    "biography": "Maria has worked at Acme for ten years.",
    "age": 41,
}


class Case(NamedTuple):
    """A schema, and a text that it allows."""

    spec: GrammarSpec
    text: str


def main(
    tokenizer: Annotated[str, typer.Option(help="Hub id or folder.")] = str(
        bundled_asset("target")
    ),
    limit: Annotated[int, typer.Option(help="Schemas of a set.")] = 100,
    bounds: Annotated[str, typer.Option(help="Tokens at most, with commas.")] = "128,512",
) -> None:
    """Prepare schemas and follow their texts."""
    with failures_as_messages():
        loaded = load_tokenizer(tokenizer)
        vocabulary = padded_vocabulary(loaded)
        rooms = [int(bound) for bound in bounds.split(",")]
        names = ("prepare, ms", "by a worker", "a token, us", *(f"of {room}" for room in rooms))
        table = Table("set", *names)
        for name in ("documents", "json-unique"):
            table.add_row(name, *_measure(cases_of(name, limit), vocabulary, loaded, rooms))
        stdout().print(table)


def cases_of(name: str, count: int) -> list[Case]:
    """Requests of a set of ``benchmarks.serving`` whose right answer is known."""
    if name == "json-unique":
        text = json.dumps([_PROFILE, _PROFILE])
        found = [(request.grammar, text) for request in make_requests(name, count, 1.0, 0)]
    else:
        items = load_workload(Path(bundled_asset("heldout.jsonl")), count)
        found = [(item.grammar, _written(item.answer)) for item in items]
    return [Case(spec, text) for spec, text in found if spec is not None and spec.is_json]


def prepare(cases: Sequence[Case], pipeline: GrammarPipeline) -> list[float]:
    """Seconds of each; compiled once before, so that the native part is a look into a cache."""
    times = []
    for case in cases:
        pipeline.compile(case.spec)
        began = time.thread_time()
        pipeline.compile(case.spec)
        times.append(time.thread_time() - began)
    return times


def follow(compiled: CompiledGrammar, token_ids: Sequence[int], vocab_size: int) -> float:
    """Seconds of a whole text."""
    rows = np.zeros((_DRAFT, num_mask_words(vocab_size)), dtype=np.int32)
    began = time.thread_time()
    constraint = Constraint(compiled)
    for start in range(0, len(token_ids), _DRAFT):
        fork, draft = constraint.fork(), token_ids[start : start + _DRAFT]
        for index, token_id in enumerate(draft):
            fork.text.fill_next_token_bitmask(rows, index)
            fork.text.accept_token(token_id)
        constraint.commit(draft)
    return time.thread_time() - began


def _measure(
    cases: Sequence[Case], vocabulary: Vocabulary, tokenizer: Any, rooms: Sequence[int]
) -> list[str]:
    backend, endings = BackendChoice("auto", vocabulary), EndingsCache(vocabulary)
    # Without endings, no worker is started for small grammars: theirs are read apart.
    alone = GrammarPipeline(backend, GrammarLimits())
    make = partial(BackendChoice, "auto")
    pipeline = GrammarPipeline(backend, GrammarLimits(), endings=endings, make=make, name="auto")
    with frozen_heap(), closing(alone), closing(pipeline):
        for one in (alone, pipeline):
            prepare(cases[:1], one)  # what a vocabulary needs once
        here = prepare(cases, alone)
        for index, case in enumerate(cases):
            compiled: CompiledGrammar = alone.compile(case.spec)
            began = time.thread_time()
            endings.of(compiled)
            here[index] += time.thread_time() - began
        pipeline.warm_up()
        while pipeline.num_idle == 0:
            time.sleep(0.1)
        elsewhere = prepare(cases, pipeline)
        texts = [tokenizer(case.text, add_special_tokens=False)["input_ids"] for case in cases]
        tokens = []
        for room in (None, *rooms):
            seconds, count = 0.0, 0
            for case, token_ids in zip(cases, texts, strict=True):
                grammar: CompiledGrammar = pipeline.compile(case.spec)
                if room is not None and room <= len(token_ids):
                    continue
                if room is not None:
                    grammar = endings.bound(grammar, room, is_required=True)
                seconds += follow(grammar, token_ids, vocabulary.vocab_size)
                count += len(token_ids)
            tokens.append(f"{seconds / count * 1e6:.0f}" if count else "too long")
    return [*(f"{np.mean(times) * 1e3:.2f}" for times in (here, elsewhere)), *tokens]


def _written(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer)


if __name__ == "__main__":
    typer.run(main)
