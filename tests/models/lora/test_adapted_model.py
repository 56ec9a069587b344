"""A model with adapters next to its base: what fits it, and what is refused."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from guided_spec.errors import ModelError
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.loading import load_model
from guided_spec.models.lora.adapted_model import with_adapters
from guided_spec.models.lora.low_rank import LoraLinear, adapters_of
from guided_spec.models.lora.slot_adapters import reading_adapters
from guided_spec.models.quantized.linears import QUANTIZED
from guided_spec.models.stock.slots import SlotInputs
from tests.adapters import merged, write_adapter
from tests.models.fp8_checkpoints import FORMS, write_fp8
from tests.models.int4_checkpoints import FORMS as INT4_FORMS
from tests.models.int4_checkpoints import write_int4
from tests.models.tiny import build
from tests.tiny_llm import tiny_model

IDS = torch.tensor([[5, 6, 7, 9], [8, 3, 5, 1], [2, 4, 8, 6]])
WEIGHTS = "adapter_model.safetensors"


def renamed(folder: str, old: str, new: str) -> str:
    """The adapter with other names of its tensors."""
    path = Path(folder) / WEIGHTS
    save_file({key.replace(old, new): tensor for key, tensor in load_file(path).items()}, path)
    return folder


def gpt2() -> GPT2LMHeadModel:
    """Its layers keep their weights inputs first."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: GPT2LMHeadModel = GPT2LMHeadModel(config).eval()
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "olmo2"])
def test_each_row_has_its_adapter(name: str, tmp_path: Path) -> None:
    base: Any = gpt2() if name == "gpt2" else build(name)
    settings: dict[str, Any] = {"target_modules": "all-linear", "fan_in_fan_out": name == "gpt2"}
    folders = {
        str(seed): write_adapter(base, tmp_path / str(seed), seed, rank=2 + seed, **settings)
        for seed in range(2)
    }
    model: Any = with_adapters(base, folders, num_slots=3)
    adapters = adapters_of(model)
    assert adapters is not None
    for slot, lora in ((0, "1"), (2, "0")):
        adapters.put(slot, lora)
    plain = base(IDS).logits
    expected = [merged(base, folders["1"]), base, merged(base, folders["0"])]
    wanted = torch.cat([one(IDS[row : row + 1]).logits for row, one in enumerate(expected)])
    with reading_adapters(adapters, [0, 1, 2], each=4):
        found = model(IDS).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert (found[0] - plain[0]).abs().max() > 0.01
    torch.testing.assert_close(model(IDS).logits, plain, rtol=0, atol=0)
    assert adapters_of(base) is None


def write_quantized(folder: Path, name: str) -> Any:
    """A base in fp8 or int4; returns it multiplied out."""
    if name in FORMS:
        return write_fp8(folder, build("llama"), FORMS[name])
    return write_int4(folder, build("llama"), INT4_FORMS[name])


@pytest.mark.parametrize("form", ["qwen", "compressed tensors", "awq", "gptq"])
def test_a_quantized_base(form: str, tmp_path: Path) -> None:
    whole = write_quantized(tmp_path / "base", form)
    folder = write_adapter(whole, tmp_path / "adapter", target_modules="all-linear")
    base: Any = load_model(tmp_path / "base", device="cpu")
    assert isinstance(base.model.layers[0].self_attn.q_proj, QUANTIZED)
    model = with_adapters(base, {"a": folder}, 1)
    lm = make_causal_lm(model, num_slots=1, max_length=32, kernels="packed")
    assert lm.runs_as == "packed forwards"
    assert lm.adapters is not None
    own: Any = merged(whole, folder)
    for lora, expected in ((None, whole), ("a", own)):
        lm.adapters.put(0, lora)
        found = lm.forward(SlotInputs(IDS[:1], [0], [0], [4])).logits
        lm.commit([4], [4])
        size = expected(IDS[:1]).logits
        assert found is not None
        assert (found - size).norm() < 0.02 * size.norm()


def test_weights_are_shared_and_hooks_are_not(tmp_path: Path) -> None:
    base: Any = copy.deepcopy(tiny_model("llama"))
    folder = write_adapter(base, tmp_path, target_modules=["q_proj"])
    model: Any = with_adapters(base, {"a": folder}, num_slots=1)
    own = {id(one) for one in base.parameters()}
    assert {id(one) for one in model.parameters()} == own
    assert isinstance(model.model.layers[0].self_attn.q_proj, LoraLinear)
    assert model.model.layers[0].mlp is base.model.layers[0].mlp
    model.model.layers[0].register_forward_hook(lambda *_: None)
    assert not base.model.layers[0]._forward_hooks


def test_an_adapter_of_a_whole_model_of_pictures(tmp_path: Path) -> None:
    base = tiny_model("llama")
    folder = write_adapter(base, tmp_path)
    for inside in ("model.language_model.", "language_model.model.", "model.text_model."):
        copied = tmp_path / inside
        copied.mkdir()
        for file in (WEIGHTS, "adapter_config.json"):
            (copied / file).write_bytes((tmp_path / file).read_bytes())
        renamed(str(copied), "model.model.layers", f"model.{inside}layers")
        assert adapters_of(with_adapters(base, {"a": str(copied)}, 1)) is not None
    renamed(folder, "model.model.layers", "model.vision_tower.layers")
    with pytest.raises(ModelError, match="no layer vision_tower.layers.*, on layers of its text"):
        with_adapters(base, {"a": folder}, 1)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("layers.1.", "layers.7.", "the model has no layer model.layers.7.self_attn.q_proj; pass"),
        ("self_attn.q_proj", "input_layernorm", "is no linear layer, a LlamaRMSNorm; train"),
        ("self_attn.q_proj", "mlp.experts.3.up_proj", "is of routed experts, which take no"),
        ("self_attn.q_proj", "mlp.down_proj", r"down_proj is of \[\d+, \d+\], that of the model"),
        ("model.layers.0.self_attn.q_proj", "lm_head", "lm_head is the output head, which drafts"),
    ],
)
@pytest.mark.every_case
def test_layers_that_do_not_fit(old: str, new: str, said: str, tmp_path: Path) -> None:
    base = tiny_model("llama")
    folder = write_adapter(base, tmp_path, target_modules=["q_proj"])
    renamed(folder, old, new)
    with pytest.raises(ModelError, match=said) as caught:
        with_adapters(base, {"a": folder}, 1)
    assert str(caught.value).startswith(f"loras['a']='{folder}': ")


def test_a_layer_with_two_names(tmp_path: Path) -> None:
    base = tiny_model("llama")
    folder = write_adapter(base, tmp_path, target_modules=["q_proj"])
    tensors = load_file(tmp_path / WEIGHTS)
    again = {
        key.replace("model.model.l", "model.language_model.l"): t.clone()
        for key, t in tensors.items()
    }
    save_file({**tensors, **again}, tmp_path / WEIGHTS)
    with pytest.raises(ModelError, match="it has model.layers.0.self_attn.q_proj twice; save"):
        with_adapters(base, {"a": folder}, 1)


def test_a_layer_whose_weight_is_read_past_it(tmp_path: Path) -> None:
    base = build("jamba")
    folder = write_adapter(base, tmp_path, target_modules=["dt_proj"])
    with pytest.raises(ModelError, match="mamba.dt_proj is not run as a layer; train without it"):
        with_adapters(base, {"a": folder}, 1)


def test_adapters_are_read_without_peft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tiny_model("llama")
    folder = write_adapter(base, tmp_path)
    monkeypatch.setitem(sys.modules, "peft", None)
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] is not ...
    assert adapters_of(with_adapters(base, {"a": folder}, 1)) is not None
