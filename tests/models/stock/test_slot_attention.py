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
from guided_spec.ops.attention.slot_attention import KeyValues
from tests.models.tiny import build
from tests.slot_lines import Span, Unused, make_tables, places_of

MAX_LENGTH, NUM_SLOTS, BLOCK = 24, 5, 5
TABLES = make_tables(NUM_SLOTS, MAX_LENGTH, BLOCK)
SLOTS = [3, -1, 0, 4]
MODELS = ["llama", "llama3_rope", "qwen3", "qwen3_moe", "mistral", "gemma3", "gpt_oss"]
# Tokens fed to each row at each step: prompts of different lengths, then a few, then one.
STEPS = ([9, 0, 2, 5], [4, 0, 4, 4], [1, 0, 1, 1], [3, 0, 6, 2], [1, 0, 1, 1])


def make_buffers(model: PreTrainedModel) -> list[KeyValues]:
    """Blocks that hold NaN where nothing was written."""
    config: Any = model.config
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (int(TABLES.max()) + 1, config.num_key_value_heads, BLOCK, width)
    return [
        KeyValues(torch.full(shape, torch.nan), torch.full(shape, torch.nan))
        for _ in range(config.num_hidden_layers)
    ]


def feed(model: Any, texts: Tensor, spans: Sequence[Span], buffers: list[KeyValues]) -> Tensor:
    """[N, V]: the logits of a line of each text's tokens, and of two unused ones behind them."""
    places = places_of(spans, TABLES, MAX_LENGTH, Unused(2, 1))
    slots, positions = places.tokens
    rows = torch.tensor([SLOTS.index(slot) for slot in slots.tolist()])
    line = texts[rows, positions.clamp_max(texts.shape[1] - 1)].unsqueeze(0)
    with attending(buffers, places):
        found = model(input_ids=line, position_ids=positions.unsqueeze(0), use_cache=False)
    logits: Tensor = found.logits[0]
    return logits


def make_texts(model: PreTrainedModel) -> Tensor:
    return torch.randint(1, model.config.vocab_size, (len(SLOTS), MAX_LENGTH))


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_text_that_grows(name: str) -> None:
    model: Any = build(name)
    implementation = model.config._attn_implementation
    texts, buffers = make_texts(model), make_buffers(model)
    expected = model(input_ids=texts, use_cache=False).logits
    starts = [0] * len(SLOTS)
    with using_slot_attention(model.config):
        for counts in STEPS:
            spans = [Span(*row) for row in zip(SLOTS, starts, counts, strict=True)]
            found = feed(model, texts, spans, buffers)
            wanted = [expected[row, s.start : s.start + s.length] for row, s in enumerate(spans)]
            torch.testing.assert_close(
                found[: sum(counts)], torch.cat(wanted), atol=2e-5, rtol=1e-4
            )
            starts = [start + count for start, count in zip(starts, counts, strict=True)]
    assert model.config._attn_implementation == implementation


@torch.inference_mode()
def test_rejected_tokens_leave_no_trace() -> None:
    model: Any = build("llama")
    texts, buffers = make_texts(model), make_buffers(model)
    used = [row for row, slot in enumerate(SLOTS) if slot >= 0]
    expected = model(input_ids=texts, use_cache=False).logits[used, 6:9]
    wrong = texts.roll(6, 1)
    with using_slot_attention(model.config):
        for start, count, ids in ((0, 6, texts), (6, 5, wrong), (6, 3, texts)):
            found = feed(model, ids, [Span(SLOTS[row], start, count) for row in used], buffers)
    torch.testing.assert_close(found[:-2].view_as(expected), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "feature"),
    [("gemma2", "softcap"), ("deepseek_v3", "different sizes")],
)
@torch.inference_mode()
def test_unsupported_attention_is_refused_by_name(name: str, feature: str) -> None:
    model: Any = build(name)
    before = model.config._attn_implementation
    places = places_of([Span(0, 0, 2)], TABLES, MAX_LENGTH)
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
    places = places_of([Span(0, 0, 2)], TABLES, MAX_LENGTH)
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
