"""Checkpoints in every layout are read tensor by tensor; what is broken says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from guided_spec.errors import ModelError
from guided_spec.models import checkpoint as module
from guided_spec.models.checkpoint import Checkpoint
from tests.models.heads.heads import Files, save

CONFIG = {"hidden_size": 4, "nested": {"a": [1]}}
TENSORS = {
    "b.weight": torch.arange(6, dtype=torch.float16).view(2, 3),
    "a.weight": torch.randn(3, dtype=torch.bfloat16),
    "d2t": torch.tensor([0, 3, 9]),
    "t2d": torch.tensor([True, False]),
}
LAYOUTS = list(get_args(Files))


@pytest.mark.parametrize("files", LAYOUTS)
def test_layouts(tmp_path: Path, files: Files) -> None:
    save(tmp_path, CONFIG, TENSORS, files)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.source == f"checkpoint={str(tmp_path)!r}"
    assert checkpoint.config == CONFIG
    assert checkpoint.names == TENSORS.keys()
    assert checkpoint.matching("") == sorted(TENSORS)
    assert checkpoint.matching("a.") == ["a.weight"]
    tensors = checkpoint.read(["t2d", "b.weight"])
    assert list(tensors) == ["t2d", "b.weight"]
    for name, tensor in checkpoint.read(TENSORS).items():
        assert_same(tensor, TENSORS[name])
    assert checkpoint.read([]) == {}


def assert_same(tensor: Tensor, expected: Tensor) -> None:
    assert tensor.dtype == expected.dtype
    assert tensor.device.type == "cpu"
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("files", ["sharded", "sharded_bin"])
def test_opens_only_the_shards_that_are_needed(tmp_path: Path, files: Files) -> None:
    save(tmp_path, CONFIG, TENSORS, files)
    checkpoint = Checkpoint.open(str(tmp_path))
    next(tmp_path.glob("*-00002-of-*")).unlink()
    assert checkpoint.read(["a.weight", "d2t"]).keys() == {"a.weight", "d2t"}
    with pytest.raises(
        ModelError, match="expects the file '.*-00002-of-.*' for b.weight, found no"
    ):
        checkpoint.read(["a.weight", "b.weight"])


def test_fetches_from_the_hub_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, CONFIG, TENSORS, "sharded")
    asked: list[str] = []

    def cached_file(source: str, file: str, *, revision: str | None, **_: Any) -> str | None:
        assert (source, revision) == ("org/name", "v2")
        path = tmp_path / file
        if not path.exists():
            return None
        asked.append(file)
        return str(path)

    monkeypatch.setattr(module, "cached_file", cached_file)
    checkpoint = Checkpoint.open("org/name", revision="v2")
    assert asked == ["config.json", "model.safetensors.index.json"]
    assert_same(checkpoint.read(["d2t"])["d2t"], TENSORS["d2t"])
    assert asked[2:] == ["model-00001-of-00002.safetensors"]


@pytest.mark.parametrize("source", ["org/name-that-is-not-there", "no such thing", "./nowhere"])
def test_neither_folder_nor_model(source: str) -> None:
    with pytest.raises(ModelError, match=f"checkpoint='{source}': expected a folder"):
        Checkpoint.open(source)
    with pytest.raises(ModelError, match="expected a folder, found none"):
        Checkpoint.open(Path(source))


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"expected a config.json, found none"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_broken_config(tmp_path: Path, text: str) -> None:
    save(tmp_path, CONFIG, TENSORS, "safetensors")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config.json: expected"):
        Checkpoint.open(tmp_path)


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"expected one of model.safetensors, .*, found none"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1", b"PK\x03\x04"]
)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_corrupt_file(tmp_path: Path, file: str, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ModelError, match=f"{file}: expected a (safetensors|torch) file"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("files", ["safetensors", "bin", "legacy_bin"])
def test_truncated_file(tmp_path: Path, files: Files) -> None:
    save(tmp_path, CONFIG, TENSORS, files)
    path = next(path for path in tmp_path.iterdir() if path.name != "config.json")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ModelError, match="download it again"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "content", [[torch.ones(1)], {"epoch": 3, "weight": torch.ones(1)}, Path()]
)
def test_pickle_of_other_things(tmp_path: Path, content: object) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin: expected a "):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}])
def test_broken_index(tmp_path: Path, index: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="expected a weight_map"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("files", ["sharded", "sharded_bin"])
def test_index_that_promises_too_much(tmp_path: Path, files: Files) -> None:
    save(tmp_path, CONFIG, TENSORS, files)
    path = next(tmp_path.glob("*.index.json"))
    index = json.loads(path.read_text())
    index["weight_map"]["a.bias"] = index["weight_map"]["a.weight"]
    path.write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"its index expects a.bias in .*, found no such tensors"):
        Checkpoint.open(tmp_path).read(["a.weight", "a.bias"])


def test_unknown_names(tmp_path: Path) -> None:
    save(tmp_path, CONFIG, TENSORS, "safetensors")
    message = r"expected the tensors y, z, found 4 other tensors, such as a.weight, b.weight"
    with pytest.raises(ModelError, match=message):
        Checkpoint.open(tmp_path).read(["z", "a.weight", "y"])
