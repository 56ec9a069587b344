"""What a draft's token choice costs: ``python -m guided_spec.bench.drafting``.

Times one choice for a batch, in torch and as it is dispatched (on CUDA: the kernels), called one
by one and in a CUDA graph, beside the time that its bytes alone would take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor

from guided_spec.cli.console import stdout
from guided_spec.ops.bitmask import pack_bitmask
from guided_spec.ops.draft_choice import choose_draft, choose_draft_reference
from guided_spec.ops.noise import DraftNoise, Stream
from guided_spec.ops.warp import Sampling
from guided_spec.types import SamplingParams

__all__ = ["main"]

REPEATS = 30
CALLS = 20  # in one graph, so that launching it weighs little
COPIED = 2**28  # bytes, to measure the bandwidth with
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
    bandwidth = _bandwidth(sizes.device)
    titles = ["torch us", "chosen us", "torch in a graph us", "chosen in a graph us", "bytes us"]
    table = Table("requests", "temperature", "mask", *titles)
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
    """Microseconds of torch and of what is dispatched, one by one, and then in a graph."""
    device = case.logits.device
    calls = [partial(choose, *case) for choose in (choose_draft_reference, choose_draft)]
    eager = [_median(call, device) for call in calls]
    if device.type != "cuda":
        return [*eager, float("nan"), float("nan")]
    return [*eager, *(_median(_captured(call), device) / CALLS for call in calls)]


def _captured(call: Callable[[], object]) -> Callable[[], None]:
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph.replay


def _bandwidth(device: torch.device) -> float:
    """Bytes a second that a copy reads and writes."""
    source = torch.zeros(COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPIED / (_median(lambda: target.copy_(source), device) * 1e-6)


def _median(run: Callable[[], object], device: torch.device) -> float:
    """Microseconds until the device has done it; the first run does not count."""
    run()
    seconds = []
    for _ in range(REPEATS):
        _wait(device)
        began = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds) * 1e6


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    typer.run(main)
