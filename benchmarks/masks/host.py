"""What the host does for each text of a step: ``python -m benchmarks.masks.host``.

Texts are written from right answers, and a step drafts K tokens of each under masks, one after
another, as a learned head does. No model runs: the target takes a random number of the drafts, and
the next right token. So the times are those of forks, rows, tokens, commit and batch alone.
"""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table

from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.config import EngineConfig
from guided_spec.evaluate.measurement import load_workload
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.guide import Guide, GuidedText
from guided_spec.masks.lookahead import Lookahead
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.step import commit
from guided_spec.types import Accepted, SamplingParams


class Document(NamedTuple):
    """A grammar, and the tokens of a text of it, the end-of-text token included."""

    grammar: GrammarSpec
    token_ids: list[int]


class StepTimes(NamedTuple):
    """CPU seconds of one step of all texts.

    draft: forks, rows and drafted tokens. commit: the accepted tokens. batch: the texts' lists, and
    the batch of the next step.
    """

    draft: float
    commit: float
    batch: float


class Writing:
    """So many texts at a time, one document after another."""

    def __init__(self, guide: Guide, documents: list[Document], num_texts: int) -> None:
        self._guide, self._documents = guide, documents
        self._dice = random.Random(0)
        self._next = 0
        self._answers: dict[int, list[int]] = {}  # by slot
        self._texts = [self._open(slot) for slot in range(num_texts)]

    def _open(self, slot: int) -> GuidedText:
        document = self._documents[self._next % len(self._documents)]
        self._next += 1
        self._answers[slot] = document.token_ids
        params = SamplingParams(max_tokens=400, grammar=document.grammar)
        return self._guide.open(slot, [1], params)

    def step(self, num_draft_tokens: int) -> StepTimes:
        """One step of all texts; those that end are begun anew."""
        texts, depths = self._texts, range(num_draft_tokens)
        began = time.thread_time()
        batch = self._guide.batch(texts, num_draft_tokens)
        batched = time.thread_time() - began
        rest = [self._answers[text.slot][len(text.output_ids) :] for text in texts]
        drafts = [[*row[:num_draft_tokens], *[-1] * num_draft_tokens] for row in rest]
        by_depth = [[row[depth] for row in drafts] for depth in depths]
        began = time.thread_time()
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        for tokens in by_depth:
            lookahead.next_mask()
            lookahead.accept_ids(tokens)
        lookahead.finish(num_draft_tokens)
        drafted = time.thread_time() - began
        packed = torch.full((len(texts), num_draft_tokens + 1), -1)
        counts = torch.zeros(len(texts), dtype=torch.int64)
        for at, row in enumerate(rest):
            taken = self._dice.randint(0, min(num_draft_tokens, len(row) - 1))
            counts[at] = taken
            packed[at, : taken + 1] = torch.tensor(row[: taken + 1])
        began = time.thread_time()
        committed = commit(batch, Accepted(packed, counts))
        done = time.thread_time() - began
        began = time.thread_time()
        for text, one in zip(texts, committed, strict=True):
            text.append(one)
        batched += time.thread_time() - began
        for at, text in enumerate(texts):
            if text.ended is not None:
                texts[at] = self._open(at)
        return StepTimes(drafted, done, batched)


def main(
    workload: Annotated[Path | None, typer.Argument(help="JSON Lines with answers.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder of a model.")] = None,
    num_texts: Annotated[int, typer.Option(help="Texts of a step.")] = 64,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5,
    steps: Annotated[int, typer.Option(help="That are timed.")] = 300,
) -> None:
    """Microseconds a text of a step, medians, by the part of the step and the kind of grammar."""
    torch.set_num_threads(1)
    with failures_as_messages():
        loaded = load_tokenizer(tokenizer or bundled_asset("target"))
        vocabulary = Vocabulary.from_tokenizer(loaded, len(loaded), [loaded.eos_token_id])
        table = Table("grammars", "draft", "commit", "batch", "all, µs a text")
        for kind in ("closed", "open keys"):
            documents = read_documents(workload, loaded, kind)
            config = EngineConfig(
                num_draft_tokens=num_draft_tokens, max_batch_size=num_texts, max_model_len=4096
            )
            guide = Guide(vocabulary, loaded, config, device=torch.device("cpu"))
            writing = Writing(guide, documents, num_texts)
            for _ in range(20):
                writing.step(num_draft_tokens)
            times = [writing.step(num_draft_tokens) for _ in range(steps)]
            guide.close()
            parts = [statistics.median(part) for part in zip(*times, strict=True)]
            whole = statistics.median(map(sum, times))
            row = (f"{1e6 * seconds / num_texts:.1f}" for seconds in (*parts, whole))
            table.add_row(kind, *row)
        stdout().print(table)


def read_documents(workload: Path | None, tokenizer: Any, kind: str) -> list[Document]:
    """Those of a workload. kind: "open keys" takes any JSON object, whose keys are kept apart."""
    documents = []
    for item in load_workload(workload or Path(bundled_asset("heldout.jsonl")), 1000):
        if item.grammar is None or item.answer is None or item.grammar.kind != "json_schema":
            continue
        spec = item.grammar
        if kind == "open keys":
            spec = GrammarSpec.json_object()
        ids = tokenizer(item.answer, add_special_tokens=False)["input_ids"]
        documents.append(Document(spec, [*ids, tokenizer.eos_token_id]))
    return documents


if __name__ == "__main__":
    typer.run(main)
