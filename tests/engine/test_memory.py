"""How many slots fit the memory, and the default context."""

from __future__ import annotations

import os

import pytest

from guided_spec.config import EngineConfig
from guided_spec.engine.memory import slots_that_fit
from guided_spec.errors import ConfigError
from guided_spec.models.causal_lm import kv_bytes_per_token, state_bytes_per_slot
from tests.tiny_llm import make_llm, tiny_model

LENGTH = 64


def slot_bytes(name: str) -> int:
    model = tiny_model(name)
    return LENGTH * kv_bytes_per_token(model) + state_bytes_per_slot(model)


def slots(name: str, kv_memory_bytes: int | None, max_batch_size: int = 8) -> int:
    config = EngineConfig(kv_memory_bytes=kv_memory_bytes, max_batch_size=max_batch_size)
    return slots_that_fit(tiny_model(name), config, LENGTH)


def test_bytes_of_a_llama_slot() -> None:
    # 4 layers, keys and values, 2 heads of width 8, float32
    assert slot_bytes("llama") == LENGTH * 4 * 2 * 2 * 8 * 4


def test_a_linear_state_counts_once_a_slot() -> None:
    assert state_bytes_per_slot(tiny_model("llama")) == 0
    assert state_bytes_per_slot(tiny_model("qwen3_5")) > 0
    # one layer of four has keys and values
    assert kv_bytes_per_token(tiny_model("qwen3_5")) * 4 == kv_bytes_per_token(tiny_model("llama"))


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_the_budget_decides(name: str) -> None:
    size = slot_bytes(name)
    assert slots(name, 3 * size) == 3
    assert slots(name, 4 * size - 1) == 3
    assert slots(name, 100 * size) == 8  # max_batch_size
    with pytest.raises(ConfigError, match="lower max_model_len or raise kv_memory_bytes"):
        slots(name, size - 1)


def test_the_default_is_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PHYS_PAGES": 8, "SC_PAGE_SIZE": slot_bytes("llama")}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert slots("llama", None) == 2


def test_fewer_slots_than_requests_still_serve_all() -> None:
    per_token = kv_bytes_per_token(tiny_model("llama"))
    with make_llm("llama", kv_memory_bytes=2 * LENGTH * per_token, max_model_len=LENGTH) as llm:
        outputs = llm.generate(["a", "b", "c", "d", "e"])
    assert [output.finish_reason for output in outputs] == ["length"] * 5
    assert [len(output.token_ids) for output in outputs] == [LENGTH - 1] * 5


def test_the_context_is_the_models_own_unless_told() -> None:
    with make_llm("llama", max_model_len=None, max_batch_size=1) as llm:
        assert llm.max_model_len == 512
    with pytest.raises(ConfigError, match="max_model_len=513: the model's context is 512"):
        make_llm("llama", max_model_len=513)
