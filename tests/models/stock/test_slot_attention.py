"""Stock models over slots without a cache: they give what a forward over the whole text gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.stock.decoder import SLOT_ATTENTION, attending, using_slot_attention
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces
from tests.models.tiny import build

MAX_LENGTH, NUM_SLOTS = 24, 5
SLOTS = [3, -1, 0, 4]
MODELS = ["llama", "llama3_rope", "qwen3", "qwen3_moe", "mistral", "gemma3"]
# Tokens fed to each row at each step: prompts of different lengths, then a few, then one.
STEPS = ([9, 0, 2, 5], [4, 0, 4, 4], [1, 0, 1, 1], [3, 0, 6, 2], [1, 0, 1, 1])


def make_buffers(model: PreTrainedModel) -> list[KeyValues]:
    """Buffers that hold NaN where nothing was written."""
    config: Any = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (NUM_SLOTS, config.num_key_value_heads, MAX_LENGTH + 1, width)
    return [
        KeyValues(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        for _ in range(config.num_hidden_layers)
    ]


def feed(texts: Tensor, starts: Sequence[int], num_tokens: int) -> dict[str, Tensor]:
    """The model's arguments for the tokens of each text from ``starts`` on."""
    positions = torch.tensor(starts).unsqueeze(1) + torch.arange(num_tokens)
    token_ids = texts.gather(1, positions.clamp_max(texts.shape[1] - 1))
    return {"input_ids": token_ids, "position_ids": positions}


def make_texts(model: PreTrainedModel) -> Tensor:
    return torch.randint(1, model.config.vocab_size, (len(SLOTS), MAX_LENGTH))


def check_growth(model: Any, call: Any, steps: Sequence[Sequence[int]]) -> None:
    texts, buffers = make_texts(model), make_buffers(model)
    expected = model(input_ids=texts, use_cache=False).logits
    starts = [0] * len(SLOTS)
    with using_slot_attention(model.config):
        for counts in steps:
            places = SlotPlaces(torch.tensor(SLOTS), torch.tensor(starts))
            with attending(buffers, places):
                arguments = feed(texts, starts, max(counts))
                found = call(**arguments, use_cache=False).logits
            for row, count in enumerate(counts):
                span = slice(starts[row], starts[row] + count)
                torch.testing.assert_close(
                    found[row, :count], expected[row, span], atol=2e-5, rtol=1e-4
                )
            starts = [start + count for start, count in zip(starts, counts, strict=True)]


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_text_that_grows(name: str) -> None:
    model = build(name)
    implementation = model.config._attn_implementation
    check_growth(model, model, STEPS)
    assert model.config._attn_implementation == implementation


@torch.inference_mode()
def test_rejected_tokens_leave_no_trace() -> None:
    model: Any = build("llama")
    texts, buffers = make_texts(model), make_buffers(model)
    expected = model(input_ids=texts, use_cache=False).logits
    with using_slot_attention(model.config):
        for start, ids in ((0, texts[:, :6]), (6, texts[:, :5]), (6, texts[:, 6:9])):
            starts = torch.full((len(SLOTS),), start)
            positions = starts.unsqueeze(1) + torch.arange(ids.shape[1])
            with attending(buffers, SlotPlaces(torch.tensor(SLOTS), starts)):
                found = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    used = torch.tensor(SLOTS) >= 0
    torch.testing.assert_close(found[used], expected[used, 6:9], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "feature"),
    [("gemma2", "softcap"), ("gpt_oss", "s_aux"), ("deepseek_v3", "different sizes")],
)
@torch.inference_mode()
def test_unsupported_attention_is_refused_by_name(name: str, feature: str) -> None:
    model: Any = build(name)
    before = model.config._attn_implementation
    places = SlotPlaces(torch.tensor([0]), torch.tensor([0]))
    with (
        pytest.raises(ModelError, match=feature),
        using_slot_attention(model.config),
        attending([], places),
    ):
        model(input_ids=torch.ones(1, 2).long(), use_cache=False)
    assert model.config._attn_implementation == before


@torch.inference_mode()
def test_what_would_be_wrong_in_silence_is_refused() -> None:
    model: Any = build("mistral")
    call = {"input_ids": torch.ones(1, 2).long(), "use_cache": False}
    places = SlotPlaces(torch.tensor([0]), torch.tensor([0]))
    buffers = make_buffers(model)
    with using_slot_attention(model.config):
        with pytest.raises(ModelError, match="inside attending"):
            model(**call)
        with attending(buffers[:1], places), pytest.raises(ModelError, match="there are 1 buffers"):
            model(**call)
        with attending(buffers, places):
            with pytest.raises(ModelError, match="a mask of its own"):
                model(**call, attention_mask=torch.ones(1, 1, 2, 2).bool())
            model.config.layer_types = ["chunked_attention"] * 4
            with pytest.raises(ModelError, match="'chunked_attention' and passes no window"):
                model(**call)
            model.config.layer_types = ["full_attention"] * 4
            model.model.layers[0].self_attn.is_causal = False
            with pytest.raises(ModelError, match="does not look ahead"):
                model(**call)


def test_only_the_text_part_of_a_nested_configuration_changes() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3Config()
    config._attn_implementation = "sdpa"
    with using_slot_attention(config):
        assert config.text_config._attn_implementation == SLOT_ATTENTION
        assert config.vision_config._attn_implementation == "sdpa"
        assert config._attn_implementation == "sdpa"
    assert config.text_config._attn_implementation == "sdpa"
