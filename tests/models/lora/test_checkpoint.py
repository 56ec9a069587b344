"""Adapters in peft's files, and what is refused of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel
from safetensors.torch import load_file, save_file

from guided_spec.errors import ModelError
from guided_spec.models.lora.checkpoint import read_adapter
from tests.adapters import write_adapter
from tests.tiny_llm import tiny_model

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_adapter(tiny_model("llama"), tmp_path)
    return tmp_path


def change(folder: Path, **settings: Any) -> None:
    known = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(known | settings))


@given(
    rank=st.integers(1, 9),
    alpha=st.integers(1, 30),
    is_rooted=st.booleans(),
    patterns=st.sampled_from(
        [{}, {"q_proj": 3}, {r"layers\.1\..*": 5}, {"v_proj": 4, r".*1\..*": 2}]
    ),
)
def test_the_terms_are_peft_s(
    tmp_path_factory: pytest.TempPathFactory,
    rank: int,
    alpha: int,
    is_rooted: bool,  # noqa: FBT001 - drawn
    patterns: dict[str, int],
) -> None:
    folder, model = tmp_path_factory.mktemp("adapter"), tiny_model("llama")
    given: dict[str, Any] = {"lora_alpha": alpha, "use_rslora": is_rooted}
    write_adapter(
        model,
        folder,
        rank=rank,
        **given,
        alpha_pattern=patterns,
        rank_pattern=dict([*patterns.items()][:1]),
    )
    peft: Any = PeftModel.from_pretrained(copy.deepcopy(model), str(folder))
    pairs = read_adapter("loras['a']", folder)
    assert len(pairs) == 2 * model.config.num_hidden_layers
    for name, pair in pairs.items():
        layer = peft.base_model.model.get_submodule(name)
        torch.testing.assert_close(pair.up @ pair.down, layer.get_delta_weight("default"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA'; only LoRA adapters"),
        ({"use_dora": True}, "use_dora=True, the magnitudes of DoRA, cannot run"),
        ({"bias": "all"}, "bias='all' cannot run next to the base; train without it, or merge it"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\], whole layers, cannot"),
        ({"target_parameters": ["mlp.experts.down_proj"]}, "as of routed experts, cannot run"),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' cannot run"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices="),
        ({"lora_alpha": None}, "lora_alpha=None"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern="),
        ({"lora_alpha": 10**400}, "lora_alpha=1000.*; save it again"),
        ({"lora_alpha": float("nan")}, "q_proj, scaled by nan, has values that are no finite num"),
        ({"alpha_pattern": {"q_proj": 1e308}}, "q_proj, scaled by .*, has values that are no fin"),
    ],
)
@pytest.mark.every_case
def test_more_than_two_matrices_a_layer(folder: Path, settings: Any, said: str) -> None:
    change(folder, **settings)
    with pytest.raises(ModelError, match=said) as caught:
        read_adapter("loras['a']", folder)
    assert str(caught.value).startswith(f"loras['a']='{folder}': ")


def test_kinds_of_starts_and_empty_settings_are_read(folder: Path) -> None:
    change(folder, init_lora_weights="gaussian", modules_to_save=[], rank_pattern=None)
    assert read_adapter("loras['a']", folder)


@pytest.mark.parametrize(
    ("key", "shape", "said"),
    [
        (f"{LAYER}.lora_magnitude_vector.weight", (4,), "no matrix of a linear layer"),
        (f"{LAYER}.lora_B.bias", (4,), "no matrix of a linear layer"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", (4, 8), "no matrix of a linear"),
        ("base_model.model.lm_head.weight", (8, 4), "no matrix of a linear layer"),
        (f"{LAYER}x.lora_A.weight", (4, 8), "q_projx needs lora_A"),
        (f"{LAYER}.lora_A.weight", (3, 8), "q_proj needs lora_A"),
    ],
)
@pytest.mark.every_case
def test_other_tensors(folder: Path, key: str, shape: tuple[int, ...], said: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({**tensors, key: torch.ones(shape)}, folder / WEIGHTS)
    with pytest.raises(ModelError, match=said):
        read_adapter("loras['a']", folder)


@pytest.mark.parametrize("matrix", ["lora_A", "lora_B"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_no_number_is_named(folder: Path, matrix: str, value: float) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[f"{LAYER}.{matrix}.weight"][1, 2] = value
    save_file(tensors, folder / WEIGHTS)
    expected = r"model.layers.0.self_attn.q_proj, scaled by 8, has values that are no finite num"
    with pytest.raises(ModelError, match=expected):
        read_adapter("loras['a']", folder)


def test_a_pair_of_no_columns_is_named(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors[f"{LAYER}.lora_A.weight"] = torch.ones(0, 8)
    tensors[f"{LAYER}.lora_B.weight"] = torch.ones(8, 0)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ModelError, match="q_proj needs lora_A"):
        read_adapter("loras['a']", folder)


def test_files_that_are_missing_or_broken(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(ModelError, match="adapter_model.safetensors cannot be read"):
        read_adapter("loras['a']", folder)
    save_file({}, folder / WEIGHTS)
    with pytest.raises(ModelError, match="has no tensors"):
        read_adapter("loras['a']", folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match="has no adapter_model.safetensors; pass an adapter"):
        read_adapter("loras['a']", folder)
    for text in ("[1]", "{", "null"):
        (folder / CONFIG).write_text(text)
        (folder / WEIGHTS).write_bytes(b"")
        with pytest.raises(
            ModelError, match="adapter_config.json (is not JSON|has peft_type=None)"
        ):
            read_adapter("loras['a']", folder)
    (folder / CONFIG).unlink()
    with pytest.raises(ModelError, match="has no adapter_config.json; pass an adapter's folder"):
        read_adapter("loras['a']", folder)
