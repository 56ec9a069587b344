"""Positions of three axes, in each form in which a model runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from guided_spec.errors import ModelError
from guided_spec.models.causal_lm import make_causal_lm, stock_lm
from guided_spec.models.line_lm import LineLM
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed.decoder import PackedDecoder
from guided_spec.models.packed.graph_pool import GraphPool
from guided_spec.models.pictures.axes import SlotAxes, split_of
from guided_spec.models.pictures.embedding import PictureEmbedding
from guided_spec.models.pictures.vision import split_vision
from guided_spec.models.stock.decoder import StockDecoder
from guided_spec.ops.attention.slot_attention import SlotIndex
from guided_spec.ops.side_stream import SideStream
from guided_spec.types import SamplingParams
from tests.pictures.axes_lines import compared
from tests.pictures.sighted import ask, sighted
from tests.pictures.test_texts import AXES, CAT, DOG, HYBRIDS, LONG, PROMPTS, expected, texts

FORMS = {
    "packed forwards": "auto",
    "stock modules over blocks": "auto",
    "stock modules": "stock",
}


def make_blocks_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PackedDecoder, "of", lambda *_: None)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", AXES)
def test_texts_are_those_of_transformers(
    family: str, form: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if form == "stock modules over blocks":
        if family in HYBRIDS:
            pytest.skip("a state of its own is in no block")
        make_blocks_only(monkeypatch)
    with caplog.at_level("INFO"), sighted(family).llm("ngram", kernels=FORMS[form]) as llm:
        assert texts(llm, PROMPTS) == texts(llm, PROMPTS) == expected(family, PROMPTS)
    assert f"{form} (" in caplog.text


@pytest.mark.parametrize("family", AXES)
def test_a_slot_has_the_positions_of_its_text(family: str) -> None:
    """A slot's next text, of pictures or not, has its own positions, and so have equal prompts."""
    one = sighted(family)
    prompts = [PROMPTS[at] for at in (0, 2, 3, 0, 0, 2)]
    with one.llm("ngram", max_batch_size=2) as llm:
        assert texts(llm, prompts) == expected(family, prompts)
    with pytest.MonkeyPatch.context() as patch, one.llm() as llm:
        patch.setattr(SlotAxes, "put", lambda *_: None)
        assert texts(llm, PROMPTS[:1]) != expected(family, PROMPTS[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", AXES)
def test_logits_are_those_of_the_stock_modules(family: str, dtype: torch.dtype) -> None:
    for one in compared(family, "cpu", dtype):
        assert one.error < (1e-5 if dtype == torch.float32 else 0.05)


def swapped(split: Tensor) -> Tensor:
    """Height for width."""
    return torch.where(split == 1, 2, torch.where(split == 2, 1, split)).int()


@pytest.mark.parametrize("wrong", [torch.zeros_like, swapped])
@pytest.mark.parametrize("family", AXES)
def test_a_wrong_rotation_is_found(
    family: str,
    wrong: Callable[[Tensor], Tensor],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wronged = "guided_spec.models.packed.layer.split_of"
    monkeypatch.setattr(wronged, lambda *given: wrong(split_of(*given)))
    language = split_vision(sighted(family).model, 8).language
    with pytest.raises(ModelError, match="in packed form differ from its own"):
        make_causal_lm(language, num_slots=2, max_length=64, kernels="packed")
    with sighted(family).llm("ngram") as llm:
        assert "It runs by its stock modules instead" in caplog.text
        assert texts(llm, PROMPTS[:2]) == expected(family, PROMPTS[:2])


def test_wrong_positions_of_blocks_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    make_blocks_only(monkeypatch)
    monkeypatch.setattr(SlotIndex, "on_axes", None)
    language = split_vision(sighted("qwen2_vl").model, 8).language
    with pytest.raises(ModelError, match="in packed form differ from its own"):
        make_causal_lm(language, num_slots=2, max_length=64, kernels="packed")


@pytest.mark.parametrize("family", AXES)
def test_a_form_that_was_tried_has_plain_positions(family: str) -> None:
    language: Any = split_vision(sighted(family).model, 8).language
    for lm in (make_causal_lm(language, num_slots=2, max_length=64), stock_lm(language, 2, 64)):
        assert lm.axes is not None
        assert (lm.axes.positions == torch.arange(65)).all()


def test_models_of_one_axis_keep_none() -> None:
    language = split_vision(sighted("llava").model, 8).language
    lm = make_causal_lm(language, num_slots=2, max_length=64)
    assert isinstance(lm, LineLM)
    assert lm.axes is None
    assert stock_lm(language, 2, 64).axes is None


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_graphs_hold_all_but_forwards_that_add_features(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that add what they take of pictures do so launch by launch; the rest is in graphs."""
    run, graphed = GraphPool.run, list[tuple[int, bool]]()

    def watch(self: Any, key: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        graphed.append((int((inputs["token_ids"] != 0).sum()), key is not None))
        return run(self, key, inputs, *given, **options)

    monkeypatch.setattr(GraphPool, "run", watch)
    with sighted(family).llm("ngram", kernels="packed", prefill_tokens=16) as llm:
        prompts = [ask(CAT, LONG)]
        assert texts(llm, prompts) == expected(family, prompts)
        assert all(is_graph for _, is_graph in graphed[-4:])
        without = [at for at, (_, is_graph) in enumerate(graphed) if not is_graph]
        # A picture of 6 tokens with its frame is in the first piece, or the first two.
        assert len(without) in ((1, 2) if family == "qwen3_vl" else (0,))
        graphed.clear()
        texts(llm, [PROMPTS[2]])
        assert graphed
        assert all(is_graph for _, is_graph in graphed)


@pytest.mark.parametrize("family", AXES)
def test_a_prefix_is_shared_with_its_pictures(family: str) -> None:
    one = sighted(family)
    prompts = [ask(CAT, LONG, DOG, end) for end in ("a", "What is it?", "b")]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with one.llm("ngram") as llm:
        first = texts(llm, prompts[:1])
        requests = [llm.prepare_chat(prompt, params=params) for prompt in prompts]
        found = llm.generate([request.prompt for request in requests], params)
    assert first == expected(family, prompts[:1])
    assert [each.completions[0].token_ids for each in found] == expected(family, prompts)
    assert all((each.stats.cached_tokens >= BLOCK) == (family not in HYBRIDS) for each in found)


@pytest.mark.parametrize("family", AXES)
def test_copies_of_a_prompt_go_on_alike(family: str) -> None:
    one = sighted(family)
    params = SamplingParams(max_tokens=12, ignore_eos=True, n=3, temperature=0.0)
    with one.llm("ngram") as llm:
        request = llm.prepare_chat(PROMPTS[1], params=params)
        (found,) = llm.generate([request.prompt], params)
    (wanted,) = expected(family, PROMPTS[1:2])
    assert [each.token_ids for each in found.completions] == [wanted] * 3


@pytest.mark.parametrize("kernels", ["auto", "packed"])
@pytest.mark.parametrize("family", [one for one in AXES if one not in HYBRIDS])
def test_requests_that_lose_their_blocks_go_on(family: str, kernels: str) -> None:
    one, params = sighted(family), SamplingParams(max_tokens=120, ignore_eos=True)
    token = stock_lm(split_vision(one.model, 1).language, 1, 64).kv_bytes_per_token
    options = {"kv_memory_bytes": 9 * BLOCK * token, "picture_tokens": 64, "kernels": kernels}
    with one.llm("ngram", **options) as llm:
        found = texts(llm, PROMPTS, params)
    assert found == [one.expected(prompt, 120) for prompt in PROMPTS]


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_a_draft_model_of_the_same_kind(family: str) -> None:
    """It shares the target's blocks, and its positions with them."""
    one, draft = sighted(family), split_vision(sighted(family, 1).model, 1).language
    with one.llm("draft_model", draft=draft) as llm:
        assert texts(llm, PROMPTS) == texts(llm, PROMPTS) == expected(family, PROMPTS)


def test_the_positions_of_a_slot() -> None:
    table = PictureEmbedding(torch.zeros(10, 4), 8, 1)
    axes = SlotAxes(2, 9, table, SideStream.none())
    prompt = torch.tensor([[0, 1, 7, 4], [0, 1, 2, 4], [0, 1, 1, 4]])  # a video's time is 7
    axes.put(1, prompt, 3)
    tail = torch.arange(5, 11).expand(3, -1)  # goes on after the last, 4
    assert torch.equal(axes.positions[1].long(), torch.cat([prompt, tail], 1))
    assert (axes.positions[0] == torch.arange(10)).all()
    assert not axes.deepens([1], [0])
    table.deepen(1)
    assert axes.deepens([0, 1], [0, 2])
    assert not axes.deepens([0, 1], [0, 3])
    assert not axes.deepens([-1], [0])
    axes.put(1, torch.arange(20).expand(3, -1))  # cut
    assert (axes.positions == torch.arange(10)).all()
    axes.put(1, None)
    assert not axes.deepens([1], [0])
    assert (axes.positions == torch.arange(10)).all()


def test_the_block_form_may_be_tried_by_itself() -> None:
    language = split_vision(sighted("qwen3_vl").model, 8).language
    assert StockDecoder.of(language, 64) is not None
