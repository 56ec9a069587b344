"""What attention over slots costs: ``python -m benchmarks.attention --device cuda``.

Times one layer's attention of a verified draft, apart from the model: the operator over slots,
which also writes the new keys and values, and torch's own attention with a mask over the same
buffers. Each case goes through many layers' buffers, so that none of them is still in a cache; on
CUDA all of them are one graph. The bytes are those of the keys and values that the rows hold.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.device_time import graph_seconds
from guided_spec.cli.console import stdout
from guided_spec.models.attention import shape_free_kernels
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces, slot_attention

__all__ = ["main"]

BATCHES = (1, 8, 64, 256)
TOKENS = (1, 6)
SPREAD = 37  # the rows' lengths differ by up to so many tokens
COLD_BYTES = 2**28  # several times the caches of a large device
MAX_LAYERS = 64


class Shape(NamedTuple):
    """What the cases share: heads that ask, heads that are asked, size of a head, longest text."""

    heads: int
    kv_heads: int
    head_dim: int
    context: int


class Case(NamedTuple):
    """One batch: query [B, Hq, T, D], its new tokens, each layer's buffers and their places."""

    query: Tensor
    new: KeyValues
    layers: list[KeyValues]
    places: SlotPlaces
    num_bytes: int


def main(
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    max_batch: Annotated[int, typer.Option(help="Leave out larger batches.")] = 256,
    context: Annotated[int, typer.Option(help="Tokens of the longest text.")] = 1000,
    heads: Annotated[int, typer.Option(help="Heads of the queries.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Heads of the keys and values.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 128,
) -> None:
    """Median microseconds a layer in bfloat16, by batch size and tokens a row."""
    shape = Shape(heads, kv_heads, head_dim, context)
    table = Table("requests", "tokens", "attention", "us a layer", "GB/s")
    for batch in (size for size in BATCHES if size <= max_batch):
        for tokens in TOKENS:
            case = _case(shape, batch, tokens, torch.device(device))
            for name, attend in (("slots", _over_slots), ("torch", _masked(case))):
                seconds = _time(case, attend) / len(case.layers)
                speed = case.num_bytes / seconds / 1e9
                table.add_row(str(batch), str(tokens), name, f"{seconds * 1e6:.1f}", f"{speed:.0f}")
    stdout().print(table)


def _case(shape: Shape, batch: int, tokens: int, device: torch.device) -> Case:
    def states(*sizes: int) -> Tensor:
        return torch.randn(*sizes, shape.head_dim, dtype=torch.bfloat16, device=device)

    starts = shape.context - torch.arange(batch, device=device) % min(SPREAD, shape.context)
    held = (batch, shape.kv_heads, shape.context + tokens + 1)
    layer_bytes = 4 * batch * shape.kv_heads * held[2] * shape.head_dim
    num_layers = min(max(COLD_BYTES // layer_bytes, 2), MAX_LAYERS) if device.type == "cuda" else 1
    layers = [KeyValues(states(*held), states(*held)) for _ in range(num_layers)]
    # As a model's projections lie: all heads of a token together.
    query = states(batch, tokens, shape.heads).transpose(1, 2)
    key = states(batch, tokens, shape.kv_heads).transpose(1, 2)
    value = states(batch, tokens, shape.kv_heads).transpose(1, 2)
    places = SlotPlaces(torch.arange(batch, device=device), starts)
    seen = int((starts + tokens).sum())
    num_bytes = 4 * seen * shape.kv_heads * shape.head_dim
    return Case(query, KeyValues(key, value), layers, places, num_bytes)


def _over_slots(case: Case, buffers: KeyValues) -> Tensor:
    return slot_attention(case.query, case.new, buffers, case.places, scale=0.1)


def _masked(case: Case) -> Callable[[Case, KeyValues], Tensor]:
    """torch's attention over the slots as they lie, with a mask made beforehand."""
    device, tokens = case.query.device, case.query.shape[2]
    view = case.layers[0].keys.shape[2] - 1
    positions = case.places.starts.unsqueeze(1) + torch.arange(tokens, device=device)
    mask = torch.arange(view, device=device) <= positions[:, None, :, None]

    def attend(case: Case, buffers: KeyValues) -> Tensor:
        keys, values = (buffer[:, :, :view] for buffer in buffers)
        with shape_free_kernels():
            return scaled_dot_product_attention(
                case.query, keys, values, attn_mask=mask, scale=0.1, enable_gqa=True
            )

    return attend


@torch.inference_mode()
def _time(case: Case, attend: Callable[[Case, KeyValues], Tensor]) -> float:
    """Median seconds of all layers."""

    def run() -> None:
        for buffers in case.layers:
            attend(case, buffers)

    return graph_seconds(run, case.query.device)


if __name__ == "__main__":
    typer.run(main)
