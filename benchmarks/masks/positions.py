"""What the host does for a drafted position: ``python -m benchmarks.masks.positions``.

Steps whose drafts a device draws under masks, without the device: it would draw the tokens of the
right texts, which are told at once. So all of the time is the host's, and a device would wait for
what ``positions`` takes. With tables that are always there it would take the masks from
them, and would wait for ``begin``, which says where the texts stand.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import torch
import typer
from rich.table import Table

from benchmarks.gpu.subject import json_documents
from benchmarks.widening.tokenizer import write_tokenizer
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.config import EngineConfig
from guided_spec.core import DecodeBatch, DraftInFlight, FinishedDraft, Proposer, ProposerContext
from guided_spec.evaluate.measurement import WorkItem
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.guide import Guide, GuidedText
from guided_spec.masks.lookahead import Lookahead
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.ops.mailbox import Mailbox
from guided_spec.proposers.device_masks import DeviceMasks, DraftBuffers
from guided_spec.proposers.draft_session import DraftRows
from guided_spec.proposers.drafting import draft_ends, host_draft
from guided_spec.step import commit, pack
from guided_spec.types import Accepted, SamplingParams

PARTS = ("batch", "begin", "positions", "rows", "commit")
T = TypeVar("T")


class Times:
    """Seconds by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def of(self, part: str, run: Callable[[], T]) -> T:
        """What ``run`` returns."""
        began = time.perf_counter()
        found = run()
        self.seconds[part].append(time.perf_counter() - began)
        return found


class Told(Proposer):
    """What a device would draw: ``right`` [B] is told it before every step."""

    aux_hidden_layers = ()

    def __init__(self, context: ProposerContext, times: Times) -> None:
        depths, rows = context.config.num_draft_tokens, context.num_slots
        self._mailbox = Mailbox(depths, rows, context.device)
        self._depths, self._times = depths, times
        self.right: list[list[int]] = []

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """Every token of it."""
        del carry
        told = torch.zeros(self._depths, len(batch), dtype=torch.int64)
        for row, tokens in enumerate(self.right):
            told[: len(tokens), row] = torch.tensor(tokens)
        ends = draft_ends(batch, lookahead, range(len(batch)))
        ends = [min(end, len(tokens)) for end, tokens in zip(ends, self.right, strict=True)]
        buffers = DraftBuffers(told, torch.zeros(len(told) + 1, len(batch)).long(), None, None)
        ticket = self._mailbox.begin()
        starts = [0] * len(batch)
        rows = DraftRows(
            batch, lookahead, starts, ends, ends, [row for row, end in enumerate(ends) if end]
        )
        draft = self._times.of("begin", lambda: self._launch(rows, buffers))
        self._mailbox.replies[:, : len(batch)] = (ticket << 32) | (told + 1)
        if draft.needs_host:
            draft.accept_up_to(1)
        self._times.of("positions", draft.accept_masked)
        return FinishedDraft(host_draft(batch, lookahead.drafted), tuple(lookahead.lengths))

    def _launch(self, rows: DraftRows, buffers: DraftBuffers) -> DeviceMasks:
        draft = DeviceMasks(self._mailbox, rows, buffers, len(rows.starts), None, rows.tables())
        if draft.needs_host:
            draft.begin()
        return draft

    def release(self, slots: Sequence[int]) -> None:
        """Nothing is kept."""


class Steps:
    """Requests that write their right texts over and over."""

    def __init__(self, guide: Guide, items: Sequence[WorkItem], tokenizer: Any, count: int) -> None:
        self._guide = guide
        self._answers = [
            [*tokenizer(item.answer, add_special_tokens=False)["input_ids"]] for item in items
        ]
        self._params = [
            SamplingParams(max_tokens=1024, temperature=0.0, grammar=item.grammar) for item in items
        ]
        self.times = Times()
        config = guide.config
        context = ProposerContext(
            vocabulary=guide.vocabulary,
            encode=lambda text: [*tokenizer(text)["input_ids"]],
            tokenizer=tokenizer,
            target=None,
            config=config,
            num_slots=count,
            max_model_len=4096,
            device=guide.device,
            dtype=torch.float32,
        )
        self._told = Told(context, self.times)
        self._texts: list[GuidedText] = []
        self._which: list[int] = []
        self._opened = 0
        for slot in range(count):
            self._texts.append(self._open(slot))

    def _open(self, slot: int) -> GuidedText:
        which = self._opened % len(self._answers)
        self._opened += 1
        self._which[slot : slot + 1] = [which]
        return self._guide.open(slot, [1], self._params[which])

    def run(self, step: int) -> None:
        """One step, of which some of the draft is accepted."""
        drafted = self._guide.config.num_draft_tokens
        for slot, text in enumerate(self._texts):
            if len(self._answers[self._which[slot]]) - len(text.output_ids) < drafted + 2:
                self._texts[slot] = self._open(slot)
        rests = [
            self._answers[which][len(text.output_ids) :]
            for which, text in zip(self._which, self._texts, strict=True)
        ]
        self._told.right = [rest[:drafted] for rest in rests]
        batch = self.times.of("batch", lambda: self._guide.batch(self._texts))
        lookahead = self.times.of(
            "begin", lambda: Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        )
        flight = self._told.begin(batch, lookahead)
        width = flight.draft.token_ids.shape[1]
        if not all(lookahead.is_tabled):  # else a device copies them
            self.times.of("rows", lambda: lookahead.finish(width))
        counts = [(step + slot) * 5 % (drafted + 1) for slot in range(len(rests))]
        ids = torch.full((len(rests), drafted + 1), -1)
        for row, (rest, count) in enumerate(zip(rests, counts, strict=True)):
            ids[row, : count + 1] = torch.tensor(rest[: count + 1])
        accepted = Accepted(ids, torch.tensor(counts))
        packed = pack(accepted)
        committed = self.times.of("commit", lambda: commit(batch, accepted, packed))
        for text, gained in zip(self._texts, committed, strict=True):
            text.append(gained)


def main(
    requests: Annotated[str, typer.Option(help="Separated by commas.")] = "1,8,64",
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 7,
    steps: Annotated[int, typer.Option(help="That are timed.")] = 200,
    vocab_size: Annotated[int, typer.Option(help="V of the target.")] = 128_256,
    tables: Annotated[str, typer.Option(help="Of grammars, off or always.")] = "off",
) -> None:
    """Median microseconds of a step's parts, all requests together."""
    with failures_as_messages():
        tokenizer = _tokenizer(vocab_size)
        vocabulary = Vocabulary.from_tokenizer(tokenizer, vocab_size, [tokenizer.eos_token_id])
        table = Table("requests", *(f"{part} us" for part in PARTS))
        for count in map(int, requests.split(",")):
            config = EngineConfig(
                num_draft_tokens=num_draft_tokens,
                max_batch_size=count,
                grammar_tables=tables,  # type: ignore[arg-type]
            )
            guide = Guide(vocabulary, tokenizer, config, device=torch.device("cpu"))
            times = time_steps(guide, tokenizer, count, steps)
            shown = (f"{statistics.median(times[part] or [0]) * 1e6:.0f}" for part in PARTS)
            table.add_row(str(count), *shown)
            guide.close()
    stdout().print(table)


def time_steps(guide: Guide, tokenizer: Any, requests: int, steps: int) -> dict[str, list[float]]:
    """Seconds of each step by part, of so many held-out documents at a time."""
    run = Steps(guide, json_documents(24), tokenizer, requests)
    for step in range(steps):
        run.run(step)
    return run.times.seconds


def _tokenizer(vocab_size: int) -> Any:
    """One of a large vocabulary, which writes texts as the bundled one does."""
    source = Path(bundled_asset("target"))
    small = len(load_tokenizer(str(source)))
    with TemporaryDirectory() as folder:
        write_tokenizer(source, Path(folder), range(small, vocab_size))
        return load_tokenizer(folder)


if __name__ == "__main__":
    typer.run(main)
