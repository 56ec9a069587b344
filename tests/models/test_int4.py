"""Checkpoints in int4 keep 4 bits a number and write the texts of the same numbers in float32."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.bundled import bundled_asset
from guided_spec.engine.llm import LLM
from guided_spec.errors import ModelError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.loading import load_model
from guided_spec.models.quantized.int4 import Int4Linear
from guided_spec.models.quantized.int4_layouts import Int4Recipe
from guided_spec.ops.linear.int4_linear import multiply_out
from guided_spec.types import SamplingParams
from tests.models.int4_checkpoints import FORMS, Form, put_int4, write_int4
from tests.models.speculation import generate_alone, greedy_texts, prompts_of
from tests.models.tiny import build

VOCAB = 64
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])


def make(name: str, **fields: Any) -> PreTrainedModel:
    return build(name, vocab_size=VOCAB, **{**WIDE, **fields})


@pytest.mark.parametrize("form", FORMS)
@torch.inference_mode()
def test_texts_are_those_of_the_same_numbers_in_float32(form: str, tmp_path: Path) -> None:
    whole: Any = write_int4(tmp_path, make("llama"), FORMS[form])
    model: Any = load_model(tmp_path, device="cpu")
    linears = [module for module in model.modules() if isinstance(module, Int4Linear)]
    assert len(linears) == 7 * model.config.num_hidden_layers
    for linear in linears:
        assert linear.weight.nbytes * 2 == linear.in_features * linear.out_features
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)
    prompts = prompts_of([5, 11, 1], VOCAB, 0)
    assert greedy_texts(model, prompts) == [generate_alone(whole, p, 16) for p in prompts]


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3", "gemma3", "deepseek_v3", "qwen3_moe", "phi3", "qwen3_next"]
)
@torch.inference_mode()
def test_other_families(name: str, tmp_path: Path) -> None:
    """With biases, norms, latents, and experts that are not quantized."""
    whole: Any = write_int4(
        tmp_path, make(name, num_hidden_layers=4), FORMS["compressed zero points"]
    )
    model: Any = load_model(tmp_path, device="cpu")
    assert any(isinstance(module, Int4Linear) for module in model.modules())
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)
    prompts = prompts_of([5, 11, 1], VOCAB, 0)
    assert greedy_texts(model, prompts) == [generate_alone(whole, p, 16) for p in prompts]


@pytest.mark.parametrize("spare", ["v_proj", "gate_proj", "layers.1.mlp.down_proj", "o_proj"])
@torch.inference_mode()
def test_some_layers_may_be_plain(spare: str, tmp_path: Path) -> None:
    """Products of several layers are one only where all are in one form."""
    whole = write_int4(tmp_path, make("llama"), FORMS["awq"], spare)
    model = load_model(tmp_path, device="cpu")
    prompts = prompts_of([5, 11, 1], VOCAB, 0)
    assert greedy_texts(model, prompts) == [generate_alone(whole, p, 16) for p in prompts]


@torch.inference_mode()
def test_packing_stores_nothing_twice(tmp_path: Path) -> None:
    write_int4(tmp_path, make("llama"), FORMS["gptq, ordered"])
    model: Any = load_model(tmp_path, device="cpu")
    expected = model(IDS).logits
    for _ in range(2):  # the second one finds the weights packed
        assert make_causal_lm(model, num_slots=1, max_length=20, kernels="packed").is_packed
        assert torch.equal(model(IDS).logits, expected)
    attention = model.get_decoder().layers[1].self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    storage = attention.q_proj.weight.untyped_storage()
    assert attention.v_proj.weight.untyped_storage().data_ptr() == storage.data_ptr()
    assert storage.nbytes() == sum(part.weight.nbytes for part in parts)


@torch.inference_mode()
def test_half_precision_is_near(tmp_path: Path) -> None:
    whole: Any = write_int4(tmp_path, make("qwen3"), FORMS["awq"])
    model: Any = load_model(tmp_path, device="cpu", dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    expected = whole.to(torch.bfloat16)(IDS).logits
    torch.testing.assert_close(model(IDS).logits, expected, rtol=0.1, atol=0.1)
    assert make_causal_lm(model, num_slots=1, max_length=20, kernels="packed").is_packed


def test_an_llm_writes_the_texts_of_the_same_numbers(tmp_path: Path) -> None:
    target = load_model(bundled_asset("target"), device="cpu")
    whole = write_int4(tmp_path, target, FORMS["awq"])
    params = SamplingParams(temperature=0.0, max_tokens=12, grammar=GrammarSpec.regex("[a-z ,]+"))
    options: dict[str, Any] = {"tokenizer": bundled_asset("target"), "max_model_len": 64}
    found = []
    for model in (str(tmp_path), whole):
        with LLM(model, "ngram", **options) as llm:
            outputs = llm.generate(["Name: Ada", "A list of fruits:"], params)
        found.append([output.token_ids for output in outputs])
    assert found[0] == found[1]


@given(
    layout=st.sampled_from(("awq", "gptq", "gptq_v2", "pack-quantized")),
    outputs=st.integers(1, 6).map(lambda at: 8 * at),
    inputs=st.integers(1, 12).map(lambda at: 8 * at),
    group=st.sampled_from((-1, 4, 8, 24, 32, 128)),
    kind=st.sampled_from(("symmetric", "zero points", "ordered")),
    seed=st.integers(0, 2**16),
)
def test_every_layout_is_read_as_it_was_packed(  # noqa: PLR0913 - drawn
    layout: str, outputs: int, inputs: int, group: int, kind: str, seed: int
) -> None:
    is_ordered = kind == "ordered" and layout != "awq"
    form = Form(layout, group, is_symmetric=kind == "symmetric", is_ordered=is_ordered)
    config = {**form.quantization, **({"checkpoint_format": layout} if "gptq" in layout else {})}
    recipe = Int4Recipe.of(config)
    assert recipe is not None
    assert recipe.obstacle is None
    torch.manual_seed(seed)
    stored = {"layer.weight": torch.randn(outputs, inputs)}
    whole = put_int4(stored, "layer", form)
    tensors = {name.removeprefix("layer."): tensor for name, tensor in stored.items()}
    weight = recipe.weight(tensors, (outputs, inputs))
    assert torch.equal(multiply_out(weight, torch.float32), whole)


def rewrite(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Other tensors; None leaves one out."""
    stored = load_file(folder / "model.safetensors")
    found = {name: tensor for name, tensor in {**stored, **changes}.items() if tensor is not None}
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


LAYER = "model.layers.1.mlp.up_proj"
BROKEN: dict[str, tuple[str, str, Tensor | None, str]] = {
    "no scales": ("awq", "scales", None, f"expected {LAYER}.scales next to qweight and qzeros"),
    "no numbers": ("gptq", "qweight", None, f"expected {LAYER}.qweight next to scales and qzeros"),
    "no shape": ("compressed groups", "weight_shape", None, f"{LAYER}.weight_shape next to"),
    "another shape": (
        "compressed groups",
        "weight_shape",
        torch.tensor([96, 60]),
        rf"{LAYER}: weight_shape=\(96, 60\): must be \(96, 64\)",
    ),
    "another width": (
        "awq",
        "qweight",
        torch.zeros(64, 11, dtype=torch.int32),
        rf"{LAYER}: qweight='torch.int32 of shape \(64, 11\)': must be .* of shape \(64, 12\)",
    ),
    "other words": (
        "gptq",
        "qweight",
        torch.zeros(8, 96),
        rf"{LAYER}: qweight='torch.float32 of .*': must be torch.int32 of shape \(8, 96\)",
    ),
    "another number of groups": (
        "gptq",
        "scales",
        torch.ones(3, 96),
        rf"{LAYER}: scales='torch.float32 of .*': must be floating of shape \(2, 96\)",
    ),
    "scales of integers": (
        "awq",
        "scales",
        torch.ones(2, 96, dtype=torch.int32),
        rf"{LAYER}: scales='torch.int32 of .*': must be floating of shape \(2, 96\)",
    ),
    "groups of other sizes": (
        "gptq",
        "g_idx",
        torch.zeros(64, dtype=torch.int32),
        rf"{LAYER}: g_idx='groups \[0\]': must have 32 inputs of each group",
    ),
    "a shape that is one number": (
        "compressed groups",
        "weight_shape",
        torch.tensor(96),
        rf"{LAYER}: weight_shape='torch.int64 of shape \(\)': must be of integers of shape \(2,\)",
    ),
    "groups in fractions": (
        "gptq",
        "g_idx",
        torch.arange(64.0) // 32,
        rf"{LAYER}: g_idx='torch.float32 of .*': must be of integers of shape \(64,\)",
    ),
    "groups of some inputs alone": (
        "gptq",
        "g_idx",
        torch.tensor([-1] + [0] * 31 + [1] * 32),
        rf"{LAYER}: g_idx='groups \[-1, 0, 1\]': must have 32 inputs of each group",
    ),
    "scales that are no numbers": (
        "awq",
        "scales",
        torch.full((2, 96), torch.nan),
        rf"{LAYER}: scales='NaN or infinite': must be numbers",
    ),
    "infinite scales": (
        "compressed groups",
        "weight_scale",
        torch.full((96, 2), -torch.inf),
        rf"{LAYER}: scales='NaN or infinite': must be numbers",
    ),
    "a bias from nowhere": ("gptq", "bias", torch.ones(96), rf"{LAYER}: bias=.*: must be 0"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_named(case: str, tmp_path: Path) -> None:
    form, suffix, tensor, message = BROKEN[case]
    write_int4(tmp_path, make("llama"), FORMS[form])
    rewrite(tmp_path, {f"{LAYER}.{suffix}": tensor})
    with pytest.raises(ModelError, match=f"{message}.*; the checkpoint is broken"):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("form", "changes"),
    [
        ("gptq", {"bits": "four"}),
        ("gptq", {"group_size": [32]}),
        ("awq", {"group_size": "many"}),
        ("gptq", {"dynamic": ["lm_head"]}),
        ("gptq", {"dynamic": {"lm_head": "int8"}}),
        ("compressed groups", {"config_groups": {"W4A16": ["Linear"]}}),
        ("compressed groups", {"config_groups": [1]}),
        ("compressed groups", {"config_groups": {"group_0": {"weights": "int4"}}}),
    ],
)
def test_a_configuration_of_another_structure_is_named(
    form: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    write_int4(tmp_path, make("llama"), FORMS[form]._replace(config=changes))
    expected = r"model='.*': quantization_config=.*cannot be read \(.*\); download its config.json"
    with pytest.raises(ModelError, match=expected):
        load_model(tmp_path, device="cpu")


@pytest.mark.parametrize("layout", ["awq", "gptq", "gptq_v2"])
def test_the_last_words_may_be_padded(layout: str) -> None:
    """Where the outputs, or the inputs of GPTQ, do not fill them."""
    stored = {"x.weight": torch.randn(24, 32)}
    whole = put_int4(stored, "x", Form(layout, 16, lowest=1))
    tensors = {name.removeprefix("x."): tensor for name, tensor in stored.items()}
    tensors["scales"] = tensors["scales"][:, :20].contiguous()
    inputs = 32 if layout == "awq" else 28
    if "g_idx" in tensors:
        tensors["g_idx"] = tensors["g_idx"][:inputs].contiguous()
    if layout != "awq":
        tensors["qweight"] = tensors["qweight"][:, :20].contiguous()
    weight = Int4Recipe(layout, 16).weight(tensors, (20, inputs))
    assert torch.equal(multiply_out(weight, torch.float32), whole[:20, :inputs])


def test_inputs_that_fill_no_word_are_left_to_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_int4(tmp_path, make("llama", intermediate_size=98), FORMS["compressed channels"])
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError, match="compressed-tensors"):
        load_model(tmp_path, device="cpu")
    assert "down_proj is quantized, and no linear layer of the decoder, or its in" in caplog.text


@torch.inference_mode()
def test_biases_of_0_are_left_out(tmp_path: Path) -> None:
    """Of earlier tools, which wrote them for every layer."""
    whole: Any = write_int4(tmp_path, make("llama"), FORMS["gptq"])
    rewrite(tmp_path, {f"{LAYER}.bias": torch.zeros(96)})
    model: Any = load_model(tmp_path, device="cpu")
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_modules_that_draft_are_left_out(tmp_path: Path) -> None:
    whole: Any = write_int4(tmp_path, make("llama"), FORMS["awq"])
    stored = load_file(tmp_path / "model.safetensors")
    spare = {
        f"model.layers.2.mlp.up_proj.{suffix}": stored[f"{LAYER}.{suffix}"].clone()
        for suffix in ("qweight", "qzeros", "scales")
    }
    rewrite(tmp_path, dict(spare))
    model: Any = load_model(tmp_path, device="cpu")
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["experts", "head", "activations"])
def test_other_modules_in_int4_are_left_to_transformers(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which asks for its packages, by name."""
    name = "qwen3_moe" if what == "experts" else "llama"
    write_int4(tmp_path, make(name), FORMS["awq"], with_head=what == "head")
    if what == "experts":
        stored = load_file(tmp_path / "model.safetensors")
        experts = [one for one in stored if ".experts." in one]
        changes: dict[str, Tensor | None] = dict.fromkeys(experts)
        for one in experts:
            for suffix in ("qweight", "qzeros", "scales"):
                changes[one.replace("weight", suffix)] = torch.zeros(1)
        rewrite(tmp_path, changes)
    elif what == "activations":
        rewrite(tmp_path, {"model.layers.1.mlp.act.scales": torch.ones(96)})
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError, match="gptqmodel"):
        load_model(tmp_path, device="cpu")
    found = {"experts": "experts.0.down_proj", "head": "lm_head", "activations": "mlp.act"}[what]
    assert f"{found} is quantized, and no linear layer of the decoder" in caplog.text


WEIGHTS = FORMS["compressed groups"].quantization["config_groups"]["group_0"]["weights"]
OBSTACLES: dict[str, tuple[dict[str, Any], str]] = {
    "8 bits": ({**FORMS["gptq"].quantization, "bits": 8}, "not all of its weights have 4 bits"),
    "some of 8 bits": (
        {**FORMS["gptq"].quantization, "dynamic": {"-:lm_head": {}, r"+:.*\.0\..*": {"bits": 8}}},
        "not all of its weights have 4 bits",
    ),
    "gemv": ({**FORMS["awq"].quantization, "version": "GEMV"}, "its format is 'gemv'"),
    "marlin": (
        {**FORMS["gptq"].quantization, "checkpoint_format": "marlin"},
        "its format is 'marlin', and not gptq or gptq_v2",
    ),
    "words of 16 bits": (
        {**FORMS["gptq"].quantization, "pack_dtype": "int16"},
        "packed in other words than int32",
    ),
    "tensors": (
        {
            **FORMS["compressed groups"].quantization,
            "config_groups": {"group_0": {"weights": {**WEIGHTS, "strategy": "tensor"}}},
        },
        "its scales are neither of groups nor of channels",
    ),
    "transforms": (
        {**FORMS["compressed groups"].quantization, "transform_config": {"config_groups": {}}},
        "its states are transformed first",
    ),
    "two sizes": (
        {
            **FORMS["compressed groups"].quantization,
            "config_groups": {
                "group_0": {"weights": WEIGHTS},
                "group_1": {"weights": {**WEIGHTS, "group_size": 64}},
            },
        },
        "its layers have groups of several sizes",
    ),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_what_stands_in_the_way_is_said(case: str) -> None:
    quantization, obstacle = OBSTACLES[case]
    found = Int4Recipe.of(quantization)
    assert found is not None
    assert found.obstacle is not None
    assert obstacle in found.obstacle


def test_a_format_of_transformers_is_left_to_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_int4(tmp_path, make("llama"), Form("awq", 32, config={"version": "gemv"}))
    with caplog.at_level(logging.WARNING), pytest.raises(ModelError, match="gptqmodel"):
        load_model(tmp_path, device="cpu")
    assert "its format is 'gemv', and not gemm" in caplog.text


def test_other_methods_are_left_to_transformers() -> None:
    ints = {"type": "int", "num_bits": 8, "strategy": "channel"}
    for config in (
        {"quant_method": "bitsandbytes"},
        {"quant_method": "fp8"},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": ints}},
        },
    ):
        assert Int4Recipe.of(config) is None


@torch.inference_mode()
def test_what_config_json_says_of_the_layout_is_found(tmp_path: Path) -> None:
    """The defaults of transformers' GPTQConfig and AwqConfig."""
    whole: Any = write_int4(tmp_path, make("llama"), FORMS["awq"])
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "awq", "w_bit": 4, "q_group_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    model: Any = load_model(tmp_path, device="cpu")
    torch.testing.assert_close(model(IDS).logits, whole(IDS).logits, rtol=1e-4, atol=1e-4)
