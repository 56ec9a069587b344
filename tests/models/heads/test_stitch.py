"""Modules in their target's checkpoint are those that were trained, and nothing else changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from guided_spec.cli.main import app
from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.checkpoint import Checkpoint, stitch
from guided_spec.models.heads.export import save_head
from guided_spec.models.heads.loading import find_method, load_head
from guided_spec.models.loading import load_model
from tests.models.heads.fresh import fresh_head, spread
from tests.models.tiny import build

CASES = [
    ("mtp", "deepseek", "deepseek_v3", "deepseek_mtp"),
    ("mtp", "deepseek", "glm4_moe", "glm4_moe_mtp"),
    ("qwen_mtp", "qwen", "qwen3_5", "qwen3_5_mtp"),
    ("qwen_mtp", "qwen", "qwen3_next", "qwen3_5_mtp"),
]


def write(folder: Path, name: str, kind: str, layout: str, *, shards: bool) -> Any:
    """A target and a draft below ``folder``; returns the head."""
    target: Any = build(name)
    target.save_pretrained(folder / "target", max_shard_size="30KB" if shards else "1GB")
    (folder / "target" / "tokenizer.json").write_text("{}")
    head = fresh_head(kind, target, num_modules=2 if layout == "deepseek" else 1)
    spread(head)
    save_head(head, folder / "draft", layout=layout, target=target, dtype=torch.float32)
    return head


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize(("kind", "layout", "name", "method"), CASES)
def test_modules_are_found_in_the_target(
    tmp_path: Path, kind: str, layout: str, name: str, method: str, *, shards: bool
) -> None:
    head = write(tmp_path, name, kind, layout, shards=shards)
    arguments = [str(tmp_path / part) for part in ("target", "draft", "both")]
    assert CliRunner().invoke(app, ["stitch", *arguments]).exit_code == 0
    assert (tmp_path / "both" / "tokenizer.json").read_text() == "{}"
    plain, loaded = (load_model(tmp_path / part, device="cpu") for part in ("target", "both"))
    before, after = plain.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert find_method(None, loaded) == method
    found: Any = load_head(method, None, loaded)
    assert found.num_modules == head.num_modules
    expected = head.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(found.state_dict()[key], expected[key]) for key in expected)


def test_modules_are_replaced(tmp_path: Path) -> None:
    """Also in the files: engines that read every file find each tensor once."""
    write(tmp_path, "qwen3_5", "qwen_mtp", "qwen", shards=True)
    stitch(tmp_path / "target", tmp_path / "draft", tmp_path / "first")
    path = tmp_path / "draft" / "model.safetensors"
    changed = {name: tensor + 1 for name, tensor in load_file(path).items()}
    save_file(changed, path)
    stitch(tmp_path / "first", tmp_path / "draft", tmp_path / "second")
    stored = Checkpoint.open(tmp_path / "second").read(changed)
    assert all(torch.equal(stored[name], tensor) for name, tensor in changed.items())
    files = sorted((tmp_path / "second").glob("*.safetensors"))
    names = [name for file in files for name in load_file(file)]
    assert len(names) == len(set(names))
    assert set(names) == Checkpoint.open(tmp_path / "first").names


def test_what_cannot_be_stitched(tmp_path: Path) -> None:
    write(tmp_path, "qwen3_5", "qwen_mtp", "qwen", shards=False)
    other: Any = build("llama")
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="draft=.*expected modules of multi-token prediction"):
        stitch(tmp_path / "target", tmp_path / "other", tmp_path / "both")
    with pytest.raises(ModelError, match="draft=.*model_type='llama', found 'qwen3_5_text'"):
        stitch(tmp_path / "other", tmp_path / "draft", tmp_path / "both")
    assert not (tmp_path / "both").exists()
    with pytest.raises(ConfigError, match="output=.*is there already"):
        stitch(tmp_path / "target", tmp_path / "draft", tmp_path)
