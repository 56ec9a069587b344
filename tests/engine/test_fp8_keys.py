"""Keys and values in fp8: what drafts write is what is written without them, in less memory."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guided_spec.config import EngineConfig
from guided_spec.engine import setup
from guided_spec.engine.llm import LLM
from guided_spec.engine.setup import plan_slots
from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.packed.blocks import BLOCK, Blocks, KeptShape
from guided_spec.models.packed_form import PackedForm
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.ops.attention.slot_attention import FP8
from guided_spec.types import SamplingParams
from tests.learned_heads import HeadedTarget
from tests.models.speculation import prompts_of
from tests.models.tiny import build, kv_bytes_per_token
from tests.tiny_llm import make_llm, near_copy, tiny_model

SYSTEM = [5 + at * 7 % 300 for at in range(2 * BLOCK + 5)]
PROMPTS = [SYSTEM[:length] + [40 + length % 7] for length in (2 * BLOCK + 5, 2 * BLOCK + 1, 9)]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, grammar=GrammarSpec.regex("[0-9]{3}(-[a-z]{2}){4}")),
    SamplingParams(max_tokens=24, temperature=1.0, seed=7, n=3, ignore_eos=True),
]
Texts = list[tuple[list[int], str]]


def written(model: Any, proposer: str, draft: Any = None, **options: Any) -> list[Texts]:
    """The same prompts twice: the second time there are blocks of the first."""
    given: dict[str, Any] = {"kv_dtype": "fp8", "verifier": "coupled", **options}
    with make_llm(model, proposer, draft, **given) as llm:
        found = [llm.generate(PROMPTS, PARAMS) for _ in range(2)]
    assert [output.error for some in found for output in some] == [None] * 6
    return [
        [(c.token_ids, c.finish_reason) for one in some for c in one.completions] for some in found
    ]


@pytest.mark.parametrize(
    ("name", "proposer"),
    [
        *(("llama", "draft_model"), ("deepseek_v3", "draft_model"), ("qwen3_5", "ngram")),
        *(("llama4", "draft_model"), ("gpt_oss", "chain:grammar_forced+draft_model")),
        *(("mistral", "chain:grammar_forced+ngram"), ("gemma3", "draft_model")),
    ],
)
def test_drafts_change_no_text(name: str, proposer: str) -> None:
    """Of keys, latents, windows and sinks; with states, and by stock modules over blocks."""
    expected = written(name, "none", prefix_cache=False, max_batch_size=1)
    assert expected[0] == expected[1]
    draft = near_copy(name) if "draft_model" in proposer else None
    assert written(name, proposer, draft, kernels="packed") == expected


@pytest.mark.parametrize("proposer", ["eagle3", "chain:grammar_forced+eagle3"])
def test_a_head_s_drafts_change_no_text(headed: HeadedTarget, proposer: str) -> None:
    expected = written(headed.target, "none", prefix_cache=False)
    found = written(headed.target, proposer, headed.draft, kernels="packed")
    assert found == expected


def test_texts_go_back_to_the_queue_and_lose_nothing() -> None:
    """Few blocks, which are taken, shared, copied and written again."""
    token = kv_bytes_per_token(tiny_model("llama")) // 4
    options: dict[str, Any] = {"kv_memory_bytes": 5 * BLOCK * token, "kernels": "packed"}
    expected = written("llama", "none", prefix_cache=False)
    assert written("llama", "draft_model", near_copy("llama"), **options) == expected


def test_the_keys_are_rounded() -> None:
    """Not quietly kept as they are: the same numbers in fp8 give other logits."""
    model = build("llama")
    form = PackedForm.of(model, "packed", 40)
    assert form is not None
    limits: dict[str, Any] = {"num_slots": 1, "max_length": 40, "kernels": "packed"}
    plain, rounded = (make_causal_lm(model, form=one, **limits) for one in (form, form.in_fp8()))
    assert (plain.kv_dtype, rounded.kv_dtype) == (torch.float32, FP8)
    inputs = SlotInputs(torch.tensor(prompts_of([30], 64, 0)), [0], [0], [30])
    first, second = (lm.forward(inputs).logits for lm in (plain, rounded))
    assert first is not None
    assert second is not None
    assert (first - second).abs().mean() > 1e-3
    assert torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1] > 0.9


@pytest.mark.parametrize(("proposer", "layers"), [("eagle3", 1), ("draft_model", 4)])
def test_drafters_keep_theirs_in_their_dtype(
    headed: HeadedTarget, proposer: str, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, dtypes = Blocks.allocate, []

    def watched(blocks: Blocks, kept: KeptShape, like: torch.Tensor, *, lag: int = 0) -> Any:
        dtypes.append(like.dtype)
        return allocate(blocks, kept, like, lag=lag)

    monkeypatch.setattr(Blocks, "allocate", watched)
    draft = headed.draft if proposer == "eagle3" else near_copy("llama")
    with make_llm(headed.target, proposer, draft, kv_dtype="fp8", kernels="packed") as llm:
        assert " in fp8 " in repr(llm)
    assert dtypes == [FP8] * 4 + [torch.float32] * layers


@pytest.mark.parametrize(("dtype", "times"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_the_same_memory_holds_more_tokens(dtype: torch.dtype, times: int) -> None:
    model: Any = copy.deepcopy(tiny_model("llama"))
    model = model.to(dtype)
    memory = 7 * BLOCK * kv_bytes_per_token(model)

    def blocks(kv_dtype: Any) -> int | None:
        config = EngineConfig(kv_memory_bytes=memory, max_model_len=64, kv_dtype=kv_dtype)
        return plan_slots(model, config, shares_blocks=True).num_blocks

    assert (blocks("auto"), blocks("fp8")) == (7, 7 * times)


def test_states_are_counted_as_they_are() -> None:
    """Of layers that keep one; fp8 halves what the others keep."""
    model, state = tiny_model("qwen3_5"), 10_000
    token = kv_bytes_per_token(model)
    config = EngineConfig(
        kv_memory_bytes=8 * BLOCK * token + 3 * state,
        max_batch_size=3,
        max_model_len=64,
        kv_dtype="fp8",
    )
    assert plan_slots(model, config, shares_blocks=True, state_bytes=state).num_blocks == 32


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama", {"kernels": "stock"}, "kernels='stock' on cpu keeps them in the model's dtype"),
        ("llama", {"kv_dtype": "fp16"}, "must be one of auto, fp8"),
        ("zamba", {}, "'zamba' runs by its stock modules"),
    ],
)
def test_what_cannot_be_in_fp8_is_refused(name: str, options: dict[str, Any], reason: str) -> None:
    given = {"kv_dtype": "fp8", **options}
    with pytest.raises(ConfigError, match=rf"^kv_dtype='{given['kv_dtype']}': {reason}"):
        make_llm(name, "none", **given)


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "kv_cache_scheme"),
        (SimpleNamespace(to_dict=lambda: {"kv_cache_quant_algo": "FP8"}), "kv_cache_quant_algo"),
        ({"kv_cache_scheme": None}, ""),
    ],
)
def test_scales_of_a_checkpoint_are_not_passed_over_in_silence(
    stored: Any, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model("llama")
    monkeypatch.setattr(model.config, "quantization_config", stored, raising=False)
    for kv_dtype, is_said in (("auto", False), ("fp8", bool(name))):
        caplog.clear()
        with make_llm(model, "none", kv_dtype=kv_dtype):
            assert (f"(k_scale, v_scale; {name}) are not used" in caplog.text) == is_said


def test_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, setup.__name__)
    with make_llm("llama", "none", kv_dtype="fp8") as llm:
        assert isinstance(llm, LLM)
    assert f"blocks of {BLOCK} tokens in fp8 for 5 texts" in caplog.text
