"""Targets that are not simply on one device: spread by a map, of code of their own, quantized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.loading import load_ends
from guided_spec.training.run import TrainingReport, train
from tests.training.toy_algorithm import make_options, write_documents, write_target

BLOCK = 128
OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""
AUTO_MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "target").mkdir()
    return Path(write_target(tmp_path / "target"))


def run(target: Path, output: Path, **changes: Any) -> TrainingReport:
    data = write_documents(target.parent / "documents.jsonl", 12)
    settings: dict[str, Any] = {"algorithm": "eagle", "max_steps": 2, "tracker": ["none"]}
    settings |= {"decode_limit": 1, "decode_max_tokens": 64}
    return train(make_options(str(target), data, output, **{**settings, **changes}), {})


def all_but(target: Path, on_disk: str) -> str:
    """A device map with all on the CPU but one module."""
    count = json.loads((target / "config.json").read_text())["num_hidden_layers"]
    names = [f"model.layers.{layer}" for layer in range(count)]
    names += ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    return json.dumps({name: "disk" if name == on_disk else "cpu" for name in names})


def assert_same(first: TrainingReport, second: TrainingReport) -> None:
    assert first.metrics == second.metrics
    tensors = [load_file(Path(report.draft) / "model.safetensors") for report in (first, second)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    assert first.decoded is not None
    assert second.decoded is not None
    assert first.decoded["acceptance_length"] == second.decoded["acceptance_length"]


@pytest.mark.slow
def test_a_target_that_is_spread_trains_the_same_draft(target: Path, tmp_path: Path) -> None:
    """A layer that stays on disk between its forwards, as accelerate keeps what fits no device."""
    whole = run(target, tmp_path / "whole")
    spread = run(target, tmp_path / "spread", device_map=all_but(target, "model.layers.1"))
    assert_same(spread, whole)


def test_device_maps_that_cannot_be(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="device_map='cuda:7': must be one of auto, balanced,"):
        run(target, tmp_path, device_map="cuda:7")
    with pytest.raises(ConfigError, match="device_map=.*leaves the embedding, the last norm or"):
        run(target, tmp_path, device_map=all_but(target, "model.norm"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="device_map='auto': is for one process"):
        run(target, tmp_path, device_map="auto")


@pytest.mark.slow
def test_code_of_the_repository_runs_where_it_is_trusted(target: Path, tmp_path: Path) -> None:
    whole = run(target, tmp_path / "whole")
    config = json.loads((target / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["OwnForCausalLM"], "auto_map": AUTO_MAP}
    (target / "config.json").write_text(json.dumps(config))
    (target / "own.py").write_text(OWN_CODE)
    with pytest.raises(ModelError, match="code of its own; pass trust_remote_code=True"):
        run(target, tmp_path / "refused")
    assert_same(run(target, tmp_path / "own", trust_remote_code=True), whole)


@pytest.mark.slow
def test_a_quantized_target(target: Path, tmp_path: Path) -> None:
    """In blocks of float8, which transformers computes without on a CPU."""
    path, quantized = target / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        quantized[name] = tensor
        if name.endswith("proj.weight"):
            scale = tensor.abs().max() / 448
            shape = [-(-size // BLOCK) for size in tensor.shape]
            quantized[name] = (tensor / scale).to(torch.float8_e4m3fn)
            quantized[f"{name}_scale_inv"] = scale.expand(shape).clone()
    save_file(quantized, path, metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    blocks = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": blocks}))
    features = {"features": str(tmp_path / "features"), "decode_limit": 0}
    first = run(target, tmp_path / "first", **features)
    # Its embedding, norm and output head are not quantized, and are all that is loaded now.
    ends = load_ends(target, device=torch.device("cpu"))
    layer: Any = ends.get_decoder().layers[-1]
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert run(target, tmp_path / "second", **features).metrics == first.metrics


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_map": "auto"}, "device_map='auto'.*excludes tensor_parallel"),
        ({"features_url": "http://a/v1"}, "features_url=.*excludes tensor_parallel"),
        ({"decode_limit": 4}, "decode_limit=4.*does not decode"),
        ({"regenerate": True}, "regenerate=True.*needs regenerate_url"),
    ],
)
def test_what_a_target_in_parts_excludes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_options("target", "data", Path("output"), tensor_parallel=True, **changes)


def test_a_target_in_parts_wants_several_processes(tmp_path: Path) -> None:
    options = make_options(
        write_target(tmp_path / "target"),
        write_documents(tmp_path / "data.jsonl", 4),
        tmp_path / "output",
        tensor_parallel=True,
    )
    with pytest.raises(ConfigError, match=r"tensor_parallel=.*start with torchrun"):
        train(options, {})
