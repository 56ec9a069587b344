"""MTP modules in a folder of their own: which method they are for, and that it reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from guided_spec.errors import ModelError
from guided_spec.models.heads.export import save_head
from guided_spec.models.heads.loading import find_method, load_head
from tests.models.heads import mtp_checkpoints
from tests.models.heads.fresh import fresh_head, write_mtp
from tests.models.tiny import build


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3_5", "deepseek_v3"])
@pytest.mark.parametrize(("kind", "layout"), [("mtp", "deepseek"), ("qwen_mtp", "qwen")])
def test_mtp_reads_both_layouts_for_every_target(
    tmp_path: Path, kind: str, layout: str, name: str
) -> None:
    target = build(name)
    head = fresh_head(kind, target, initialize="random")
    save_head(head, tmp_path, layout=layout, target=target, dtype=torch.float32)
    loaded: Any = load_head("mtp", tmp_path, target)
    assert type(loaded) is type(head)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_a_published_checkpoint_may_be_the_draft(tmp_path: Path) -> None:
    """For a target that was loaded from another place, such as a quantized copy."""
    mtp_checkpoints.write(tmp_path, "deepseek_v3")
    target = build("deepseek_v3")
    assert find_method(tmp_path, target) == "deepseek_mtp"
    same_size = build("llama")  # of four layers too: what does not fit is listed
    assert find_method(tmp_path, same_size) == "mtp"
    with pytest.raises(ModelError, match="its tensors do not fit the head"):
        load_head("mtp", tmp_path, same_size)


def test_a_model_that_has_modules_is_a_draft_model(tmp_path: Path) -> None:
    """Of a smaller target of the same family, which was published with its own."""
    for name in ("qwen3_5", "deepseek_v3"):
        mtp_checkpoints.write(tmp_path / name, name)
        types: Any = {"layer_types": ["full_attention"] * 5} if name == "qwen3_5" else {}
        assert find_method(tmp_path / name, build(name, num_hidden_layers=5, **types)) is None


def test_mtp_has_no_modules_in_the_targets_own_checkpoint(tmp_path: Path) -> None:
    target = build("llama")
    target.config.name_or_path = str(tmp_path)
    with pytest.raises(ModelError, match="proposer='mtp': draft=None; pass draft="):
        load_head("mtp", None, target)
    assert find_method(None, target) is None


def test_the_modules_of_another_target_are_an_error(tmp_path: Path) -> None:
    write_mtp(tmp_path, build("qwen3"))
    with pytest.raises(ModelError, match=r"q_norm.weight: expected none, found \[8\]"):
        load_head("mtp", tmp_path, build("llama"))
