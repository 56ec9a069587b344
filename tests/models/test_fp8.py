"""Checkpoints in fp8 keep their bytes and write the texts of the same numbers in float32."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, PreTrainedModel

from guided_spec.bundled import bundled_asset
from guided_spec.engine.llm import LLM
from guided_spec.errors import ModelError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.loading import load_model
from guided_spec.models.quantized import fp8
from guided_spec.models.quantized.fp8 import Fp8Experts, Fp8Linear, Fp8Recipe
from guided_spec.ops.linear.experts import Gating, close_experts, open_experts, route
from guided_spec.ops.linear.fp8_linear import FP8, Fp8Weight, scales_shape
from guided_spec.types import SamplingParams
from tests.models.fp8_checkpoints import FORMS, write_fp8
from tests.models.speculation import generate_alone, greedy_texts, prompts_of
from tests.models.tiny import build

VOCAB = 64
WIDE: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 200, "num_hidden_layers": 2}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])


def make(name: str, **fields: Any) -> PreTrainedModel:
    return build(name, vocab_size=VOCAB, **fields)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_texts_are_those_of_the_same_numbers_in_float32(
    form: str, name: str, tmp_path: Path
) -> None:
    fields = WIDE if name in ("llama", "qwen3") else {}
    whole = write_fp8(tmp_path, make(name, **fields), FORMS[form])
    model: Any = load_model(tmp_path, device="cpu")
    linears = [m for m in model.modules() if isinstance(m, Fp8Linear)]
    of_a_layer = 8 if name == "deepseek_v3" else 7
    assert len(linears) == of_a_layer * model.config.num_hidden_layers
    assert all(linear.weight.dtype == FP8 for linear in linears)
    assert model.dtype == torch.float32
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)
    prompts = prompts_of([5, 11, 1], VOCAB, 0)
    assert greedy_texts(model, prompts) == [generate_alone(whole, p, 16) for p in prompts]


@torch.inference_mode()
def test_a_model_that_transformers_knows_by_another_name(tmp_path: Path) -> None:
    whole = write_fp8(tmp_path, make("deepseek_v3"), FORMS["qwen"])
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "model_type": "kimi_k2"}))
    model: Any = load_model(tmp_path, device="cpu")
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_packing_stores_nothing_twice(tmp_path: Path) -> None:
    write_fp8(tmp_path, make("llama", **WIDE), FORMS["qwen"])
    model: Any = load_model(tmp_path, device="cpu")
    expected = model(IDS).logits
    for _ in range(2):  # the second one finds the weights packed
        assert make_causal_lm(model, num_slots=1, max_length=20, kernels="packed").is_packed
        assert torch.equal(model(IDS).logits, expected)
    attention = model.get_decoder().layers[1].self_attn
    storage = attention.q_proj.weight.untyped_storage()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == storage.data_ptr()
    assert storage.nbytes() == sum(
        part.weight.numel() for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    )


@pytest.mark.parametrize("spare", ["v_proj", "gate_proj", "layers.1.mlp.down_proj", "o_proj"])
@torch.inference_mode()
def test_some_layers_may_be_plain(spare: str, tmp_path: Path) -> None:
    """Products of several layers are one only where all are in one form."""
    whole = write_fp8(tmp_path, make("llama"), FORMS["small blocks"], spare)
    model = load_model(tmp_path, device="cpu")
    prompts = prompts_of([5, 11, 1], VOCAB, 0)
    assert greedy_texts(model, prompts) == [generate_alone(whole, p, 16) for p in prompts]


@pytest.mark.parametrize(("name", "spare"), [("qwen3_next", "in_proj_ba"), ("qwen3_5", "_proj_a")])
@torch.inference_mode()
def test_hybrids_are_packed_as_far_as_they_are_in_one_form(
    name: str, spare: str, tmp_path: Path
) -> None:
    whole = write_fp8(tmp_path, make(name), FORMS["small blocks"], spare, with_experts=True)
    model = load_model(tmp_path, device="cpu")
    prompts = prompts_of([5, 11, 1], VOCAB, 0)
    assert greedy_texts(model, prompts) == [generate_alone(whole, p, 16) for p in prompts]


@torch.inference_mode()
def test_half_precision_is_near(tmp_path: Path) -> None:
    whole: Any = write_fp8(tmp_path, make("qwen3"), FORMS["small blocks"])
    model: Any = load_model(tmp_path, device="cpu", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.dtype == torch.bfloat16
    expected = whole.to(torch.bfloat16)(IDS).logits
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0.1, atol=0.1)
    assert make_causal_lm(model, num_slots=1, max_length=20, kernels="packed").is_packed


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["eagle3", "mtp"])
def test_heads_draft_for_a_target_in_fp8(proposer: str, tmp_path: Path) -> None:
    target = load_model(bundled_asset("target"), device="cpu")
    whole = write_fp8(tmp_path, target, FORMS["small blocks"])
    params = SamplingParams(temperature=0.0, max_tokens=24, grammar=GrammarSpec.regex("[a-z ,]+"))
    prompts, found = ["Name: Ada", "A list of fruits:"], []
    shared: dict[str, Any] = {
        "tokenizer": bundled_asset("target"),
        "draft": bundled_asset(proposer),
        "max_model_len": 128,
    }
    for model in (str(tmp_path), whole):
        with LLM(model, proposer, **shared) as llm:
            outputs = llm.generate(prompts, params)
        found.append([output.token_ids for output in outputs])
        assert sum(sum(output.stats.accepted) for output in outputs) > 0
    assert found[0] == found[1]


@torch.inference_mode()
def test_experts_that_are_plain_stay_so(tmp_path: Path) -> None:
    whole: Any = write_fp8(tmp_path, make("qwen3_moe"), FORMS["small blocks"])
    model: Any = load_model(tmp_path, device="cpu")
    assert sum(isinstance(m, Fp8Linear) for m in model.modules()) == 4 * 4
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)
    prompts = prompts_of([5, 11, 1], VOCAB, 0)
    assert greedy_texts(model, prompts) == [generate_alone(whole, p, 16) for p in prompts]


@pytest.mark.parametrize("form", ["small blocks", "compressed channels", "static"])
@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "deepseek_v3"])
@torch.inference_mode()
def test_experts_in_fp8_keep_their_bytes(form: str, name: str, tmp_path: Path) -> None:
    whole: Any = write_fp8(tmp_path, make(name), FORMS[form], with_experts=True)
    model: Any = load_model(tmp_path, device="cpu")
    experts = model.get_decoder().layers[1].mlp.experts
    assert isinstance(experts, Fp8Experts)
    assert experts.gate_up_proj.dtype == experts.down_proj.dtype == FP8
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)
    prompts = prompts_of([5, 11, 1], VOCAB, 0)
    assert greedy_texts(model, prompts) == [generate_alone(whole, p, 16) for p in prompts]


@pytest.mark.parametrize("form", ["small blocks", "compressed channels"])
@torch.inference_mode()
def test_both_ways_of_a_device_give_the_same(form: str, tmp_path: Path) -> None:
    """What a device does for few tokens, and for many."""
    write_fp8(tmp_path, make("qwen3_moe"), FORMS[form], with_experts=True)
    model: Any = load_model(tmp_path, device="cpu", dtype="bfloat16")
    experts = model.get_decoder().layers[2].mlp.experts
    states, routes = torch.randn(5, 32).bfloat16(), route(torch.randn(5, 4), 2, is_normalized=True)
    expected = experts(states, *routes)
    opening, closing = experts.projection("gate_up_proj"), experts.projection("down_proj")
    opened = open_experts(states, routes.experts, opening, Gating())
    few = close_experts(opened, routes, closing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fp8Weight, "of", None)  # it would wait for the device
        many = fp8._grouped(states, routes, opening, closing)
    for found in (few, many):
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-2)


@torch.inference_mode()
def test_experts_of_another_form_are_multiplied_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = {**FORMS["qwen"].config, "weight_block_size": [16, 16]}
    form = FORMS["compressed blocks"]._replace(config=config, scale="weight_scale_inv")
    write_fp8(tmp_path, make("mixtral"), form)
    stored = load_file(tmp_path / "model.safetensors")
    names = [name for name in stored if ".experts." in name]
    assert names
    for name in names:
        stored[name] = stored[name].to(FP8)
        shape = scales_shape(stored[name].shape, (16, 16))
        stored[f"{name}_scale_inv"] = torch.full(shape, 2.0)
    rewrite(tmp_path, stored)
    with caplog.at_level(logging.WARNING):
        model: Any = load_model(tmp_path, device="cpu")
    assert "its experts are in fp8, and loaded as torch.float32" in caplog.text
    found = model.get_decoder().layers[1].mlp.experts.down_proj[3]
    name = next(name for name in names if "layers.1" in name and name.endswith("3.w2.weight"))
    torch.testing.assert_close(found, stored[name].float() * 2)


def test_modules_that_draft_are_left_out(tmp_path: Path) -> None:
    """They stand in the checkpoint of a target, and their heads read them."""
    whole: Any = write_fp8(tmp_path, make("llama"), FORMS["small blocks"])
    stored = load_file(tmp_path / "model.safetensors")
    for name in ("mtp.layers.0.mlp.up_proj", "model.layers.4.mlp.up_proj"):
        stored[f"{name}.weight"] = torch.randn(64, 32).to(FP8)
        stored[f"{name}.weight_scale_inv"] = torch.ones(4, 2)
    rewrite(tmp_path, stored)
    model: Any = load_model(tmp_path, device="cpu")
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_what_is_broken_is_named(tmp_path: Path) -> None:
    write_fp8(tmp_path, make("llama"), FORMS["small blocks"])
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    stored = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, {key: tensor for key, tensor in stored.items() if key != name})
    message = r"one without the other at 'model.layers.1.mlp.up_proj'; the checkpoint is broken"
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, device="cpu")
    rewrite(tmp_path, {**stored, name: torch.full((4, 2), torch.nan)})
    message = "layers.1.mlp.up_proj: scales='NaN or infinite': must be numbers: get"
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, device="cpu")
    rewrite(tmp_path, {**stored, name: torch.ones(3, 2)})
    message = r"model.layers.1.mlp.up_proj: scales=\(3, 2\): must be \(4, 2\) for blocks \(16, 24\)"
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_an_expert_that_is_broken_is_named(part: str, tmp_path: Path) -> None:
    write_fp8(tmp_path, make("qwen3_moe"), FORMS["small blocks"], with_experts=True)
    stored = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.2.mlp.experts.1.{part}.weight"
    whole = stored[name].float()
    whole[0, 1] = torch.nan
    rewrite(tmp_path, {**stored, name: whole.to(FP8)})
    message = f"model.layers.2.mlp.experts: 1.{part}.values='NaN': must be numbers"
    with pytest.raises(ModelError, match=message):
        load_model(tmp_path, device="cpu")


def test_numbers_of_another_kind_are_refused(tmp_path: Path) -> None:
    form = FORMS["qwen"]._replace(config={"quant_method": "fp8", "fmt": "e5m2"})
    write_fp8(tmp_path, make("llama"), form)
    with pytest.raises(ModelError, match="fmt='e5m2' is not supported; pass a checkpoint in e4m3"):
        load_model(tmp_path, device="cpu")


@torch.inference_mode()
def test_who_says_how_weights_are_quantized_gets_that(tmp_path: Path) -> None:
    config = {**FORMS["qwen"].config, "weight_block_size": [16, 16]}
    form = FORMS["compressed blocks"]._replace(config=config, scale="weight_scale_inv")
    whole: Any = write_fp8(tmp_path, make("llama"), form)
    asked = FineGrainedFP8Config(weight_block_size=(16, 16), dequantize=True)
    model: Any = load_model(tmp_path, device="cpu", quantization_config=asked)
    assert not any(isinstance(m, Fp8Linear) for m in model.modules())
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)


def test_other_methods_are_left_to_transformers() -> None:
    weights = {"type": "int", "num_bits": 4}
    int4 = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": weights}},
    }
    for config in ({"quant_method": "awq"}, int4):
        assert Fp8Recipe.of(config) is None
    assert Fp8Recipe.of(FORMS["compressed blocks"].config) == Fp8Recipe((16, 16))
    assert Fp8Recipe.of(FORMS["compressed tensors"].config) == Fp8Recipe(None)
