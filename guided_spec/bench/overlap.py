"""Does filling masks beside the forward pay? ``python -m guided_spec.bench.overlap``.

Times one verify forward over K + 1 tokens a request together with filling the requests' mask rows:
one after the other, and with the rows on a second thread.
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from guided_spec.bench.masks import walk_and_rollback
from guided_spec.bench.workload import load_workload
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.engine.setup import bundled_asset
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.grammar.xgrammar import XGrammarBackend
from guided_spec.models.causal_lm import CausalLM, SlotInputs
from guided_spec.models.loading import end_of_text_ids, load_model, load_tokenizer
from guided_spec.ops.bitmask import num_mask_words

__all__ = ["main"]

CONTEXT = 128
REPEATS = 40


class _Step:
    """One batch's forward and its masks."""

    def __init__(self, model: CausalLM, drafts: list[tuple[Any, list[int]]], depths: int) -> None:
        self._model = model
        self._drafts = drafts
        batch = len(drafts)
        slots = list(range(batch))
        tokens = torch.randint(0, model.vocab_size, (batch, depths))
        self._inputs = SlotInputs(tokens, slots, [CONTEXT] * batch, [depths] * batch)
        words = num_mask_words(model.vocab_size)
        self._rows = torch.full((batch, depths, words), -1, dtype=torch.int32)

    def forward(self) -> None:
        self._model.forward(self._inputs)
        self._model.commit(self._inputs.counts)

    def fill(self) -> None:
        for (matcher, draft), rows in zip(self._drafts, self._rows, strict=True):
            walk_and_rollback(matcher, draft, rows)

    def wait(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()


def main(
    model: Annotated[str | None, typer.Option(help="Hub id or folder.")] = None,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...")] = None,
) -> None:
    """Milliseconds a step by batch size."""
    with failures_as_messages():
        folder = model or bundled_asset("target")
        loaded, tokenizer = load_model(folder, device=device), load_tokenizer(folder)
        lm = CausalLM(loaded, num_slots=64, max_length=CONTEXT + num_draft_tokens + 1)
        stop = end_of_text_ids(loaded, tokenizer)
        vocabulary = Vocabulary.from_tokenizer(tokenizer, lm.vocab_size, stop)
        drafts = _drafts(vocabulary, tokenizer, num_draft_tokens)
    table = Table("requests", "rows", "fills alone ms", "one after the other ms", "beside ms")
    for batch in (1, 2, 4, 8, 16, 32, 64):
        chosen = [drafts[i % len(drafts)] for i in range(batch)]
        step = _Step(lm, chosen, num_draft_tokens + 1)
        times = (f"{value:.2f}" for value in _time(step))
        table.add_row(str(batch), str(batch * (num_draft_tokens + 1)), *times)
    stdout().print(table)


def _drafts(vocabulary: Vocabulary, tokenizer: Any, num_draft: int) -> list[tuple[Any, list[int]]]:
    """Matchers with the first tokens of their right answers, from the held-out documents."""
    backend = XGrammarBackend(vocabulary)
    found = []
    for item in load_workload(Path(bundled_asset("heldout.jsonl")), 64):
        if item.grammar is not None and item.grammar.kind == "json_schema":
            matcher = backend.compile(item.grammar).new_matcher()
            answer = tokenizer(item.answer, add_special_tokens=False)["input_ids"]
            found.append((matcher, answer[:num_draft]))
    return found


def _time(step: _Step) -> list[float]:
    """Median milliseconds of: the fills, the fills behind the forward, the fills beside it."""

    def behind() -> None:
        step.forward()
        step.fill()
        step.wait()

    def beside() -> None:
        future = pool.submit(step.fill)
        step.forward()
        future.result()
        step.wait()

    with ThreadPoolExecutor(1) as pool:
        return [_median(step.fill), _median(behind), _median(beside)]


def _median(run: Any) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


if __name__ == "__main__":
    typer.run(main)
