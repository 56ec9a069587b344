"""Rotating packed heads: what transformers' modules compute, and the kernel what torch does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_pairs
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_next.modeling_qwen3_next import apply_rotary_pos_emb
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from guided_spec.models.packed.layer import rotation_table
from guided_spec.models.pictures.axes import split_by
from guided_spec.ops.attention.slot_attention import (
    FP8,
    HeadNorms,
    KeyValues,
    QkvShape,
    Rotation,
    SlotIndex,
    store_keys_values,
)
from guided_spec.ops.pointwise import rotate_and_store
from tests.ops.interpreted import run_interpreted
from tests.slot_lines import NUM_SLOTS, Span, Unused, kept_positions, make_tables, places_of

SHAPES = [
    *(QkvShape(4, 2, 16), QkvShape(1, 1, 8), QkvShape(6, 3, 24), QkvShape(5, 1, 6)),
    QkvShape(4, 2, 16, has_gates=True),
    QkvShape(6, 3, 24, in_pairs=True),
]
PARTS = (1, 4)  # of a head, one is turned
LENGTH = 9
# The first row goes on behind the last position.
SPANS = [Span(2, 7, 4), Span(0, 1, 3), Span(-1, 3, 1), Span(0, 4, 2)]
NOTHING: list[Span] = []

COMPARE = """
import torch
from guided_spec.ops.attention.slot_attention import FP8
from guided_spec.ops.pointwise import rotate_and_store
from guided_spec.ops.pointwise_triton import rotate_and_store as kernel
from tests.ops.interpreted import round_to_fp8_as_devices_do
from tests.ops.test_rotary import (
    BLOCKS, NOTHING, SHAPES, SPANS, empty, make, norms_of, stored_again
)
from tests.slot_lines import kept_positions

round_to_fp8_as_devices_do()
for shape in SHAPES:
    for spans, block in ((NOTHING, 4), *((SPANS, block) for block in BLOCKS)):
        for norms in (None, *norms_of(shape)):
            for num_axes in (0, 3):
                part = 4 if (shape.has_gates or shape.in_pairs) and norms is not None else 1
                packed, rotation, places = make(shape, spans, block, part=part, num_axes=num_axes)
                buffers, expected = empty(shape, places, block), empty(shape, places, block)
                turned = packed.clone()
                rotate_and_store(turned, rotation, shape, norms, expected, places)
                kernel(packed, rotation, shape, norms, buffers, places)
                torch.testing.assert_close(packed, turned, rtol=1e-5, atol=1e-6)
                kept = kept_positions(places, block)
                for found, wanted in zip(buffers, expected):
                    found, wanted = found.transpose(1, 2)[kept], wanted.transpose(1, 2)[kept]
                    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
                in_fp8 = empty(shape, places, block, FP8)
                packed = make(shape, spans, block, part=part, num_axes=num_axes).packed * 300
                kernel(packed, rotation, shape, norms, in_fp8, places)
                for found, wanted in zip(in_fp8, stored_again(packed, shape, places, block)):
                    found, wanted = (one.float().transpose(1, 2)[kept] for one in (found, wanted))
                    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
print("equal")
"""

BLOCKS = (3, 4, LENGTH + 1)


class Given(NamedTuple):
    """A packed projection, a rotation, and places."""

    packed: Tensor
    rotation: Rotation
    places: SlotIndex


def make(
    shape: QkvShape,
    spans: list[Span] = SPANS,
    block: int = 4,
    *,
    part: int = 1,
    num_axes: int = 0,
) -> Given:
    torch.manual_seed(len(spans))
    unused = Unused(2, 1)
    places = places_of(spans, make_tables(NUM_SLOTS, LENGTH, block), LENGTH, unused)
    packed = torch.randn(places.tokens.shape[1], shape.width)
    cos, sin = (torch.randn(LENGTH, -(-shape.size // part // 2)).repeat(1, 2) for _ in range(2))
    rotation = Rotation(cos, sin)
    if num_axes:
        axes = torch.randint(LENGTH + 2, (NUM_SLOTS, num_axes, LENGTH + 1), dtype=torch.int32)
        places = replace(places, axes=axes)
        split = torch.randint(num_axes, (cos.shape[1] // 2,), dtype=torch.int32)
        rotation = rotation._replace(axis_of=split)
    return Given(packed, rotation, places)


def norms_of(shape: QkvShape) -> list[HeadNorms]:
    """Before and after the rotation."""
    query, key = torch.rand(2, shape.size)
    return [HeadNorms(query, key, 1e-6, come_after=after) for after in (False, True)]


def empty(
    shape: QkvShape, places: SlotIndex, block: int = 4, dtype: torch.dtype = torch.float32
) -> KeyValues:
    size = (int(places.tables.max()) + 1, shape.keys, block, shape.size)
    return KeyValues(torch.zeros(size).to(dtype), torch.zeros(size).to(dtype))


def stored_again(packed: Tensor, shape: QkvShape, places: SlotIndex, block: int) -> KeyValues:
    """Buffers of fp8 with the keys and values of a packed projection that was rotated."""
    heads = packed.unflatten(1, (-1, shape.size))
    new = KeyValues(*heads[:, shape.stride * shape.queries :].chunk(2, 1))
    buffers = empty(shape, places, block, FP8)
    store_keys_values(new, buffers, places)
    return buffers


def norms_as(norm: str, shape: QkvShape) -> tuple[HeadNorms | None, list[Any]]:
    """And those of transformers: modules for queries and for keys."""
    if not norm:
        return None, [torch.nn.Identity()] * 2
    is_whole = norm == "all heads"
    count = (shape.queries, shape.keys) if is_whole else (1, 1)
    stock: list[Any] = [Qwen3RMSNorm(shape.size * number, 1e-6) for number in count]
    for one in stock:
        torch.nn.init.uniform_(one.weight)
    query, key = (one.weight.detach() for one in stock)
    return HeadNorms(query, key, 1e-6, is_whole, norm == "heads after"), stock


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm", ["", "heads", "heads after", "all heads"])
@pytest.mark.parametrize("part", PARTS)
def test_it_is_what_transformers_computes(shape: QkvShape, norm: str, part: int) -> None:
    if shape.has_gates and norm == "all heads":
        pytest.skip("queries lie between gates")
    packed, rotation, places = make(shape, part=part)
    heads = packed.clone().view(1, len(packed), -1, shape.size)
    queries = shape.stride * shape.queries
    query, key, value = heads.split([queries, shape.keys, shape.keys], 2)
    query = query[:, :, :: shape.stride]
    norms, stock = norms_as(norm, shape)
    slots, positions = places.tokens
    turns = places.positions.clamp_max(LENGTH - 1)
    cos, sin = (part[turns].unsqueeze(0) for part in rotation[:2])
    rotate: Any = apply_pairs if shape.in_pairs else apply_rotary_pos_emb
    if norm == "heads after":
        query, key = rotate(query, key, cos, sin, unsqueeze_dim=2)
        query, key = stock[0](query), stock[1](key)
    else:
        query, key = (
            one(each.flatten(2)).view(each.shape) if norm == "all heads" else one(each)
            for one, each in zip(stock, (query, key), strict=True)
        )
        query, key = rotate(query, key, cos, sin, unsqueeze_dim=2)
    buffers = empty(shape, places)
    found = rotate_and_store(packed, rotation, shape, norms, buffers, places)
    torch.testing.assert_close(found, query[0], rtol=1e-5, atol=1e-6)
    kept = torch.zeros_like(kept_positions(places, 4))
    for at, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        if slot >= 0 and position < LENGTH:  # the rest goes to the sink
            block = places.tables[slot, position // 4]
            kept[block, position % 4] = True
            for states, buffer in ((key, buffers.keys), (value, buffers.values)):
                stored = buffer[block, :, position % 4]
                torch.testing.assert_close(stored, states[0, at], rtol=1e-5, atol=1e-6)
    kept |= ~kept_positions(places, 4)
    assert kept.sum() == 2 + 3 + 2 + NUM_SLOTS
    assert all(not buffer.transpose(1, 2)[~kept].any() for buffer in buffers)


ROTARY: dict[str, Any] = {"qwen2_vl": qwen2_vl, "qwen3_vl": qwen3_vl, "qwen3_5": qwen3_5}


@pytest.mark.parametrize("family", ROTARY)
@pytest.mark.parametrize("sections", [[2, 3, 3], [4, 2, 2], [1, 1, 6]])
def test_axes_are_those_of_transformers(family: str, sections: list[int]) -> None:
    """Whichever numbers of a head turn with which axis."""
    module, shape = ROTARY[family], QkvShape(4, 2, 16)
    packed, _, places = make(shape, num_axes=3)
    assert places.axes is not None
    rotary = build_rotary(module, sections)
    rotation = rotation_table(rotary, packed, LENGTH)
    at = places.axes[places.tokens[0].clamp_min(0), :, places.positions.clamp_max(LENGTH)]
    positions = at.T.unsqueeze(1).clamp_max(LENGTH - 1).long()
    query, key, _ = packed.clone().view(1, len(packed), -1, 16).split([4, 2, 2], 2)
    cos, sin = rotary(packed, positions)
    expected, _ = apply_rotary_pos_emb(query, key, cos, sin, unsqueeze_dim=2)
    found = rotate_and_store(packed, rotation, shape, None, empty(shape, places), places)
    torch.testing.assert_close(found, expected[0], rtol=1e-5, atol=1e-6)
    # And as a head's own configuration says it.
    rope = {"mrope_section": sections, "mrope_interleaved": family != "qwen2_vl"}
    split = split_by(rope, packed.device)
    assert split is not None
    assert rotation.axis_of is not None
    assert split.tolist() == rotation.axis_of.tolist()


def build_rotary(module: Any, sections: list[int]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    names = {"qwen2_vl": "Qwen2VL", "qwen3_vl": "Qwen3VLText", "qwen3_5": "Qwen3_5Text"}
    name = names[module.__name__.split(".")[-2]]
    config = SimpleNamespace(
        rope_parameters={**rope, "partial_rotary_factor": 1.0},
        **{"head_dim": 16, "max_position_embeddings": 64, "standardize_rope_params": None},
    )
    return getattr(module, f"{name}RotaryEmbedding")(config)


def test_plain_texts_pay_nothing() -> None:
    """Axes of texts are not looked at by a rotation that has one, nor are its axes without them."""
    packed, rotation, places = make(SHAPES[0], num_axes=3)
    assert rotation.axis_of is not None
    for alone in (rotation._replace(axis_of=None), rotation):
        where = replace(places, axes=None) if alone.axis_of is not None else places
        buffers = empty(SHAPES[0], places)
        found = rotate_and_store(packed.clone(), alone, SHAPES[0], None, buffers, where)
        plain = make(SHAPES[0])
        torch.manual_seed(0)
        expected = rotate_and_store(
            packed.clone(),
            plain.rotation._replace(cos=rotation.cos, sin=rotation.sin),
            SHAPES[0],
            None,
            empty(SHAPES[0], places),
            plain.places,
        )
        assert torch.equal(found, expected)


def test_bfloat16_is_rounded_once() -> None:
    shape = SHAPES[0]
    packed, rotation, places = make(shape)
    packed = packed.to(torch.bfloat16)
    wide = packed.float()
    expected = rotate_and_store(wide, rotation, shape, None, empty(shape, places), places)
    found = rotate_and_store(packed, rotation, shape, None, empty(shape, places), places)
    assert torch.equal(found, expected.to(torch.bfloat16))


@pytest.mark.slow
def test_the_kernel_computes_the_same() -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", COMPARE) == "equal"
