"""What a draft's token choice costs: ``python -m benchmarks.kernels.drafting``.

Times one choice for a batch, in torch and as it is dispatched (on CUDA: the kernels), on CUDA in a
graph; beside it the time that reading its bytes alone would take.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.kernels.device_time import graph_seconds, read_bandwidth
from guided_spec.cli.console import stdout
from guided_spec.ops.bitmask import pack_bitmask
from guided_spec.ops.sampling.draft_choice import choose_draft, choose_draft_reference
from guided_spec.ops.sampling.noise import DraftNoise, Stream
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.types import SamplingParams

CALLS = 20  # in one graph, so that launching it weighs little
SHARE = 0.98  # of the tokens that a mask allows


class Sizes(NamedTuple):
    """V, D (V itself: no draft vocabulary), and where."""

    vocab_size: int
    draft_size: int
    device: torch.device


class Case(NamedTuple):
    """One batch: the arguments of ``choose_draft``."""

    logits: Tensor
    bitmask: Tensor | None
    target_ids: Tensor | None
    sampling: Sampling
    noise: DraftNoise


def main(
    vocab_size: Annotated[int, typer.Option(help="V of the target.")] = 128_256,
    draft_vocab_size: Annotated[int, typer.Option(help="D; V is no draft vocabulary.")] = 32_000,
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas.")] = "1,8,64,256",
    temperature: Annotated[float, typer.Option(help="Of the rows that sample.")] = 0.8,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
) -> None:
    """Median microseconds of one choice, by batch size, temperature and mask."""
    sizes = Sizes(vocab_size, draft_vocab_size, torch.device(device))
    bandwidth = read_bandwidth(sizes.device)
    table = Table("requests", "temperature", "mask", "torch us", "chosen us", "bytes us")
    for size in map(int, batch_sizes.split(",")):
        for heat in (0.0, temperature):
            for has_mask in (False, True):
                case = _case(size, sizes, heat, has_mask=has_mask)
                floor = _num_bytes(case) / bandwidth * 1e6
                shown = [f"{value:.1f}" for value in (*_time(case), floor)]
                table.add_row(str(size), f"{heat:g}", "yes" if has_mask else "no", *shown)
    stdout().print(table)


def _case(size: int, sizes: Sizes, temperature: float, *, has_mask: bool) -> Case:
    vocab_size, draft_size, device = sizes
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    legal = torch.rand(size, vocab_size, device=device) < SHARE
    is_reduced = draft_size < vocab_size
    ids = torch.randperm(vocab_size, device=device)[:draft_size] if is_reduced else None
    params = [SamplingParams(temperature=temperature)] * size
    sampling = Sampling.stack(params, range(size), device)
    positions = torch.full((size,), 1000, device=device)
    return Case(
        torch.randn(size, draft_size, device=device, dtype=dtype) * 3,
        pack_bitmask(legal) if has_mask else None,
        ids,
        sampling,
        DraftNoise(sampling.seeds, positions, Stream.DRAFT, vocab_size),
    )


def _num_bytes(case: Case) -> int:
    """What has to be read and written once."""
    read = [case.logits, case.bitmask, case.target_ids]
    total = sum(tensor.nbytes for tensor in read if tensor is not None)
    return total + (0 if case.sampling.all_greedy else case.logits.numel() * 4)


@torch.inference_mode()
def _time(case: Case) -> list[float]:
    """Microseconds of torch and of what is dispatched."""
    calls = [partial(choose, *case) for choose in (choose_draft_reference, choose_draft)]
    return [graph_seconds(call, case.logits.device, CALLS) * 1e6 for call in calls]


if __name__ == "__main__":
    typer.run(main)
