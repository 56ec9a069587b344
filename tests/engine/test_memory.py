"""How many slots fit the memory, and the default context."""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guided_spec import SamplingParams
from guided_spec.config import EngineConfig
from guided_spec.engine import setup as memory
from guided_spec.engine.setup import SlotPlan, plan_slots
from guided_spec.engine.steps.planner import Turns
from guided_spec.errors import ConfigError
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.ops.host import zeros_on_demand
from tests.learned_heads import write_head
from tests.models.tiny import kv_bytes_per_token, state_bytes_per_slot
from tests.tiny_llm import VOCAB_SIZE, make_llm, tiny_model

LENGTH = 64


def slot_bytes(name: str) -> int:
    model = tiny_model(name)
    return LENGTH * kv_bytes_per_token(model) + state_bytes_per_slot(model)


def slots(name: str, kv_memory_bytes: int | None, max_batch_size: int = 8) -> int:
    config = EngineConfig(
        kv_memory_bytes=kv_memory_bytes, max_batch_size=max_batch_size, max_model_len=LENGTH
    )
    return plan_slots(tiny_model(name), config).num_slots


def plan(kv_memory_bytes: int, model: Any = None, max_batch_size: int = 4) -> SlotPlan:
    config = EngineConfig(kv_memory_bytes=kv_memory_bytes, max_batch_size=max_batch_size)
    return plan_slots(model or tiny_model("llama"), config)


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


def test_blocks_have_what_states_leave() -> None:
    """One text of ``max_model_len`` tokens fits always; states of others come before blocks."""
    model, state = tiny_model("qwen3_5"), 10_000
    token = kv_bytes_per_token(model)
    text = LENGTH * token

    def shared(kv_memory_bytes: int) -> SlotPlan:
        config = EngineConfig(
            kv_memory_bytes=kv_memory_bytes, max_batch_size=3, max_model_len=LENGTH
        )
        return plan_slots(model, config, shares_blocks=True, state_bytes=state)

    assert shared(5 * text + 3 * state) == SlotPlan(3, LENGTH, 5 * LENGTH // BLOCK)
    assert shared(text + 3 * state) == SlotPlan(3, LENGTH, LENGTH // BLOCK)
    assert shared(text + 3 * state - 1) == SlotPlan(2, LENGTH, (text + state - 1) // text)
    assert shared(text + state) == SlotPlan(1, LENGTH, LENGTH // BLOCK)
    with pytest.raises(ConfigError, match="lower max_model_len or raise kv_memory_bytes"):
        shared(text + state - 1)


def test_hybrids_share_no_blocks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "guided_spec.engine.setup")
    with make_llm("qwen3_5", "none", kernels="packed", max_model_len=256) as llm:
        for _ in range(2):
            (output,) = llm.generate(["ab " * 60], SamplingParams(max_tokens=2))
            assert output.completions[0].stats.cached_tokens == 0
    assert "prefix cache off (a linear state has no beginning); drafts: none" in caplog.text


@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_log_says_who_reads_long_prompts(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, *, is_there: bool
) -> None:
    monkeypatch.setattr(memory, "is_installed", lambda: is_there)
    target = SimpleNamespace(
        blocks=SimpleNamespace(num_blocks=8),
        device=torch.device("cuda"),
        dtype=dtype,
        kv_dtype=dtype,
        num_slots=2,
        runs_as="packed forwards",
    )
    turns = Turns(86 if is_there else None)
    planner = SimpleNamespace(prefixes=SimpleNamespace(takes=True), turns=turns)
    engine: Any = SimpleNamespace(model=target, config=EngineConfig(), planner=planner)
    said = memory._describe(engine)
    assert ("FlashAttention 3" in said) == (is_there and dtype == torch.bfloat16)
    assert ("halves of 86 texts take turns" in said) == is_there


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("eagle3", {}, ["packed forwards (without graphs)", "cache on; drafts: eagle3 (packed f"]),
        ("qwen3_5_mtp", {}, ["drafts: qwen3_5_mtp (packed forwards)"]),
        ("glm4_moe_mtp", {}, ["packed forwards (without", "modules keep whole texts); drafts"]),
        ("eagle3", {"kernels": "stock"}, ["stock modules (kernels='stock' on cpu), ", " slots of"]),
        ("deepseek_mtp", {}, ["packed forwards (without", "deepseek_mtp (packed forwards)"]),
        ("eagle3", {"prefix_cache": False}, ["prefix cache off (prefix_cache=False)"]),
    ],
)
def test_the_log_says_what_runs_and_why(
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    method: str,
    options: dict[str, Any],
    said: list[str],
) -> None:
    caplog.set_level(logging.INFO, "guided_spec.engine.setup")
    headed = write_head(tmp_path, method, VOCAB_SIZE)
    make_llm(headed.target, method, headed.draft, **options).close()
    assert all(part in caplog.text for part in said), caplog.text


def test_the_log_says_that_no_other_form_fits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "guided_spec.engine.setup")
    make_llm("deepseek_v32", "none").close()
    assert "stock modules (no other form fits it)" in caplog.text


def test_the_default_is_a_quarter_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PHYS_PAGES": 8, "SC_PAGE_SIZE": slot_bytes("llama")}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert slots("llama", None) == 2


@pytest.mark.parametrize(
    ("free", "share", "budget"),
    [
        (70, 0.7, 49),
        (20, 0.7, 14),
        (18, 0.7, 12),
        (12, 0.7, 6),
        (7, 0.7, 3.5),
        (64, 0.5, 32),
        (6, 1 / 3, 2),
    ],
)
def test_what_a_gpu_gives_by_default(
    monkeypatch: pytest.MonkeyPatch, free: int, share: float, budget: float
) -> None:
    """In GiB; what is left holds activations, graphs, and a draft model.

    Torch keeps what engines had that are closed, until it is asked to give it back.
    """
    size, kept = 2**30, [7]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: ((free - sum(kept)) * size, 80 * size)
    )
    assert memory._default_budget(torch.device("cuda"), share) == budget * size


@pytest.mark.parametrize(
    ("kv_dtype", "has_draft_model", "share"),
    [("auto", False, 0.7), ("fp8", False, 0.7), ("auto", True, 1 / 2), ("fp8", True, 1 / 3)],
)
def test_a_draft_model_has_memory_for_as_many_tokens(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: Any, share: float, *, has_draft_model: bool
) -> None:
    """It keeps 16 bits, where the target may keep 8."""
    asked: list[float] = []

    def budget(_: torch.device, part: float) -> int:
        asked.append(part)
        return 10**6

    monkeypatch.setattr(memory, "_default_budget", budget)
    config = EngineConfig(max_model_len=LENGTH, kv_dtype=kv_dtype)
    plan_slots(tiny_model("llama"), config, has_draft_model=has_draft_model)
    assert asked == [share]


def test_a_draft_model_is_told_from_a_head(tmp_path: Path) -> None:
    headed, target = write_head(tmp_path, "eagle3", VOCAB_SIZE), tiny_model("llama")
    assert not memory._is_model(None, target)
    assert not memory._is_model(headed.draft, target)
    assert memory._is_model(headed.target, target)
    assert memory._is_model(target, target)
    assert memory._is_model(tmp_path / "of another kind", target)


def test_fewer_slots_than_requests_still_serve_all() -> None:
    per_token = kv_bytes_per_token(tiny_model("llama"))
    with make_llm("llama", kv_memory_bytes=2 * LENGTH * per_token, max_model_len=LENGTH) as llm:
        outputs = llm.generate(["a", "b", "c", "d", "e"])
    assert [output.finish_reason for output in outputs] == ["length"] * 5
    assert [len(output.token_ids) for output in outputs] == [LENGTH - 1] * 5


def test_the_context_is_the_models_own_unless_told(caplog: pytest.LogCaptureFixture) -> None:
    with make_llm("llama", max_model_len=None, max_batch_size=1) as llm:
        assert llm.max_model_len == 512
        with llm.with_proposer("none") as other:
            assert other.max_model_len == 512
    assert not caplog.records
    with pytest.raises(ConfigError, match="max_model_len=513: the model's context is 512"):
        make_llm("llama", max_model_len=513)


def test_memory_shortens_the_context_before_it_takes_slots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "LEAST_CONTEXT", 100)
    monkeypatch.setattr(memory, "STEP", 8)
    token = kv_bytes_per_token(tiny_model("llama"))
    assert plan(4 * 512 * token) == SlotPlan(4, 512)
    assert not caplog.records
    assert plan(4 * 511 * token) == SlotPlan(4, 504)
    assert plan(4 * 100 * token) == SlotPlan(4, 100)
    assert plan(4 * 100 * token - 1) == SlotPlan(3, 100)
    assert plan(100 * token) == SlotPlan(1, 100)
    with pytest.raises(ConfigError, match="lower max_model_len or raise kv_memory_bytes"):
        plan(100 * token - 1)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 4
    first = caplog.records[0]
    assert first.name == "guided_spec.engine.setup"
    assert (
        "texts may have 504 tokens, the model's own 512: the KV cache may take"
        in first.getMessage()
    )


def test_a_context_below_the_least_is_kept_whole(caplog: pytest.LogCaptureFixture) -> None:
    assert plan(512 * kv_bytes_per_token(tiny_model("llama"))) == SlotPlan(1, 512)
    assert not caplog.records


def test_a_rope_that_grows_with_the_batch_is_kept_to_what_it_was_made_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = copy.copy(tiny_model("llama"))
    model.config = copy.deepcopy(model.config)
    model.config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 96,
    }
    assert plan(2**30, model) == SlotPlan(4, 96)
    assert "texts may have 96 tokens, the model's own 512: after that its rotary" in caplog.text


def test_slots_take_memory_as_they_are_used() -> None:
    """A long default context would be dear otherwise, on machines that never need it."""
    like = torch.ones(2, 3, dtype=torch.bfloat16)
    found = zeros_on_demand(like, (3, 5, 7))
    assert found.shape == (3, 5, 7)
    assert found.dtype == torch.bfloat16
    assert not found.any()
    assert found.data_ptr() % 64 == 0
    before = _resident_bytes()
    large = zeros_on_demand(like, (2**28,))
    assert _resident_bytes() - before < 2**26
    assert large[-1] == 0


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
