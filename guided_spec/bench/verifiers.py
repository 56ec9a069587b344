"""What each verifier costs: ``python -m guided_spec.bench.verifiers``.

Times its noise, and its decision over the K + 1 rows of a draft, apart from the model and the warp.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, NamedTuple, get_args

import torch
import typer
from rich.table import Table
from torch import Tensor

from guided_spec.cli.console import stdout
from guided_spec.core import DecodeBatch
from guided_spec.grammar.mask_rows import MaskRows
from guided_spec.ops.warp import Sampling
from guided_spec.step import VERIFIERS
from guided_spec.types import Draft, SamplingParams, Verifier

__all__ = ["main"]

REPEATS = 20


class Case(NamedTuple):
    """One step's batch, its target probabilities [B, K + 1, V] and its draft."""

    batch: DecodeBatch
    probs: Tensor
    draft: Draft


def main(
    vocab_size: Annotated[int, typer.Option(help="V.")] = 151_669,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Median milliseconds at temperature 1, by batch size."""
    table = Table("requests", "verifier", "noise ms", "decision ms")
    for size in (1, 8, 32):
        for verifier in get_args(Verifier):
            case = _case(verifier, size, num_draft_tokens, (vocab_size, torch.device(device)))
            table.add_row(str(size), verifier, *(f"{value:.2f}" for value in _time(case)))
    stdout().print(table)


def _case(verifier: Verifier, size: int, depth: int, where: tuple[int, torch.device]) -> Case:
    vocab_size, device = where
    params = [SamplingParams(temperature=1.0)] * size
    batch = DecodeBatch(
        slots=tuple(range(size)),
        contexts=((0,),) * size,
        prompt_lengths=(1,) * size,
        constraints=(None,) * size,
        limits=(depth,) * size,
        sampling=Sampling.stack(params, range(size), device),
        mask_rows=MaskRows(size, depth + 1, vocab_size, device),
        num_draft_tokens=depth,
        vocab_size=vocab_size,
        device=device,
        verifier=verifier,
    )
    probs = torch.softmax(torch.randn(size, depth + 1, vocab_size, device=device), -1)
    ids = probs[:, :depth].argmax(-1)
    lengths = torch.full((size,), depth, device=device)
    return Case(batch, probs, Draft(ids, lengths, probs[:, :depth]))


@torch.inference_mode()
def _time(case: Case) -> list[float]:
    num_draft, device = case.draft.token_ids.shape[1], case.batch.device
    noise = case.batch.verify_noise(num_draft)
    verify = VERIFIERS[case.batch.verifier]
    return [
        _median(lambda: case.batch.verify_noise(num_draft), device),
        _median(lambda: verify(case.probs, case.draft, noise), device),
    ]


def _median(run: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e3


if __name__ == "__main__":
    typer.run(main)
