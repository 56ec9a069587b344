"""What a product with a weight costs: ``python -m benchmarks.kernels.products --device cuda``.

Times it with weights in int4 and fp8, as they are and multiplied out first, and in bfloat16, by
torch and by ``guided_spec.ops.linear.linear``; after a norm each, as in a forward, and on CUDA in a
graph over so many weights that no cache holds them. Next to it the time that reading them takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.device_time import graph_seconds, read_bandwidth
from benchmarks.kernels.forwards import int4_weight
from guided_spec.cli.console import stdout
from guided_spec.ops.linear import fp8_linear_triton, int4_linear_triton
from guided_spec.ops.linear.fp8_linear import FP8, Fp8Weight, whole_matrix
from guided_spec.ops.linear.int4_linear import Int4Weight
from guided_spec.ops.linear.linear import linear
from guided_spec.ops.pointwise import rms_norm

READ = 2**28  # bytes of a pass
BLOCK = (128, 128)
WAYS = ("int4 multiplied out", "int4", "fp8 multiplied out", "fp8", "bfloat16 by torch", "bfloat16")
GROUP = 128  # of int4


@torch.inference_mode()
def main(
    shapes: Annotated[str, typer.Option(help="Outputs x inputs.")] = "24576x4096,4096x12288",
    tokens: Annotated[str, typer.Option(help="By commas.")] = "1,6,16,48,128,256,384,512,1024",
    device: Annotated[str, typer.Option(help="A CUDA device.")] = "cuda",
) -> None:
    """Median microseconds of one product and the norm before it, by shape and number of tokens."""
    place = torch.device(device)
    bandwidth = read_bandwidth(place)
    table = Table(
        *("weight", "tokens", *(f"{name} us" for name in WAYS)),
        *("int4 read us", "fp8 read us", "16 bits read us"),
    )
    for shape in shapes.split(","):
        outputs, inputs = map(int, shape.split("x"))
        weights = [_weight(outputs, inputs, place) for _ in range(-(-READ // (outputs * inputs)))]
        whole = [whole_matrix(one, torch.bfloat16) for one in weights]
        in_int4 = [int4_weight(one, GROUP) for one in whole]
        scale = torch.ones(inputs, device=place, dtype=torch.bfloat16)
        for count in map(int, tokens.split(",")):
            x = torch.randn(count, inputs, device=place, dtype=torch.bfloat16)
            normed = partial(rms_norm, x, scale, 1e-6)
            ways = (
                [partial(_behind, normed, _expanded_int4, one) for one in in_int4],
                [
                    partial(_behind, normed, int4_linear_triton.multiply, one, None)
                    for one in in_int4
                ],
                [partial(_behind, normed, _multiplied_out, one) for one in weights],
                [
                    partial(_behind, normed, fp8_linear_triton.multiply, one, None)
                    for one in weights
                ],
                [partial(_behind, normed, functional.linear, one) for one in whole],
                [partial(_behind, normed, linear, one) for one in whole],
            )
            shown = [f"{_seconds(way, place) * 1e6:.1f}" for way in ways]
            read = [outputs * inputs * size / bandwidth for size in (0.5, 1, 2)]
            table.add_row(shape, str(count), *shown, *(f"{one * 1e6:.1f}" for one in read))
    stdout().print(table)


def _behind(
    normed: Callable[[], Tensor],
    multiply: Callable[..., Tensor],
    *weight: Int4Weight | Fp8Weight | Tensor | None,
) -> Tensor:
    return multiply(normed(), *weight)


def _multiplied_out(x: Tensor, weight: Fp8Weight) -> Tensor:
    return functional.linear(x, whole_matrix(weight, x.dtype))


def _expanded_int4(x: Tensor, weight: Int4Weight) -> Tensor:
    return functional.linear(x, int4_linear_triton.multiply_out(weight, x.dtype))


def _weight(outputs: int, inputs: int, device: torch.device) -> Fp8Weight:
    values = torch.randn(outputs, inputs, device=device).to(FP8)
    scales = torch.rand(outputs // BLOCK[0], inputs // BLOCK[1], device=device)
    return Fp8Weight.of(values, scales, BLOCK)


def _seconds(products: Sequence[Callable[[], Tensor]], device: torch.device) -> float:
    """Of one of them."""

    def run() -> None:
        for product in products:
            product()

    return graph_seconds(run, device) / len(products)


if __name__ == "__main__":
    typer.run(main)
