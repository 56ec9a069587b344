"""What a target's verify forward costs: ``python -m benchmarks.forwards``.

Times the packed forward of a Llama with random weights, output head included, in a CUDA graph;
beside it the matrix products alone, by the library, and what reading the weights takes.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from benchmarks.device_time import graph_seconds, read_bandwidth, require_graphs
from benchmarks.lines import num_blocks, places_of
from benchmarks.widening.shape import LLAMA_8B, Shape
from guided_spec.cli.console import stdout
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed.decoder import PackedDecoder
from guided_spec.ops.slot_attention import KeyValues

__all__ = ["main"]

WIDEST = 64  # tokens a row


@torch.inference_mode()
def main(
    batch_sizes: Annotated[str, typer.Option(help="Separated by commas.")] = "1,8,64,256",
    tokens: Annotated[str, typer.Option(help="A row, separated by commas.")] = "1,6",
    context: Annotated[int, typer.Option(help="Tokens that each row holds.")] = 1000,
    layers: Annotated[
        int, typer.Option(help="Of Llama-3.1-8B's shape.")
    ] = LLAMA_8B.num_hidden_layers,
    device: Annotated[str, typer.Option(help="A CUDA device.")] = "cuda",
) -> None:
    """Median milliseconds of a forward in bfloat16, by batch size and tokens a row."""
    place, shape = require_graphs(device), LLAMA_8B._replace(num_hidden_layers=layers)
    model = _model(shape, place)
    decoder = PackedDecoder.of(model, context + WIDEST, [None] * shape.num_hidden_layers)
    assert decoder is not None
    weights = _streamed(model)
    floor = sum(weight.nbytes for weight in weights) / read_bandwidth(place)
    table = Table("requests", "tokens", "forward ms", "products ms", "weights read ms")
    for batch in map(int, batch_sizes.split(",")):
        memory = _memory(shape, batch, context, place)
        for width in map(int, tokens.split(",")):
            seconds = _forward(decoder, memory, (batch, width), context)
            alone = _products(weights, batch * width)
            shown = [f"{value * 1e3:.2f}" for value in (seconds, alone, floor)]
            table.add_row(str(batch), str(width), *shown)
        del memory
    stdout().print(table)


def _model(shape: Shape, device: torch.device) -> PreTrainedModel:
    sizes = shape._asdict()
    del sizes["draft_vocab_size"]
    config = LlamaConfig(**sizes)
    with device:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval()
    return model


def _streamed(model: Any) -> list[Tensor]:
    """The weights that every forward reads: all matrices but the embeddings."""
    embeddings = model.get_input_embeddings().weight
    return [w for w in model.parameters() if w.dim() == 2 and w is not embeddings]


def _memory(shape: Shape, batch: int, context: int, device: torch.device) -> list[KeyValues]:
    count = num_blocks(batch, context + WIDEST)
    size = (count, shape.num_key_value_heads, BLOCK, shape.head_dim)
    return [
        KeyValues(*(torch.randn(size, device=device, dtype=torch.bfloat16) for _ in range(2)))
        for _ in range(shape.num_hidden_layers)
    ]


def _forward(
    decoder: PackedDecoder, memory: list[KeyValues], size: tuple[int, int], context: int
) -> float:
    device = memory[0].keys.device
    batch, width = size
    token_ids = torch.arange(batch * width, device=device)
    places = places_of([context] * batch, width, context + WIDEST, device)

    def run() -> None:
        decoder.logits(decoder.forward(token_ids, places, memory).states)

    return graph_seconds(run, device)


def _products(weights: list[Tensor], count: int) -> float:
    """Every product by itself: those that the packed forward joins are apart here."""
    states = {
        width: torch.randn(count, width, device=weights[0].device, dtype=torch.bfloat16)
        for width in {weight.shape[1] for weight in weights}
    }

    def run() -> None:
        for weight in weights:
            functional.linear(states[weight.shape[1]], weight)

    return graph_seconds(run, weights[0].device)


if __name__ == "__main__":
    typer.run(main)
