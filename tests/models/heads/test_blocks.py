"""Block heads in every layout against their equations, place by place, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.heads.block.reader import ContextReader, MaskedReader
from guided_spec.models.heads.block.runner import BlockRunner
from guided_spec.models.heads.block.transitions import BlockPosition
from guided_spec.models.heads.loading import find_method, load_head
from guided_spec.models.heads.slot_head import SlotLimits
from guided_spec.models.packed.blocks import BLOCK, Blocks
from tests.models.heads.block_checkpoints import (
    DIALECTS,
    GROUP,
    LATTICE,
    RANK,
    STATE_SIZE,
    TAPS,
    TOP_K,
    write_block,
    write_dflash,
    write_p_eagle,
)
from tests.models.heads.heads import HEAD_DIM, HEADS, KV_HEADS, NORM_EPS, save, write_eagle3
from tests.models.tiny import build
from tests.tiers import examples

VOCAB, CPU, MASK = 64, torch.device("cpu"), 3
KINDS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
SECTION = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
LILICORR = {
    "lilicorr_enabled": True,
    **{f"lilicorr_{name}": value for name, value in LATTICE._asdict().items()},
}
DOMINO = {"projector_type": "domino", "gru_hidden_dim": 4, "emb_dim": 4}
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


def part_of(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def mixed(conv: dict[str, Tensor], side: int, fed: Tensor, x: Tensor) -> Tensor:
    """DFlash 2's convolution, channel by channel; x itself where there is none."""
    if not conv:
        return x
    count, size = x.shape
    moved = (fed @ conv["kernel_projection.weight"].T).view(count, 2, TAPS, size // GROUP)
    result = torch.zeros_like(x)
    for place in range(count):
        for channel in range(size):
            for tap in range(min(TAPS, place + 1)):
                kernel = conv["base_kernel"][side, tap, channel]
                kernel = kernel + moved[place, side, tap, channel // GROUP]
                result[place, channel] += kernel * x[place - tap, channel]
    return result


class Places(NamedTuple):
    """Of each place: what it is made from [W, H], and its logits by itself [W, D]."""

    outputs: Tensor
    logits: Tensor


class ByHand:
    """One block behind one text, without a cache; each place attends by itself."""

    def __init__(
        self,
        tensors: dict[str, Tensor],
        window: int | None = None,
        causal: Iterable[int] = (),
        first: int = 1,
    ) -> None:
        """first: the place of the block that predicts the first token."""
        self.tensors, self.window, self.causal, self.first = tensors, window, set(causal), first

    def block(self, target: Any, states: Tensor, last: int, width: int) -> Places:
        """Behind the target's states [n, X]."""
        t, n = self.tensors, len(states)
        context = norm(states @ t["fc.weight"].T, t["hidden_norm.weight"])
        ids = torch.tensor([last] + [MASK] * (width - 1 + self.first))
        x = t.get("embed_tokens.weight", target.get_input_embeddings().weight)[ids]
        for index in range(2):
            layer = part_of(t, f"layers.{index}.")
            conv, fed = part_of(layer, "attention_conv."), norm(x, layer["input_layernorm.weight"])
            found = self._attention(layer, index, context, mixed(conv, 0, fed, fed))
            x = x + mixed(conv, 1, fed, found)
            conv = part_of(layer, "mlp_conv.")
            fed = norm(x, layer["post_attention_layernorm.weight"])
            inner = mixed(conv, 0, fed, fed)
            gate = torch.nn.functional.silu(inner @ layer["mlp.gate_proj.weight"].T)
            found = (gate * (inner @ layer["mlp.up_proj.weight"].T)) @ (
                layer["mlp.down_proj.weight"].T
            )
            x = x + mixed(conv, 1, fed, found)
        assert len(context) == n
        outputs = norm(x[self.first :], t["norm.weight"])
        head = t.get("lm_head.weight", target.get_output_embeddings().weight)
        return Places(outputs, outputs @ head.T)

    def behind(
        self, outputs: Tensor, logits: Tensor, before: Sequence[int], embedding: Tensor
    ) -> Tensor:
        """The scores [D] of the last of some places, outputs [W, H], behind the tokens ``before``
        each. logits: [D], its own."""
        t, output, previous = self.tensors, outputs[-1], before[-1]
        if "prefix_gru.weight_hh_l0" in t:
            if len(before) <= 2:
                return logits
            gru = torch.nn.GRU(len(output), STATE_SIZE, bias=False)
            gru.load_state_dict(
                {name: t[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")}
            )
            state = gru(embedding[list(before)].unsqueeze(1))[1].flatten()
            inner = t["embed_proj.0.weight"] @ torch.cat([output, state])
            return logits + t["embed_proj.2.weight"] @ torch.nn.functional.silu(inner)
        if "markov_head.joint_proj.weight" in t:
            state = read = torch.zeros(RANK)
            for hidden, token in zip(outputs, before, strict=True):
                fed = torch.cat([state, t["markov_head.markov_w1.weight"][token], hidden])
                found = t["markov_head.joint_proj.weight"] @ fed + t["markov_head.joint_proj.bias"]
                keep, new, read = found[:RANK].sigmoid(), found[RANK:-RANK], found[-RANK:]
                state = keep * state + (1 - keep) * new.tanh()
            return logits + t["markov_head.markov_w2.weight"] @ read.tanh()
        if "markov_head.markov_w1.weight" in t:
            latent = t["markov_head.markov_w1.weight"][previous]
            if "markov_head.gate_proj.weight" in t:
                fed = torch.cat([output, latent])
                gate = t["markov_head.gate_proj.weight"] @ fed + t["markov_head.gate_proj.bias"]
                latent = gate.sigmoid() * latent
            return logits + t["markov_head.markov_w2.weight"] @ latent
        if "candidate_selector.predecessor_codebook" in t:
            kept = torch.full_like(logits, -torch.inf)
            wanted = t["candidate_selector.hidden_projection.weight"] @ output
            wanted = wanted * t["candidate_selector.predecessor_codebook"][previous]
            for token in logits.topk(TOP_K).indices.tolist():
                gained = t["candidate_selector.successor_codebook"][token] @ wanted
                kept[token] = logits[token] + gained
            return kept
        return logits

    def _attention(
        self, layer: dict[str, Tensor], index: int, context: Tensor, x: Tensor
    ) -> Tensor:
        n = len(context)
        fed = torch.cat([context, x])

        def heads(part: str, states: Tensor) -> Tensor:
            return (states @ layer[f"self_attn.{part}_proj.weight"].T).view(
                len(states), -1, HEAD_DIM
            )

        keys = norm(heads("k", fed), layer["self_attn.k_norm.weight"])
        keys = torch.stack([rotated(key, place) for place, key in enumerate(keys)])
        queries = norm(heads("q", x), layer["self_attn.q_norm.weight"])
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


WHERE: Any = {"device": CPU, "dtype": torch.float32}


def make_runner(
    folder: Path, target: PreTrainedModel, blocks: Blocks | None, method: str = "dflash"
) -> BlockRunner:
    """Its memory holds no numbers."""
    head: Any = load_head(method, folder, target)
    reader = ContextReader(head, SlotLimits(4, 2 * BLOCK, piece=9), blocks=blocks, **WHERE)
    with torch.inference_mode():
        for layer in reader.slots.memory:
            for buffer in layer:
                buffer.fill_(torch.nan)
    return BlockRunner(reader, 4, 6, **WHERE)


@pytest.mark.parametrize(
    ("changes", "window", "causal"),
    [
        ({}, None, set()),
        (SLIDING, 5, {0}),
        (KINDS, None, {0}),
        ({"is_causal": True}, None, {0, 1}),
        ({"dflash_config": {**SECTION, "causal_head": True}}, None, {0, 1}),
    ],
    ids=["full", "sliding", "without a window", "causal", "JetSpec's"],
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
    states = [torch.randn(length, 2 * target.config.hidden_size) for length in lengths]
    tokens = [torch.randint(VOCAB, (length,)).tolist() for length in lengths]
    runner.read(slots, [row[:2] for row in tokens], [row[:2] for row in states])
    runner.logits(slots)  # a draft that nothing becomes of
    runner.read(slots, [row[2:] for row in tokens if row[2:]], [row[2:] for row in states])
    assert [runner.length(slot) for slot in slots] == lengths
    expected = [
        hand.block(target, row, ids[-1], 6).logits for row, ids in zip(states, tokens, strict=True)
    ]
    for depth in range(6):
        found = runner.logits(slots)
        torch.testing.assert_close(
            found, torch.stack([row[depth] for row in expected]), rtol=1e-4, atol=1e-4
        )
        runner.append(slots, torch.tensor([5, 6, 7]))
    assert runner.logits(slots).isneginf().all()
    runner.rewind(slots)
    torch.testing.assert_close(runner.logits([3])[0], expected[2][0], rtol=1e-4, atol=1e-4)
    runner.copy_slot(3, [1])
    torch.testing.assert_close(runner.logits([1])[0], expected[2][0], rtol=1e-4, atol=1e-4)
    runner.release([2])
    assert runner.length(2) == 0


@pytest.mark.parametrize(("changes", "window", "causal"), [({}, None, set()), (SLIDING, 5, {0})])
def test_many_blocks_of_a_text_at_once(
    target: PreTrainedModel, tmp_path: Path, changes: Any, window: int | None, causal: set[int]
) -> None:
    """As they are trained: each sees its text up to its own begin, and itself."""
    folder = write_dflash(tmp_path, target, **changes)
    hand = ByHand(load_file(folder / "model.safetensors"), window, causal)
    head: Any = load_head("dflash", folder, target)
    torch.manual_seed(0)
    starts = torch.tensor([[1, 9, 4], [12, 2, 3]])
    states = torch.randn(2, 12, 2 * target.config.hidden_size)
    last = torch.randint(VOCAB, (2, 3))
    found = head.logits(head.train_blocks(last, starts, 6, states))
    for row in range(2):
        for block in range(3):
            text = states[row, : int(starts[row, block])]
            expected = hand.block(target, text, int(last[row, block]), 6).logits
            torch.testing.assert_close(found[row, block], expected, rtol=1e-4, atol=1e-4)


def test_no_longer_than_its_block(target: PreTrainedModel, tmp_path: Path) -> None:
    head: Any = load_head("dflash", write_dflash(tmp_path, target, block_size=4), target)
    runner = BlockRunner(ContextReader(head, SlotLimits(1, 50), **WHERE), 1, 9, **WHERE)
    runner.read([0], [[5, 6]], [torch.randn(2, 2 * head.hidden_size)])
    for depth in range(5):
        assert runner.logits([0]).isneginf().all() == (depth >= 3)
        runner.append([0], torch.tensor([1]))


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


LAYOUTS = [
    *((kind, dialect, {}) for kind, dialects in DIALECTS.items() for dialect in dialects),
    ("dflash", "speculators", {"draft_vocab_size": 40}),
    (
        "dspark",
        "speculators",
        {"draft_vocab_size": 40, "sample_from_anchor": False, "block_size": 8},
    ),
    ("dspark", "deepseek", {"markov_head_type": "gated"}),
    ("dspark", "deepseek", {"markov_head_type": "rnn"}),
]


def planned(
    head: Any, hand: ByHand, states: Tensor, block: Places, before: Sequence[int]
) -> Tensor:
    """The scores [D] of the position after ``before``; test_lattice.py has their equations."""
    place = len(before) - 1
    anchor = norm(states[-1:] @ hand.tensors["fc.weight"].T, hand.tensors["hidden_norm.weight"])
    plan = head.planner.plan(block.logits[None], block.outputs[None], anchor)
    parts = (block.outputs[place, None], torch.tensor(before[-1:]), torch.zeros(1, 0))
    position = BlockPosition(*parts, torch.tensor([place]), plan)
    found: Tensor = head.transition.step(block.logits[place, None], position)[0]
    return found


@pytest.mark.parametrize(("kind", "dialect", "changes"), LAYOUTS)
@torch.no_grad()
def test_layouts_by_hand(
    target: PreTrainedModel, tmp_path: Path, kind: str, dialect: str, changes: dict[str, Any]
) -> None:
    """Each as it is published is found, and its places are those of the equations."""
    folder = write_block(tmp_path, target, kind, dialect, **changes)
    assert find_method(folder, target) == kind
    tensors = load_file(folder / "model.safetensors")
    predicts_own = (dialect == "zlab" and kind != "domino") or (
        dialect == "speculators"
        and not json.loads((folder / "config.json").read_text()).get("sample_from_anchor")
    )
    hand = ByHand(tensors, first=1 if predicts_own else 0)
    runner = make_runner(folder, target, None, kind)
    head: Any = load_head(kind, folder, target)
    assert head.aux_hidden_layers == (1, 2)
    assert head.layout.width == 7  # of 8 places, or of 7 that all predict
    torch.manual_seed(1)
    states = torch.randn(9, 2 * target.config.hidden_size)
    tokens = torch.randint(VOCAB, (9,)).tolist()
    runner.read([1], [tokens], [states])
    expected = hand.block(target, states, tokens[-1], 6)
    runner.logits([1])
    outputs = runner._outputs[1]
    exact: Any = {"rtol": 1e-5, "atol": 1e-5 * float(expected.logits.abs().max())}
    torch.testing.assert_close(outputs, expected.outputs, **exact)
    torch.testing.assert_close(head.logits(outputs), expected.logits, **exact)
    before, embedding = (
        tokens[-1:],
        tensors.get("embed_tokens.weight", cast(Any, target).get_input_embeddings().weight),
    )
    for place, walked in enumerate([5, 61, 7, None, 33, 12]):
        found = runner.logits([1])[0].float()
        outputs, logits = expected.outputs[: place + 1], expected.logits[place]
        wanted = hand.behind(outputs, logits, before, embedding)
        if head.planner is not None:
            wanted = planned(head, hand, states, expected, before)
        torch.testing.assert_close(found, wanted, **exact)
        chosen = int(found.argmax()) if walked is None else walked
        runner.append([1], torch.tensor([chosen]))
        before.append(chosen)


@pytest.mark.parametrize(
    ("kind", "dialect", "changes"),
    [("domino", "zlab", {}), ("dspark", "deepseek", {"markov_head_type": "rnn"})],
    ids=["domino", "dspark rnn"],
)
@settings(max_examples=examples(20))
@given(walk=st.lists(st.sampled_from(["append", "score", "mark", "rewind"]), max_size=12))
@torch.no_grad()
def test_states_of_any_walk(
    target: PreTrainedModel,
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    dialect: str,
    changes: dict[str, Any],
    walk: list[str],
) -> None:
    """Tokens may be appended unasked, and taken back: scores are those of the draft as it is."""
    folder = write_block(tmp_path_factory.mktemp("head"), target, kind, dialect, **changes)
    walked, fresh = (make_runner(folder, target, None, kind) for _ in range(2))
    torch.manual_seed(3)
    states, tokens = torch.randn(5, 2 * target.config.hidden_size), [9, 8, 7, 6, 5]
    walked.read([1], [tokens], [states])
    draft, kept, random = list[int](), list[int](), torch.Generator().manual_seed(len(walk))
    for step in (*walk, "score"):
        if step == "append":
            draft.append(int(torch.randint(VOCAB, (), generator=random)))
            walked.append([1], torch.tensor(draft[-1:]))
        elif step == "mark":
            walked.mark([1])
            kept = draft.copy()
        elif step == "rewind":
            walked.rewind([1])
            draft = kept.copy()
        else:
            fresh.release([2])
            fresh.read([2], [tokens], [states])
            for token in draft:
                fresh.logits([2])
                fresh.append([2], torch.tensor([token]))
            torch.testing.assert_close(walked.logits([1]), fresh.logits([2]))


@torch.no_grad()
def test_ends_that_are_the_targets_own_take_no_memory(
    target: PreTrainedModel, tmp_path: Path
) -> None:
    folder = write_block(tmp_path, target, "dspark", "deepseek")
    tensors, model = load_file(folder / "model.safetensors"), cast(Any, target)
    tensors["embed_tokens.weight"] = model.get_input_embeddings().weight.clone()
    tensors["lm_head.weight"] = model.get_output_embeddings().weight.clone()
    save(folder, json.loads((folder / "config.json").read_text()), tensors, "safetensors")
    head: Any = load_head("dspark", folder, target)
    assert head.embed_tokens is head.lm_head is None


@pytest.mark.parametrize("layout", ["speculators", "specforge"])
@torch.no_grad()
def test_masks_of_p_eagle(target: PreTrainedModel, tmp_path: Path, layout: Any) -> None:
    """One forward over the masks is one over the text and the masks, causally, without a cache."""
    write_p_eagle(tmp_path, target, layout=layout, draft_vocab_size=40)
    assert find_method(tmp_path, target) == "p_eagle"
    head: Any = load_head("p_eagle", tmp_path, target)
    runner = BlockRunner(MaskedReader(head, SlotLimits(3, 40), 5, **WHERE), 3, 5, **WHERE)
    torch.manual_seed(2)
    lengths, slots = [7, 3], [2, 0]
    states = [torch.randn(length, 3 * target.config.hidden_size) for length in lengths]
    tokens = [torch.randint(VOCAB, (length,)).tolist() for length in lengths]
    for _ in range(2):  # what masks leave behind is overwritten
        runner.release(slots)
        runner.read(slots, [row[:2] for row in tokens], [row[:2] for row in states])
        runner.logits(slots)
        runner.read(slots, [row[2:] for row in tokens], [row[2:] for row in states])
        runner.logits(slots)
        found = head.logits(runner._outputs[slots])
    for row, length in enumerate(lengths):
        fed = [head.features(states[row]), head.features(head.mask_hidden).expand(4, -1)]
        ids, count = torch.tensor([[*tokens[row], *[MASK] * 4]]), length + 4
        output = head(
            ids,
            torch.cat(fed).unsqueeze(0),
            module=0,
            position_ids=torch.arange(count).unsqueeze(0),
            attention_mask=torch.ones(count, count, dtype=torch.bool).tril()[None, None],
            cache=None,
        )
        wanted = head.logits(output[0, length - 1 :])
        torch.testing.assert_close(found[row], wanted, rtol=1e-5, atol=1e-5)


def test_a_head_without_masks_is_no_p_eagle(target: PreTrainedModel, tmp_path: Path) -> None:
    write_eagle3(tmp_path, target)
    head: Any = load_head("eagle3", tmp_path, target)
    with pytest.raises(ModelError, match="expected a head with a mask_hidden"):
        MaskedReader(head, SlotLimits(3, 40), 5, **WHERE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dflash_config": {**SECTION, "attention_sink_bias": True}}, "found attention_sink_bias"),
        ({"dflash_config": {**SECTION, "target_layer_ids": [0, 9]}}, "target_layer_ids: expected"),
        ({"dflash_config": {**SECTION, "target_layer_ids": None}}, "target_layer_ids: expected"),
        ({"dflash_config": {**SECTION, "mask_token_id": 99}}, "mask_token_id: expected a row"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id: expected a row"),
        ({"block_size": 1}, "block_size: expected 2 or more, found 1"),
        (
            {"markov_rank": 4, "markov_head_type": "lstm"},
            "markov_head_type: expected vanilla, gated",
        ),
        ({"dflash_config": {**SECTION, "projector_type": "causal_v5"}}, "projector_type: expected"),
        (
            {"dflash_config": {**SECTION, **DOMINO, "gru_hidden_dim": 0}},
            "gru_hidden_dim: expected 1 or more, a whole number, found 0; correct config.json",
        ),
        (
            {"dflash_config": {**SECTION, **DOMINO, "emb_dim": None}},
            "emb_dim: expected a whole number above 0, found None",
        ),
        (
            {"dflash_config": {**SECTION, **DOMINO}, "markov_rank": 4},
            "expected one part that reads .* found prefix_gru and markov_head; such heads",
        ),
        (
            {"dflash_config": {**SECTION, **LILICORR, "lilicorr_candidate_topk": VOCAB + 1}},
            "lilicorr_candidate_topk: expected at most all 64 tokens, found 65",
        ),
        (
            {"dflash_config": {**SECTION, **LILICORR, "lilicorr_vector_eps": math.nan}},
            "lilicorr_vector_eps: expected a number above 0, found nan",
        ),
        (
            {"dflash_config": {**SECTION, "projector_type": "lilicorr"}},
            "lilicorr_hidden_size: expected a whole number above 0, found None",
        ),
        (
            {"dflash_config": {**SECTION, **LILICORR, "lilicorr_num_heads": 3}},
            "lilicorr_hidden_size: expected a multiple of 3 heads, found 8",
        ),
        (
            {"dflash_config": {**SECTION, **LILICORR, "lilicorr_logit_scale": 0}},
            "lilicorr_logit_scale: expected a number above 0, found 0",
        ),
        (
            {"dflash_config": {**SECTION, **LILICORR, "shift_label": True}},
            "shift_label: expected false in a head with lilicorr",
        ),
        (
            {"dflash_config": {**SECTION, **DOMINO}, "draft_vocab_size": 40},
            "draft_vocab_size: expected all 64 tokens in a head with a prefix_gru, found 40",
        ),
        (
            {"dflash_config": {**SECTION, "conv_kernel_size": 2, "conv_group_size": 5}},
            "conv_group_size: expected a divisor of 32, found 5",
        ),
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
    tensors["confidence_head.proj.weight"] = torch.ones(())
    del tensors["norm.weight"]
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    save(folder, config, tensors, "safetensors")
    with pytest.raises(ModelError, match="its tensors do not fit the head") as caught:
        load_head("dflash", folder, target)
    assert "norm.weight: expected" in str(caught.value)
    assert "confidence_head.proj.weight: expected none, found []" in str(caught.value)
    assert "attention_conv.base_kernel: expected none" in str(caught.value)
