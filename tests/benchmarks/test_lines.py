"""The forwards whose time is measured are forwards over texts that do not meet."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import attention, forwards, pieces
from benchmarks.kernels.lines import num_blocks, places_of
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.ops.attention.slot_attention import KeyValues

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


SMALL = {
    **{"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    **{"num_experts": 16, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", forwards.MODELS)
@torch.inference_mode()
def test_a_forward_is_timed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU launch by launch; the command asks for CUDA graphs."""
    kind, sizes = forwards.MODELS[name]
    latent = {"num_key_value_heads": 4, "head_dim": 64}  # of a rotary key
    small = {**SMALL, **latent} if kind == "DeepseekV3Config" else SMALL
    monkeypatch.setitem(forwards.MODELS, name, (kind, {**sizes, **small}))
    subject = forwards._subject(name, 4, 40 + forwards.WIDEST, CPU, "packed")
    memory = forwards._memory(subject.form, 3, 40)
    before = [layer[0].clone() for layer in memory]
    assert forwards._forward(subject.form, memory, (3, 5), 40) > 0
    for layer, old in zip(memory, before, strict=True):
        changed = layer[0] != old
        if isinstance(layer, KeyValues):
            assert changed.any(-1).any(1).sum() == 3 * 5  # and nowhere twice
        else:
            assert changed.flatten(1).any(1).all()
            assert layer.extent.tolist() == [[40, 5]] * 3


@torch.inference_mode()
def test_fp8_of_blocks_that_do_not_divide_a_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 576 outputs of DeepSeek's latents: what is timed is a model in packed form."""
    kind, sizes = forwards.MODELS["deepseek-v3"]
    latent = {"kv_lora_rank": 40, "num_key_value_heads": 4, "head_dim": 64, "n_routed_experts": 16}
    monkeypatch.setitem(forwards.MODELS, "deepseek-v3", (kind, {**sizes, **SMALL, **latent}))
    monkeypatch.setitem(forwards.FP8_MODELS, "deepseek-v3-fp8", ("deepseek-v3", (48, 32)))
    form = forwards._subject("deepseek-v3-fp8", 2, 104, CPU, "packed").form
    assert forwards._forward(form, forwards._memory(form, 1, 40), (1, 2), 40) > 0


@torch.inference_mode()
def test_the_weights_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the experts at one token, all of them at many."""
    name = "qwen3-30b-a3b"
    sizes = {**SMALL, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    monkeypatch.setitem(forwards.MODELS, name, ("Qwen3MoeConfig", sizes))
    model = forwards._subject(name, 2, 40, CPU, "packed").model
    attention, router = 64 * 64 * 2 + 2 * 64 * 32, 4 * 64
    dense, experts = 128 * 64 + 2 * (attention + router), 2 * 4 * 3 * 64 * 32
    assert forwards._bytes_read(model, 1) == 2 * (dense + experts / 2)
    assert forwards._bytes_read(model, 200) == pytest.approx(2 * (dense + experts))


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


@torch.inference_mode()
def test_pieces_of_prompts_stand_beside_drafts() -> None:
    """Each row sees its own text alone: what is behind it, and itself."""
    query, buffers, places = pieces._line([pieces.Row(1, 20, 70), pieces.Row(2, 3, 5)], CPU)
    assert (len(query), places.rows.tolist()) == (64, [[0, 1, 2], [70, 5, 5], [20, 23, 26]])
    assert len({*places.tables.flatten().tolist()}) == places.tables.numel()
    for slot, table in enumerate(places.tables):
        buffers.values[table.long()] = slot + 1
    found = pieces._attend(pieces.Line(query, buffers, places))[:26]
    expected = [1.0] * 20 + [2.0] * 3 + [3.0] * 3
    assert found[:, 0, 0].tolist() == pytest.approx(expected, rel=1e-2)
