"""DFlash heads against their equations, place by place, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.heads.block_head import BlockSlotHead
from guided_spec.models.heads.loading import find_method, load_head
from guided_spec.models.heads.slot_head import SlotRoom
from guided_spec.models.packed.blocks import BLOCK, Blocks
from tests.models.heads.heads import HEAD_DIM, HEADS, KV_HEADS, NORM_EPS, save, write_dflash
from tests.models.tiny import build

VOCAB, CPU, MASK = 64, torch.device("cpu"), 3
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
SLIDING = {**KINDS, "use_sliding_window": True}  # else Qwen3's configuration has no window


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return build("llama", vocab_size=VOCAB)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + NORM_EPS).rsqrt() * weight


def rotated(x: Tensor, position: int) -> Tensor:
    """[heads, D] at a position."""
    half = HEAD_DIM // 2
    angle = position * 1e4 ** (-torch.arange(half) / half)
    cos, sin = angle.cos().repeat(2), angle.sin().repeat(2)
    return x * cos + torch.cat([-x[:, half:], x[:, :half]], -1) * sin


class ByHand:
    """One block behind one text, without a cache; each place attends by itself."""

    def __init__(self, tensors: dict[str, Tensor], window: int | None, causal: set[int]) -> None:
        self.tensors, self.window, self.causal = tensors, window, causal

    def block(self, target: Any, states: Tensor, last: int, width: int) -> Tensor:
        """[width, V] behind the target's states [n, X]."""
        t, n = self.tensors, len(states)
        context = norm(states @ t["fc.weight"].T, t["hidden_norm.weight"])
        ids = torch.tensor([last] + [MASK] * width)
        x = target.get_input_embeddings().weight[ids]
        for index in range(2):
            layer = {
                name.removeprefix(f"layers.{index}."): tensor
                for name, tensor in t.items()
                if name.startswith(f"layers.{index}.")
            }
            x = x + self._attention(layer, index, context, x)
            inner = norm(x, layer["post_attention_layernorm.weight"])
            gate = torch.nn.functional.silu(inner @ layer["mlp.gate_proj.weight"].T)
            x = x + (gate * (inner @ layer["mlp.up_proj.weight"].T)) @ (
                layer["mlp.down_proj.weight"].T
            )
        assert len(context) == n
        scores: Tensor = norm(x[1:], t["norm.weight"]) @ target.get_output_embeddings().weight.T
        return scores

    def _attention(
        self, layer: dict[str, Tensor], index: int, context: Tensor, x: Tensor
    ) -> Tensor:
        normed, n = norm(x, layer["input_layernorm.weight"]), len(context)
        fed = torch.cat([context, normed])

        def heads(part: str, states: Tensor) -> Tensor:
            return (states @ layer[f"self_attn.{part}_proj.weight"].T).view(
                len(states), -1, HEAD_DIM
            )

        keys = norm(heads("k", fed), layer["self_attn.k_norm.weight"])
        keys = torch.stack([rotated(key, place) for place, key in enumerate(keys)])
        queries = norm(heads("q", normed), layer["self_attn.q_norm.weight"])
        values, outputs = heads("v", fed), []
        for step, query in enumerate(queries):
            place = n + step
            last = place if index in self.causal else len(fed) - 1
            window = self.window if index in self.causal else None
            seen = [at for at in range(last + 1) if window is None or place - at < window]
            asked = rotated(query, place)
            found = []
            for head in range(HEADS):
                own = head // (HEADS // KV_HEADS)
                scores = keys[seen, own] @ asked[head] / math.sqrt(HEAD_DIM)
                found.append(scores.softmax(0) @ values[seen, own])
            outputs.append(torch.cat(found))
        return torch.stack(outputs) @ layer["self_attn.o_proj.weight"].T


def make_runner(folder: Path, target: PreTrainedModel, blocks: Blocks | None) -> BlockSlotHead:
    """Its memory holds no numbers."""
    head: Any = load_head("dflash", folder, target)
    where: Any = {"device": CPU, "dtype": torch.float32, "blocks": blocks}
    runner = BlockSlotHead(head, SlotRoom(4, 2 * BLOCK, piece=9), 6, **where)
    with torch.inference_mode():
        for layer in runner._memory:
            for buffer in layer:
                buffer.fill_(torch.nan)
    return runner


@pytest.mark.parametrize(
    ("changes", "window", "causal"),
    [
        ({}, None, set()),
        (SLIDING, 5, {0}),
        (KINDS, None, {0}),
        ({"is_causal": True}, None, {0, 1}),
    ],
    ids=["full", "sliding", "without a window", "causal"],
)
@pytest.mark.parametrize("is_shared", [True, False], ids=["the target's tables", "its own"])
@torch.no_grad()
def test_blocks_by_hand(
    target: PreTrainedModel,
    tmp_path: Path,
    changes: dict[str, Any],
    window: int | None,
    causal: set[int],
    *,
    is_shared: bool,
) -> None:
    """Texts of any length, read in any pieces, drafted together; memory that holds no numbers."""
    folder = write_dflash(tmp_path, target, **changes)
    hand = ByHand(load_file(folder / "model.safetensors"), window, causal)
    blocks = Blocks(4, 2 * BLOCK, CPU) if is_shared else None
    runner = make_runner(folder, target, blocks)
    torch.manual_seed(0)
    slots, lengths = [2, 0, 3], [BLOCK + 5, 3, 20]
    states = [torch.randn(length, 2 * runner.head.hidden_size) for length in lengths]
    tokens = [torch.randint(VOCAB, (length,)).tolist() for length in lengths]
    runner.read(slots, [row[:2] for row in tokens], [row[:2] for row in states])
    runner.logits(slots)  # a draft that nothing becomes of
    runner.read(slots, [row[2:] for row in tokens if row[2:]], [row[2:] for row in states])
    assert [runner.length(slot) for slot in slots] == lengths
    expected = [
        hand.block(target, row, ids[-1], 6) for row, ids in zip(states, tokens, strict=True)
    ]
    for depth in range(6):
        found = runner.logits(slots)
        torch.testing.assert_close(
            found, torch.stack([row[depth] for row in expected]), rtol=1e-4, atol=1e-4
        )
        runner.walk(slots, torch.tensor([5, 6, 7]))
    assert runner.logits(slots).isneginf().all()
    runner.rewind(slots)
    torch.testing.assert_close(runner.logits([3])[0], expected[2][0], rtol=1e-4, atol=1e-4)
    runner.copy_slot(3, [1])
    torch.testing.assert_close(runner.logits([1])[0], expected[2][0], rtol=1e-4, atol=1e-4)
    runner.release([2])
    assert runner.length(2) == 0


def test_no_longer_than_its_block(target: PreTrainedModel, tmp_path: Path) -> None:
    head: Any = load_head("dflash", write_dflash(tmp_path, target, block_size=4), target)
    runner = BlockSlotHead(head, SlotRoom(1, 50), 9, device=CPU, dtype=torch.float32)
    runner.read([0], [[5, 6]], [torch.randn(2, 2 * head.hidden_size)])
    for depth in range(5):
        assert runner.logits([0]).isneginf().all() == (depth >= 3)
        runner.walk([0], torch.tensor([1]))


@torch.no_grad()
def test_scales_and_a_cap(target: PreTrainedModel, tmp_path: Path) -> None:
    plain: Any = load_head("dflash", write_dflash(tmp_path / "plain", target), target)
    section = {
        **{"mask_token_id": MASK, "target_layer_ids": [0, 1]},
        **{"output_multiplier": 0.5, "final_logit_softcapping": 2.0},
    }
    scaled: Any = load_head(
        "dflash", write_dflash(tmp_path / "scaled", target, dflash_config=section), target
    )
    hidden = torch.randn(3, plain.hidden_size) * 4
    expected = torch.tanh(plain.logits(hidden) * 0.5 / 2) * 2
    torch.testing.assert_close(scaled.logits(hidden), expected)


def test_it_is_found(target: PreTrainedModel, tmp_path: Path) -> None:
    assert find_method(write_dflash(tmp_path, target), target) == "dflash"


SECTION = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {**SECTION, "selector_top_k": 16}}, "found selector_top_k"),
        ({"dflash_config": {**SECTION, "target_layer_ids": [0, 9]}}, "target_layer_ids: expected"),
        ({"dflash_config": {**SECTION, "target_layer_ids": None}}, "target_layer_ids: expected"),
        ({"dflash_config": {**SECTION, "mask_token_id": 99}}, "mask_token_id: expected a row"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id: expected a row"),
        ({"block_size": 1}, "block_size: expected 2 or more, found 1"),
        ({"vocab_size": VOCAB + 1}, "made for another target: vocab_size"),
    ],
)
def test_what_is_refused(
    target: PreTrainedModel, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load_head("dflash", write_dflash(tmp_path, target, **changes), target)


def test_tensors_that_do_not_fit(target: PreTrainedModel, tmp_path: Path) -> None:
    folder = write_dflash(tmp_path, target)
    tensors = load_file(folder / "model.safetensors")
    tensors["layers.0.attention_conv.base_kernel"] = torch.zeros(2, 3, 4)
    del tensors["norm.weight"]
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    save(folder, config, tensors, "safetensors")
    with pytest.raises(ModelError, match="its tensors do not fit the head") as caught:
        load_head("dflash", folder, target)
    assert "norm.weight: expected" in str(caught.value)
    assert "attention_conv.base_kernel: expected none" in str(caught.value)
