"""Documents behind long prompts, shared or not, here and in vLLM.

``python -m benchmarks.long_prompts --work DIR`` prints seconds, and how many prompt
tokens were found in the prefix cache.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table

from benchmarks.gpu.lmdeploy_attention import provide_flash_attention
from benchmarks.gpu.peers import VllmEnvironment, start_vllm, vllm_grammar
from benchmarks.gpu.run import GpuPlan, folders
from benchmarks.gpu.subject import (
    Subject,
    json_documents,
    load_subject,
    without_weights,
)
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError
from guided_spec.evaluate.measurement import WorkItem
from guided_spec.ops.attention.flash_attention import is_installed
from guided_spec.ops.host import free_memory
from guided_spec.types import SamplingParams

MAX_TOKENS = 128


class Case(NamedTuple):
    """Documents of one run: shared tokens in front of each, own ones behind; how many at a time."""

    shared: int
    own: int
    requests: int
    batch: int


CASES = {"shared": Case(3000, 0, 96, 64), "long": Case(0, 16_000, 16, 16)}


class Found(NamedTuple):
    """One run of an engine that has read nothing before; None for what vLLM does not say."""

    case: str
    engine: str
    prefix_cache: str
    seconds: float | None
    tokens_per_second: int | None
    prompt_tokens: int
    cached_tokens: int | None
    problem: str | None = None


class Work(NamedTuple):
    """The prompts of a case, token ids, and their documents."""

    prompts: list[list[int]]
    items: list[WorkItem]


def main(  # noqa: PLR0913 - the options of a command
    work: Annotated[Path | None, typer.Option(help="Where the widened model is kept.")] = None,
    cases: Annotated[str, typer.Option(help=f"Some of {', '.join(CASES)}.")] = ",".join(CASES),
    proposers: Annotated[str, typer.Option(help="Names, comma-separated.")] = "none,eagle3",
    scale: Annotated[float, typer.Option(help="Of the prompts' lengths.")] = 1.0,
    flash_attention: Annotated[
        Path | None, typer.Option(help="vLLM's library of FlashAttention 3, to run with that too.")
    ] = None,
    vllm_site: Annotated[str | None, typer.Option(help="Folder that vLLM is in.")] = None,
    vllm_methods: Annotated[str, typer.Option(help="none, eagle3.")] = "none,eagle3",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cuda",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    output: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Seconds for documents behind long prompts, with the prefix cache and without it."""
    found: list[Found] = []

    def keep(one: Found) -> None:
        found.append(one)
        if output is not None:
            records = [one._asdict() for one in found]
            output.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")

    with failures_as_messages(), folders(GpuPlan(work=work), stdout().print) as paths:
        subject = load_subject(*paths, device=device, dtype=dtype)
        works = {name: _work(subject, _case(name), scale) for name in cases.split(",")}
        for one in _measure_here(subject, proposers.split(","), works, flash_attention):
            keep(one)
        # The other engine wants the memory that the weights take here.
        subject = without_weights(subject)
        free_memory(torch.device(device))
        if vllm_site is not None:
            for method in vllm_methods.split(","):
                for one in _measure_vllm(subject, method, works, VllmEnvironment(site=vllm_site)):
                    keep(one)
    table = Table(*Found._fields)
    for one in found:
        table.add_row(*("" if value is None else str(value) for value in one))
    stdout().print(table)


def _case(name: str) -> Case:
    if name not in CASES:
        raise ConfigError("cases", name, f"must be some of {', '.join(CASES)}")
    return CASES[name]


def _work(subject: Subject, case: Case, scale: float) -> Work:
    """Shared and own tokens are text of all documents, over and over, from another one on each."""
    items = json_documents(case.requests)
    documents = [list(subject.tokenizer(str(item.prompt))["input_ids"]) for item in items]
    line = [token for text in documents for token in text]
    shared, own = int(case.shared * scale), int(case.own * scale)
    line *= (shared + own) // len(line) + 2
    prompts = []
    for index, text in enumerate(documents):
        first = sum(len(text) for text in documents[:index]) if own else 0
        prompts.append([*line[:shared], *line[first : first + own], *text])
    return Work(prompts, items)


def _measure_here(
    subject: Subject, proposers: Sequence[str], works: dict[str, Work], library: Path | None
) -> Iterator[Found]:
    """library: of FlashAttention 3, for a second round."""
    for with_library in (False, True)[: 1 + (library is not None)]:
        if with_library and library is not None:
            provide_flash_attention(library)
            is_installed.cache_clear()
        for (name, what), proposer in product(works.items(), proposers):
            for one in _measure(subject, proposer, name, what):
                yield one._replace(
                    engine=f"{proposer}, FlashAttention" if with_library else proposer
                )


def _measure(subject: Subject, proposer: str, name: str, work: Work) -> Iterator[Found]:
    is_cached = {"on": True, "off": False} if CASES[name].shared else {"on": True}
    for cache, is_on in is_cached.items():
        params = [_params(item) for item in work.items]
        with LLM(
            subject.model,
            proposer,
            draft=subject.eagle3 if "eagle3" in proposer else None,
            tokenizer=subject.tokenizer,
            max_batch_size=CASES[name].batch,
            max_model_len=_longest([work]),
            prefix_cache=is_on,
        ) as llm:
            llm.compile([item.grammar for item in work.items if item.grammar is not None])
            began = time.perf_counter()
            stats = [output.stats for output in llm.generate(work.prompts, params)]
            seconds = time.perf_counter() - began
        written = sum(one.output_tokens for one in stats)
        cached = sum(one.cached_tokens for one in stats)
        read = sum(one.prompt_tokens for one in stats)
        speed = round(written / seconds)
        yield Found(name, proposer, cache, round(seconds, 2), speed, read, cached)


def _params(item: WorkItem) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, grammar=item.grammar, seed=0)


def _longest(works: Sequence[Work]) -> int:
    return max(len(prompt) for work in works for prompt in work.prompts) + MAX_TOKENS + 1


def _measure_vllm(
    subject: Subject, method: str, works: dict[str, Work], where: VllmEnvironment
) -> Iterator[Found]:
    """All cases in one process, each behind a rehearsal and with an empty cache."""
    plan: dict[str, Any] = {
        "model": subject.folder,
        "eagle3": subject.eagle3,
        "method": method,
        "num_draft_tokens": 5,
        "max_model_len": _longest(list(works.values())),
        "memory_share": where.memory_share,
        "cells": [_cell(CASES[name].batch, work) for name, work in works.items()],
    }
    result = start_vllm(plan, where, method)
    done = result.get("cells", [])
    for at, (name, work) in enumerate(works.items()):
        read = sum(map(len, work.prompts))
        if at >= len(done):
            problem = result.get("problem", "not reached")
            yield Found(name, f"vllm {method}", "on", None, None, read, None, problem)
            continue
        seconds, tokens = done[at]["seconds"], done[at]["tokens"]
        speed = round(tokens / seconds)
        yield Found(name, f"vllm {method}", "on", round(seconds, 2), speed, read, None)


def _cell(batch: int, work: Work) -> dict[str, Any]:
    requests = [
        {"prompt_ids": prompt, "max_tokens": MAX_TOKENS, **vllm_grammar(item)}
        for prompt, item in zip(work.prompts, work.items, strict=True)
    ]
    return {"batch": batch, "temperature": 0.0, "requests": requests}


if __name__ == "__main__":
    typer.run(main)
