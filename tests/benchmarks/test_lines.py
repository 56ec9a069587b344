"""The forwards whose time is measured are forwards over texts that do not meet."""

from __future__ import annotations

import torch

from benchmarks import attention, forwards
from benchmarks.lines import num_blocks, places_of
from benchmarks.widening.shape import LLAMA_8B
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed.decoder import PackedDecoder

CPU = torch.device("cpu")


def test_rows_have_blocks_of_their_own() -> None:
    places = places_of([40, 39, 0], 5, 70, CPU)
    assert places.tokens.tolist() == [
        [slot for slot in range(3) for _ in range(5)],
        [start + at for start in (40, 39, 0) for at in range(5)],
    ]
    assert places.rows.tolist() == [[0, 1, 2], [40, 39, 0], [5, 10, 15]]
    assert sorted(places.tables.flatten().tolist()) == list(range(1, num_blocks(3, 70)))
    assert places.tables.shape[1] * BLOCK > places.max_length


@torch.inference_mode()
def test_a_forward_is_timed() -> None:
    """On the CPU launch by launch; the command asks for CUDA graphs."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    shape = LLAMA_8B._replace(**sizes, **heads)
    decoder = PackedDecoder.of(forwards._model(shape, CPU), 40 + forwards.WIDEST, [None] * 2)
    assert decoder is not None
    memory = forwards._memory(shape, 3, 40, CPU)
    before = [layer.keys.clone() for layer in memory]
    assert forwards._forward(decoder, memory, (3, 5), 40) > 0
    for layer, old in zip(memory, before, strict=True):
        written = (layer.keys != old).any(-1).any(1)
        assert written.sum() == 3 * 5  # and nowhere twice


@torch.inference_mode()
def test_both_kinds_of_attention_see_as_much() -> None:
    """Over equal keys and values, whatever lies where."""
    case = attention._case(attention.Shape(4, 2, 16, 50), 3, 6, CPU)
    (layer,) = case.layers
    layer.keys.fill_(0.5)
    layer.values.fill_(0.25)
    case.new.keys.fill_(0.5)
    case.new.values.fill_(0.25)
    found = attention._over_blocks(case)(layer)
    expected = attention._masked(case)(layer).transpose(1, 2).flatten(0, 1)
    assert found.shape == expected.shape
    assert torch.equal(found, expected)
    seen = sum(50 - row + at + 1 for row in range(3) for at in (5,))
    assert case.num_bytes == 4 * seen * 2 * 16
