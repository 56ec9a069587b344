"""What attention over slots costs: ``python -m benchmarks.kernels.attention --device cuda``.

Times one layer's attention of verified drafts, apart from the model: the operator over the blocks
of slots, which also writes the new keys and values, and torch's own attention with a mask over as
much memory, where each text lies in one piece. Each case goes through many layers' buffers, so that
none of them is still in a cache; on CUDA all of them are one graph. The bytes are those of the keys
and values that the rows hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, NamedTuple

import torch
import typer
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.device_time import graph_seconds
from benchmarks.kernels.lines import num_blocks, places_of
from guided_spec.cli.console import stdout
from guided_spec.errors import ConfigError
from guided_spec.models.attention import shape_free_kernels
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.ops.attention.slot_attention import KeyValues, SlotIndex, slot_attention

BATCHES = (1, 8, 64, 256)
TOKENS = (1, 6)
SPREAD = 37  # the rows' lengths differ by up to so many tokens
COLD_BYTES = 2**28  # several times the caches of a large device
MAX_LAYERS = 64


class Shape(NamedTuple):
    """What the cases share: heads that ask, heads that are asked, size of a head, longest text.

    shared: positions that all texts have in the same blocks.
    """

    heads: int
    kv_heads: int
    head_dim: int
    context: int
    shared: int = 0


class Case(NamedTuple):
    """One batch: query [N, Hq, D], its new tokens, each layer's blocks and their places."""

    query: Tensor
    new: KeyValues
    layers: list[KeyValues]
    places: SlotIndex
    num_bytes: int


def main(  # noqa: PLR0913 - the options of a command
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    max_batch: Annotated[int, typer.Option(help="Leave out larger batches.")] = 256,
    context: Annotated[int, typer.Option(help="Tokens of the longest text.")] = 1000,
    heads: Annotated[int, typer.Option(help="Heads of the queries.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Heads of the keys and values.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 128,
    shared: Annotated[int, typer.Option(help="First tokens that all texts share.")] = 0,
) -> None:
    """Median microseconds a layer in bfloat16, by batch size and tokens a row."""
    longest_shared = context - min(SPREAD, context) + 1
    if not 0 <= shared <= longest_shared:
        raise ConfigError("shared", shared, f"must be 0 to {longest_shared}, within every text")
    shape = Shape(heads, kv_heads, head_dim, context, shared)
    table = Table("requests", "tokens", "attention", "us a layer", "GB/s")
    for batch in (size for size in BATCHES if size <= max_batch):
        for tokens in TOKENS:
            case = _case(shape, batch, tokens, torch.device(device))
            for name, attend in _ways(case).items():
                seconds = _time(case, attend) / len(case.layers)
                speed = case.num_bytes / seconds / 1e9
                table.add_row(str(batch), str(tokens), name, f"{seconds * 1e6:.1f}", f"{speed:.0f}")
    stdout().print(table)


def _case(shape: Shape, batch: int, tokens: int, device: torch.device) -> Case:
    def states(*sizes: int) -> Tensor:
        return torch.randn(*sizes, shape.head_dim, dtype=torch.bfloat16, device=device)

    max_length = shape.context + tokens
    held = (num_blocks(batch, max_length), shape.kv_heads, BLOCK)
    layer_bytes = 4 * held[0] * shape.kv_heads * BLOCK * shape.head_dim
    num_layers = min(max(COLD_BYTES // layer_bytes, 2), MAX_LAYERS) if device.type == "cuda" else 1
    layers = [KeyValues(states(*held), states(*held)) for _ in range(num_layers)]
    # As a model's projections lie: all heads of a token together.
    query = states(batch * tokens, shape.heads)
    key, value = (states(batch * tokens, shape.kv_heads) for _ in range(2))
    starts = [shape.context - row % min(SPREAD, shape.context) for row in range(batch)]
    places = places_of(starts, tokens, max_length, device, shape.shared)
    num_bytes = 4 * (sum(starts) + batch * tokens) * shape.kv_heads * shape.head_dim
    return Case(query, KeyValues(key, value), layers, places, num_bytes)


Attend = Callable[[KeyValues], Tensor]  # over one layer's buffers


def _ways(case: Case) -> dict[str, Attend]:
    if case.places.shared is None:
        return {"blocks": _over_blocks(case), "torch": _masked(case)}
    apart = case._replace(places=replace(case.places, shared=None))
    return {"blocks": _over_blocks(apart), "together": _over_blocks(case)}


def _over_blocks(case: Case) -> Attend:
    return lambda buffers: slot_attention(case.query, case.new, buffers, case.places, scale=0.1)


def _masked(case: Case) -> Attend:
    """torch's attention over texts that lie in one piece each, with a mask made beforehand."""
    rows, view = case.places.rows, case.places.max_length
    batch, (count, heads, size) = rows.shape[1], case.query.shape
    query = case.query.view(batch, count // batch, heads, size).transpose(1, 2)
    steps = torch.arange(count // batch, device=query.device)
    positions = rows[1].unsqueeze(1) + steps
    mask = torch.arange(view, device=query.device) <= positions[:, None, :, None]

    def attend(buffers: KeyValues) -> Tensor:
        # The same memory taken as whole slots: what it holds is random anyway.
        keys, values = (
            buffer[1:].view(batch, buffer.shape[1], -1, size)[:, :, :view] for buffer in buffers
        )
        with shape_free_kernels():
            return scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, scale=0.1, enable_gqa=True
            )

    return attend


@torch.inference_mode()
def _time(case: Case, attend: Attend) -> float:
    """Median seconds of all layers."""

    def run() -> None:
        for buffers in case.layers:
            attend(buffers)

    return graph_seconds(run, case.query.device)


if __name__ == "__main__":
    typer.run(main)
