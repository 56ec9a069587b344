"""Requests that begin alike: what they take with the prefix cache and without it.

``python -m benchmarks.shared_prompt --work DIR --device cuda`` prints seconds, and how many prompt
tokens were found in the cache.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from benchmarks.gpu.run import GpuPlan, folders
from benchmarks.gpu.subject import Subject, free_memory, json_documents, load_subject
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.engine.llm import LLM
from guided_spec.types import SamplingParams

__all__ = ["main"]


class Case(NamedTuple):
    """tokens: of the prompt that all share. requests: in all; batch: at a time."""

    tokens: int
    requests: int
    batch: int


def main(  # noqa: PLR0913 - the options of a command
    work: Annotated[Path | None, typer.Option(help="Where the widened model is kept.")] = None,
    proposers: Annotated[str, typer.Option(help="Names, comma-separated.")] = "none,eagle3",
    tokens: Annotated[int, typer.Option(help="Of the prompt that all share.")] = 3000,
    requests: Annotated[int, typer.Option(help="Documents in all.")] = 96,
    batch: Annotated[int, typer.Option(help="At a time.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cuda",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    output: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Seconds for documents behind one long prompt, with the prefix cache and without it."""
    case, found = Case(tokens, requests, batch), []
    table = Table(
        "proposer", "prefix cache", "s", "tokens/s", "prompt tokens", "found in the cache"
    )
    with failures_as_messages(), folders(GpuPlan(work=work), stdout().print) as paths:
        subject = load_subject(*paths, device=device, dtype=dtype)
        for proposer in proposers.split(","):
            for is_cached in (False, True):
                found.append(measure(subject, proposer, case, is_cached=is_cached))
                table.add_row(*(str(value) for value in found[-1].values()))
                stdout().print(json.dumps(found[-1]))
                free_memory(subject.model.device)
    stdout().print(table)
    if output is not None:
        output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def measure(subject: Subject, proposer: str, case: Case, *, is_cached: bool) -> dict[str, Any]:
    """One engine, which has read nothing before."""
    items = json_documents(case.requests)
    prompts = _prompts(subject, [str(item.prompt) for item in items], case.tokens)
    params = [SamplingParams(max_tokens=256, grammar=item.grammar, seed=0) for item in items]
    longest = max(len(prompt) for prompt in prompts) + 257
    with LLM(
        subject.model,
        proposer,
        draft=subject.eagle3 if "eagle3" in proposer else None,
        tokenizer=subject.tokenizer,
        max_batch_size=case.batch,
        max_model_len=longest,
        prefix_cache=is_cached,
    ) as llm:
        llm.compile([item.grammar for item in items if item.grammar is not None])
        began = time.perf_counter()
        stats = [output.stats for output in llm.generate(prompts, params)]
        seconds = time.perf_counter() - began
    written = sum(one.output_tokens for one in stats)
    return {
        "proposer": proposer,
        "prefix_cache": "on" if is_cached else "off",
        "seconds": round(seconds, 2),
        "tokens_per_second": round(written / seconds),
        "prompt_tokens": sum(one.prompt_tokens for one in stats),
        "cached_tokens": sum(one.cached_tokens for one in stats),
    }


def _prompts(subject: Subject, documents: Sequence[str], length: int) -> list[list[int]]:
    """Each document behind the same ``length`` tokens: text of all of them, over and over."""
    texts = [list(subject.tokenizer(document)["input_ids"]) for document in documents]
    line = [token for text in texts for token in text]
    shared = (line * (length // len(line) + 1))[:length]
    return [[*shared, *text] for text in texts]


if __name__ == "__main__":
    typer.run(main)
