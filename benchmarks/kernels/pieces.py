"""What attention costs where prompts are read beside texts that decode.

``python -m benchmarks.kernels.pieces --flash-attention LIB``: one layer's attention in lines of a
piece of a prompt and rows of drafts, by the kernels here and by FlashAttention 3. On CUDA each is a
graph of several calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.gpu.lmdeploy_attention import provide_flash_attention
from benchmarks.kernels.device_time import graph_seconds
from benchmarks.kernels.lines import num_blocks, ragged_places
from guided_spec.cli.console import stdout
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed.packed_lm import Rows
from guided_spec.ops.attention.flash_attention import flash_attention
from guided_spec.ops.attention.slot_attention import KeyValues, SlotIndex, slot_attention

HEADS, KV_HEADS, SIZE = 32, 8, 128
SCALE = SIZE**-0.5
PADDED = 64  # lines have multiples of so many tokens
CALLS = 16


class Row(NamedTuple):
    """num: of rows like this one. tokens: of each, behind ``start`` others."""

    num: int
    tokens: int
    start: int

    def __str__(self) -> str:
        return f"{self.num} x {self.tokens} at {self.start:,}"


LINES: tuple[tuple[Row, ...], ...] = (
    (Row(1, 512, 8000), Row(3, 6, 300)),
    (Row(1, 512, 2000), Row(3, 6, 300)),
    (Row(1, 512, 0), Row(3, 6, 300)),
    (Row(1, 512, 3000), Row(60, 6, 400)),
    (Row(1, 512, 14_000), Row(14, 1, 15_000)),
    (Row(1, 1000, 14_000), Row(13, 1, 15_000)),
    (Row(7, 100, 50), Row(20, 6, 200)),
    (Row(128, 6, 300),),
)


class Line(NamedTuple):
    """A line of tokens: query [N, Hq, D], the blocks of its texts, and where it stands in them."""

    query: Tensor
    buffers: KeyValues
    places: SlotIndex


def main(
    flash_attention: Annotated[
        Path | None, typer.Option(help="vLLM's library of FlashAttention 3.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cuda",
    scale: Annotated[float, typer.Option(help="Of the texts' lengths.")] = 1.0,
) -> None:
    """Median microseconds of a layer in bfloat16, by what the line holds."""
    if flash_attention is not None:
        provide_flash_attention(flash_attention)
    place = torch.device(device)
    table = Table("rows", "tokens", "kernels here us", "FlashAttention 3 us")
    for rows in LINES:
        line = _line([row._replace(start=int(row.start * scale)) for row in rows], place)
        seconds = [_seconds(line, _attend)]
        if flash_attention is not None:
            seconds.append(_seconds(line, _flash))
        shown = [f"{one * 1e6:.1f}" for one in seconds]
        table.add_row("; ".join(map(str, rows)), str(len(line.query)), *shown)
    stdout().print(table)


@torch.inference_mode()
def _line(rows: Sequence[Row], device: torch.device) -> Line:
    starts = [row.start for row in rows for _ in range(row.num)]
    counts = [row.tokens for row in rows for _ in range(row.num)]
    size, most = -(-sum(counts) // PADDED) * PADDED, max(map(sum, zip(starts, counts, strict=True)))
    places = ragged_places(Rows(range(len(starts)), starts, counts), size, most, device)
    held = (num_blocks(len(starts), most), KV_HEADS, BLOCK, SIZE)
    buffers = KeyValues(*(_random(held, device) for _ in range(2)))
    return Line(_random((size, HEADS, SIZE), device), buffers, places)


def _random(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device)


def _attend(line: Line) -> Tensor:
    return slot_attention(line.query, None, line.buffers, line.places, scale=SCALE)


def _flash(line: Line) -> Tensor:
    return flash_attention(line.query, line.buffers, line.places, scale=SCALE)


@torch.inference_mode()
def _seconds(line: Line, attend: Callable[[Line], Tensor]) -> float:
    return graph_seconds(lambda: attend(line), line.query.device, CALLS)


if __name__ == "__main__":
    typer.run(main)
