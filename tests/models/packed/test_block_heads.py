"""Packed block heads against the stock ones, in every layout that is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from guided_spec.models.heads.loading import load_head
from guided_spec.models.packed.blocks import BLOCK, Blocks
from guided_spec.models.packed.graph_pool import ROW_SIZES, SIZES
from guided_spec.models.packed.heads import PackedBlock
from guided_spec.models.packed.slot_head import ReadAhead
from tests.models.heads.block_checkpoints import write_block
from tests.models.packed.block_pairs import FORMS, LENGTH, WIDTH, BlockPair
from tests.models.tiny import build

CPU = torch.device("cpu")
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 5}
VOCAB = 64


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return build("llama", vocab_size=VOCAB)


def name(form: tuple[str, str, dict[str, Any]]) -> str:
    return "-".join([*form[:2], *form[2]])


@pytest.mark.parametrize("form", FORMS, ids=name)
@pytest.mark.parametrize("is_shared", [True, False], ids=["given tables", "its own"])
def test_blocks_are_those_of_the_stock_head(
    tmp_path: Path, target: PreTrainedModel, form: Any, *, is_shared: bool
) -> None:
    """Texts of any length, in any pieces; drafts that nothing becomes of; slots used again."""
    pair = BlockPair(tmp_path, target, form, Blocks(6, LENGTH, CPU) if is_shared else None)
    pair.read([2, 0, 3], [BLOCK - 2, 3, 20])
    pair.check([2, 0, 3])
    pair.read([0, 2], [2, 5])  # over the edge of a block
    pair.check([3, 2, 0])
    pair.read([2], [1])
    pair.check([2])
    for runner in (pair.stock, pair.packed):
        runner.copy_slot(2, [1, 4])
        runner.release([3])
    assert pair.packed.length(3) == 0
    assert [pair.packed.length(slot) for slot in (1, 4)] == [BLOCK + 4] * 2
    pair.read([1, 3], [4, 2])
    pair.check([4, 3, 1, 2, 0])


@pytest.mark.parametrize("form", [FORMS[0], FORMS[-1]], ids=name)
def test_a_draft_whose_block_is_gone_is_made_again(
    tmp_path: Path, target: PreTrainedModel, form: Any
) -> None:
    pair = BlockPair(tmp_path, target, form)
    pair.read([0, 1, 2], [7, 4, 1])
    pair.packed.logits([1])
    pair.check([0, 1, 2])  # of one of these it is known


SLOTS, COUNTS, TOKENS = [2, 0, 3], [1, 4, 2], 4


@pytest.mark.parametrize("form", [FORMS[0], FORMS[3], FORMS[-1]], ids=name)
@pytest.mark.parametrize("most", [[TOKENS] * 3, [3, 4, 2], COUNTS])
def test_what_is_confirmed_was_read(
    tmp_path: Path, target: PreTrainedModel, form: Any, most: list[int]
) -> None:
    """And what is not leaves no trace; what stands behind a row's last token is any."""
    pair = BlockPair(tmp_path, target, form, Blocks(6, LENGTH, CPU))
    pair.read(SLOTS, [3, BLOCK - 1, 1])
    last = torch.tensor(COUNTS) - 1
    for is_right in (True, False, True):
        tokens, states = [pair.tokens(count) for count in COUNTS], pair.states(3, TOKENS)
        padded = torch.tensor([[*row, *[-1] * (TOKENS - len(row))] for row in tokens])
        pair.packed.logits(SLOTS)
        before = [pair.packed.length(slot) for slot in SLOTS]
        assert pair.packed.can_read_ahead(SLOTS, most)
        if is_right:
            pair.packed.read_ahead(ReadAhead(SLOTS, padded, states, last, most))
            for slot, count in zip(SLOTS, COUNTS, strict=True):
                pair.packed.commit(slot, count)
        else:
            wrong = padded.new_full(padded.shape, 7)
            pair.packed.read_ahead(ReadAhead(SLOTS, wrong, pair.states(3, TOKENS), last, most))
            assert [pair.packed.length(slot) for slot in SLOTS] == before
        rows = [row[:count] for row, count in zip(states, COUNTS, strict=True)]
        pair.stock.read(SLOTS, tokens, rows)
        if not is_right:
            pair.packed.read(SLOTS, tokens, rows)
        pair.check(SLOTS)


def test_no_further_than_a_slot_and_a_graph_reach(tmp_path: Path, target: PreTrainedModel) -> None:
    pair = BlockPair(tmp_path, target, FORMS[0])
    pair.read([0, 1], [LENGTH - 3, 2])
    assert pair.packed.can_read_ahead([0, 1], [3, 9])
    assert not pair.packed.can_read_ahead([0, 1], [4, 9])
    pair.window.largest = 12
    assert pair.packed.can_read_ahead([0, 1], [3, 9])
    assert not pair.packed.can_read_ahead([0, 1], [3, 10])
    assert not pair.stock.can_read_ahead([0, 1], [1, 1])  # it has no graphs


@pytest.mark.parametrize("form", [FORMS[0], FORMS[3], FORMS[-1]], ids=name)
def test_what_is_captured_serves_all(tmp_path: Path, target: PreTrainedModel, form: Any) -> None:
    """Lines and blocks of more tokens than a graph takes run without one."""
    pair = BlockPair(tmp_path, target, form)
    pair.window.largest = 5 * (WIDTH + 1)
    graphs = pair.reader.graphs
    with torch.inference_mode():
        count = sum(1 for _ in pair.packed.capture())
    assert count == len(graphs)
    assert count >= sum(size <= 5 for size in ROW_SIZES) + 5
    assert count <= len(ROW_SIZES) + len(SIZES)
    pair.read([0, 1, 2, 3, 4, 5], [1, 2, 3, 9, 4, 7])
    for slots in ([0, 1, 2, 3, 4, 5], [3], [4, 1]):
        pair.check(slots)
        pair.read(slots, [2] * len(slots))
    assert len(graphs) == count


def test_weights_are_stored_once(tmp_path: Path, target: PreTrainedModel) -> None:
    """Those that read a text are parts of those that draft, for every user of the head."""
    pair = BlockPair(tmp_path, target, FORMS[0])
    again = PackedBlock.of(pair.head, LENGTH)
    assert again is not None
    weight = again._keys_values.weight
    for index, layer in enumerate(pair.head.layers):
        own = torch.cat([layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight])
        assert torch.equal(weight[index], own)
        assert weight[index].data_ptr() == layer.self_attn.k_proj.weight.data_ptr()
    first = pair.reader._packed._keys_values.weight
    assert first.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dflash2", {}),  # has convolutions
        ("dflash", {**SLIDING, "use_sliding_window": True, "is_causal": False}),
        ("dflash", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ],
)
def test_what_is_not_served(
    tmp_path: Path, target: PreTrainedModel, kind: str, changes: dict[str, Any]
) -> None:
    head: Any = load_head(kind, write_block(tmp_path, target, kind, "zlab", **changes), target)
    assert PackedBlock.of(head, LENGTH) is None
