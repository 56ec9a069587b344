"""Does filling masks beside the forward pay? ``python -m benchmarks.masks.overlap``.

Times one verify forward over K + 1 tokens a request together with filling the requests' mask rows
and their upload: one after the other, and with the rows on a second thread. (That thread takes
others to help where the rows are many; see ``RowFiller``.)
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.kernels.device_time import host_seconds
from benchmarks.masks.row_filling import RowFilling, Text
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.evaluate.measurement import load_workload
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.rows import MaskRows
from guided_spec.models.causal_lm import CausalLM, make_causal_lm
from guided_spec.models.loading import load_model
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.models.tokenizer import end_of_text_ids, load_tokenizer

CONTEXT = 128


class _Step:
    """One batch's forward and its masks."""

    def __init__(self, model: CausalLM, texts: list[Text], batch: int, depths: int) -> None:
        self._model = model
        tokens = torch.randint(0, model.vocab_size, (batch, depths))
        slots = list(range(batch))
        self._inputs = SlotInputs(tokens, slots, [CONTEXT] * batch, [depths] * batch)
        rows = MaskRows(batch, depths, model.vocab_size, model.device)
        self._filling = RowFilling(texts, batch, depths, rows)
        self.prepare, self.fill = self._filling.prepare, self._filling.fill

    def forward(self) -> None:
        self._model.forward(self._inputs)
        self._model.commit(self._inputs.counts, self._inputs.counts)

    def end(self) -> None:
        self._filling.upload()
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
        lm = make_causal_lm(loaded, num_slots=64, max_length=CONTEXT + num_draft_tokens + 1)
        stop = end_of_text_ids(loaded, tokenizer)
        vocabulary = Vocabulary.from_tokenizer(tokenizer, lm.vocab_size, stop)
        texts = _texts(vocabulary, tokenizer)
    table = Table("requests", "rows", "fills alone ms", "one after the other ms", "beside ms")
    for batch in (1, 2, 4, 8, 16, 32, 64):
        step = _Step(lm, texts, batch, num_draft_tokens + 1)
        times = (f"{value:.2f}" for value in _time(step))
        table.add_row(str(batch), str(batch * (num_draft_tokens + 1)), *times)
    stdout().print(table)


def _texts(vocabulary: Vocabulary, tokenizer: Any) -> list[Text]:
    """The right answers of the held-out documents."""
    backend = XGrammarBackend(vocabulary)
    return [
        Text(
            backend.compile(item.grammar),
            tokenizer(item.answer, add_special_tokens=False)["input_ids"],
        )
        for item in load_workload(Path(bundled_asset("heldout.jsonl")), 64)
        if item.grammar is not None and item.grammar.kind == "json_schema"
    ]


def _time(step: _Step) -> list[float]:
    """Median milliseconds of: the fills, the fills behind the forward, the fills beside it."""

    def behind() -> None:
        step.forward()
        step.fill()
        step.end()

    def beside() -> None:
        future = pool.submit(step.fill)
        step.forward()
        future.result()
        step.end()

    with ThreadPoolExecutor(1) as pool:
        return [host_seconds(run, step.prepare) * 1e3 for run in (step.fill, behind, beside)]


if __name__ == "__main__":
    typer.run(main)
