"""What is saved is read back as the same head, with the same drafts, and under published names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.config import HeadShape
from guided_spec.models.heads.eagle import Eagle3Head
from guided_spec.models.heads.export import head_layouts, save_head
from guided_spec.models.heads.loading import find_method, load_head
from guided_spec.models.loading import load_model
from tests.models.heads.equations import cached_logits, draw_texts
from tests.models.heads.fresh import fresh_head, spread
from tests.models.heads.head_steps import draft_logits
from tests.models.heads.heads import save, write_eagle3
from tests.models.heads.mtp_checkpoints import DRAFT_STEPS, TEXTS
from tests.models.tiny import build

MODEL = "model.safetensors"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

# (kind, layout, architecture of the target, options of the head, method that reads it)
CASES: list[tuple[str, str, str, dict[str, Any], str]] = [
    ("eagle", "safeailab", "llama", {}, "eagle"),
    ("eagle", "safeailab", "llama3_rope", {"shape": HeadShape(2)}, "eagle"),
    ("eagle3", "speculators", "llama", {}, "eagle3"),
    ("eagle3", "speculators", "llama3_rope", {"draft_vocab_size": None}, "eagle3"),
    (
        "eagle3",
        "speculators",
        "qwen3",
        {"model_type": "qwen3", "shape": HeadShape(2), "norm_before_fc": True, "norm_output": True},
        "eagle3",
    ),
    ("eagle3", "speculators", "gemma3", {"fc_norm": True, "aux_hidden_layers": (0, 4)}, "eagle3"),
    ("eagle3", "speculators", "llama", {"norm_before_residual": True}, "eagle3"),
    ("eagle3", "safeailab", "llama3_rope", {}, "eagle3"),
    ("eagle3", "safeailab", "qwen3_5", {}, "eagle3"),
    ("eagle3", "safeailab", "deepseek_v3", {"draft_vocab_size": None}, "eagle3"),
    ("mtp", "deepseek", "deepseek_v3", {"num_modules": 2}, "deepseek_mtp"),
    ("mtp", "deepseek", "deepseek_v32", {}, "deepseek_mtp"),
    ("mtp", "deepseek", "glm4_moe", {}, "glm4_moe_mtp"),
    ("mtp", "deepseek", "llama", {"num_modules": 2}, "mtp"),
    ("mtp", "deepseek", "qwen3_moe", {}, "mtp"),
    ("mtp", "deepseek", "gpt_oss", {}, "mtp"),
    ("qwen_mtp", "qwen", "qwen3_next", {}, "qwen3_5_mtp"),
    ("qwen_mtp", "qwen", "qwen3_5", {"num_modules": 2}, "qwen3_5_mtp"),
    ("qwen_mtp", "qwen", "qwen3_5_moe", {}, "qwen3_5_mtp"),
    ("qwen_mtp", "qwen", "mistral", {}, "mtp"),
]
IDS = [f"{kind}-{layout}-{name}" for kind, layout, name, _, _ in CASES]


def drafts(head: Any, target: Any) -> Tensor:
    """Logits behind several texts at once, step by step."""
    if isinstance(head, Eagle3Head):
        texts = draw_texts([5, 1, 11], 32 * len(head.aux_hidden_layers), 64, drafts=3)
        return torch.cat(cached_logits(head, texts, drafts=3))
    return draft_logits(head, target, TEXTS, DRAFT_STEPS)


def named(target: Any) -> Any:
    """The target, as if it had been loaded from the hub."""
    target.config.name_or_path = "org/target"
    return target


@pytest.mark.parametrize(("kind", "layout", "name", "options", "method"), CASES, ids=IDS)
def test_round_trip(
    tmp_path: Path, kind: str, layout: str, name: str, options: dict[str, Any], method: str
) -> None:
    target = named(build(name))
    head = fresh_head(kind, target, **options)
    spread(head)
    assert layout in head_layouts(head)
    folder = save_head(head, tmp_path / "new", layout=layout, target=target, dtype=torch.float32)
    assert find_method(folder, target) == method
    loaded: Any = load_head(method, folder, target)
    assert type(loaded) is type(head)
    same_tensors(loaded, head.state_dict())
    assert loaded.aux_hidden_layers == head.aux_hidden_layers
    assert loaded.num_modules == head.num_modules
    if head.vocabulary is not None:
        assert torch.equal(loaded.vocabulary.target_ids, head.vocabulary.target_ids)
    assert torch.equal(drafts(loaded, target), drafts(head, target))


def same_tensors(head: nn.Module, expected: dict[str, Tensor]) -> None:
    found = head.state_dict()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_head_that_is_saved_again_is_read_again(tmp_path: Path) -> None:
    target = build("llama")
    head = fresh_head("eagle", target)
    for scale in (1.0, 3.0):
        tensors = {name: scale * tensor for name, tensor in head.state_dict().items()}
        options: Any = {"tensors": tensors, "dtype": torch.float32}
        save_head(head, tmp_path, layout="safeailab", target=target, **options)
        loaded: Any = load_head("eagle", str(tmp_path), target)
        same_tensors(loaded, tensors)
        assert load_head("eagle", str(tmp_path), target) is loaded


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_transformers_reads_modules_that_are_added_to_their_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    target: Any = build(name)
    head = fresh_head("mtp", target, num_modules=2)
    spread(head)
    target.save_pretrained(tmp_path)
    own = load_file(tmp_path / MODEL)
    save_head(head, tmp_path / "head", layout="deepseek", target=target, dtype=torch.float32)
    config = (tmp_path / "head" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    save_file(own | load_file(tmp_path / "head" / MODEL), tmp_path / MODEL)
    loaded: Any = load_model(tmp_path, device="cpu")
    patterns = [rf"model\.layers\.{4 + module}.*" for module in range(2)]
    monkeypatch.setattr(loaded, "_keys_to_ignore_on_load_unexpected", patterns)
    found = MtpModel.from_pretrained(loaded).state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in head.state_dict().items())


def test_weights_are_bfloat16_but_for_what_must_be_exact(tmp_path: Path) -> None:
    target = build("deepseek_v3")
    head = fresh_head("mtp", target)
    save_head(head, tmp_path, layout="deepseek", target=target)
    stored = load_file(tmp_path / MODEL)
    for name, tensor in stored.items():
        is_exact = any(part in name for part in target._keep_in_fp32_modules_strict or ())
        assert tensor.dtype == (torch.float32 if is_exact else torch.bfloat16), name
    assert "model.layers.4.mlp.experts.3.gate_proj.weight" in stored
    assert not any("gate_up_proj" in name for name in stored)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["num_hidden_layers"]) == ("deepseek_v3", 4)
    assert (config["num_nextn_predict_layers"], config["dtype"]) == (1, "bfloat16")
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]


def test_a_draft_vocabulary_is_saved_as_offsets_and_mask(tmp_path: Path) -> None:
    target = named(build("llama"))
    head = fresh_head("eagle3", target)
    for layout in head_layouts(head):
        save_head(head, tmp_path, layout=layout, target=target)
        stored = load_file(tmp_path / MODEL)
        kept = head.vocabulary.target_ids
        assert torch.equal(stored["d2t"] + torch.arange(24), kept)
        assert torch.equal(stored["t2d"].nonzero()[:, 0], kept)
        assert (stored["d2t"].dtype, stored["t2d"].dtype) == (torch.int64, torch.bool)


def test_the_config_of_safeailab_speaks_both_dialects(tmp_path: Path) -> None:
    target = build("llama3_rope", num_hidden_layers=8)
    head = fresh_head("eagle3", target)
    save_head(head, tmp_path, layout="safeailab", target=target)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == 24
    assert config[LAYER_IDS] == [2, 4, 5]  # vLLM: inputs of layers
    assert config["eagle_config"][LAYER_IDS] == [1, 3, 4]  # SGLang: outputs of layers
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_theta"] == 10000.0
    assert "norm_output" not in config  # SpecForge means something else by it
    assert all(not name.startswith("layers.0") for name in Checkpoint.open(tmp_path).names)


def test_the_config_of_speculators_names_the_verifier(tmp_path: Path) -> None:
    target = named(build("qwen3"))
    head = fresh_head("eagle3", target)
    save_head(head, tmp_path, layout="speculators", target=target, speculative_tokens=7)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    said = config["speculators_config"]
    assert said["algorithm"] == "eagle3"
    assert said["proposal_methods"][0]["speculative_tokens"] == 7
    assert said["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["Qwen3ForCausalLM"],
    }


def test_tensors_may_come_from_elsewhere(tmp_path: Path) -> None:
    target = named(build("llama"))
    head = fresh_head("eagle3", target)
    gathered = {name: torch.randn_like(tensor) for name, tensor in head.state_dict().items()}
    options: Any = {"dtype": torch.float32, "tensors": gathered}
    save_head(head, tmp_path, layout="speculators", target=target, **options)
    same_tensors(load_head("eagle3", tmp_path, target), gathered)  # type: ignore[arg-type]
    gathered["fc.weight"] = gathered["fc.weight"][1:]
    gathered["extra"] = gathered.pop("norm.weight")
    with pytest.raises(ModelError) as caught:
        save_head(head, tmp_path, layout="speculators", target=target, tensors=gathered)
    assert "norm.weight: expected [32], found none" in str(caught.value)
    assert "extra: expected none, found [32]" in str(caught.value)
    assert "fc.weight: expected [32, 64], found [31, 64]" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "layout", "fix"),
    [
        ("eagle", "speculators", "must be 'safeailab' for EagleHead"),
        ("eagle3", "qwen", "must be 'speculators' or 'safeailab' for Eagle3Head"),
        ("mtp", "safeailab", "must be 'deepseek' for MtpHead"),
        ("qwen_mtp", "speculators", "must be 'qwen' for QwenMtpHead"),
    ],
)
def test_a_layout_of_another_kind(tmp_path: Path, kind: str, layout: str, fix: str) -> None:
    target = named(build("llama"))
    with pytest.raises(ConfigError, match=f"layout='{layout}': {fix}"):
        save_head(fresh_head(kind, target), tmp_path, layout=layout, target=target)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({"model_type": "qwen3"}, "layers of Llama, found qwen3"),
        ({"shape": HeadShape(2)}, "one layer, found 2"),
        ({"norm_before_residual": True}, "a head without norm_before_residual"),
        ({"fc_norm": True, "norm_output": True}, "a head without fc_norm and norm_output"),
    ],
)
def test_what_engines_would_not_see(tmp_path: Path, options: dict[str, Any], needed: str) -> None:
    target = named(build("llama"))
    head = fresh_head("eagle3", target, **options)
    with pytest.raises(ModelError, match=f"'safeailab': it needs {needed}; save it as 'spec"):
        save_head(head, tmp_path, layout="safeailab", target=target)
    save_head(head, tmp_path, layout="speculators", target=target)


@pytest.mark.parametrize(
    ("options", "layout", "message"),
    [
        ({"hidden_size": 24, "own_embedding": True}, "speculators", "as wide as its target"),
        (
            {"flags": {"use_aux_hidden_state": False}, "layer_ids": None},
            "speculators",
            "a head with an fc, found none",
        ),
        (
            {"layout": "speculators", "changes": {}, "num_layers": 2, "sliding": True},
            "safeailab",
            "layers without windows",
        ),
    ],
)
def test_a_loaded_head_that_a_layout_cannot_say(
    tmp_path: Path, options: dict[str, Any], layout: str, message: str
) -> None:
    target = named(build("llama"))
    is_sliding = options.pop("sliding", False)
    write_eagle3(tmp_path / "head", target, **options)
    checkpoint = Checkpoint.open(tmp_path / "head")
    if is_sliding:
        checkpoint.config["transformer_layer_config"] |= {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 3,
        }
    head = Eagle3Head.from_checkpoint(checkpoint, target)
    with pytest.raises(ModelError, match=f"layout='{layout}': it needs .*{message}"):
        save_head(head, tmp_path / "new", layout=layout, target=target)
    other = next(name for name in head_layouts(head) if name != layout)
    save_head(head, tmp_path / "new", layout=other, target=target, dtype=torch.float32)
    loaded = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path / "new"), target)
    same_tensors(loaded, head.state_dict())
    assert getattr(loaded.config, "layer_types", None) == getattr(head.config, "layer_types", None)


def test_speculators_has_no_biases(tmp_path: Path) -> None:
    target = named(build("llama"))
    tensors = write_eagle3(tmp_path / "head", target)
    config = Checkpoint.open(tmp_path / "head").config
    tensors["layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    save(tmp_path / "head", config, tensors, "safetensors")
    head: Any = load_head("eagle3", tmp_path / "head", target)
    with pytest.raises(ModelError, match="it needs a head without biases, found some"):
        save_head(head, tmp_path / "new", layout="speculators", target=target)
    save_head(head, tmp_path / "new", layout="safeailab", target=target, dtype=torch.float32)
    assert json.loads((tmp_path / "new" / "config.json").read_text())["attention_bias"]
    same_tensors(load_head("eagle3", tmp_path / "new", target), head.state_dict())  # type: ignore[arg-type]


def test_a_target_without_a_name_is_an_error(tmp_path: Path) -> None:
    target = build("llama")
    with pytest.raises(ConfigError, match=r"target\.config\.name_or_path='': must have been load"):
        save_head(fresh_head("eagle3", target), tmp_path, layout="speculators", target=target)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.int8}, r"dtype=torch\.int8: must be"),
        ({"dtype": torch.float8_e4m3fn}, "dtype=.*must be"),
        ({"speculative_tokens": 0}, "speculative_tokens=0: must be at least 1"),
        ({"embedding": "tied"}, "embedding='tied': must be 'auto', 'omit' or 'copy'"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: Any, message: str) -> None:
    target = named(build("llama"))
    head = fresh_head("eagle3", target)
    with pytest.raises(ConfigError, match=message):
        save_head(head, tmp_path, layout="speculators", target=target, **options)


def test_another_packages_head_is_an_error(tmp_path: Path) -> None:
    other: Any = nn.Linear(2, 2)
    with pytest.raises(ModelError, match="head=Linear: expected one of EagleHead, Eagle3Head"):
        save_head(other, tmp_path, layout="qwen", target=build("llama"))
