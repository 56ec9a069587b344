"""The EAGLE head gives the logits of its equations, over slots and step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.eagle import EagleHead
from tests.models.heads.equations import cached_logits, draw_texts, eagle, unroll
from tests.models.heads.heads import save, write_eagle
from tests.models.tiny import build

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_fc_bias": {"fc_bias": False},
    "bias_key_contradicts": {"fc_bias": False, "changes": {"bias": True}},
    "qkv_bias": {"qkv_bias": True},
    "targets_embedding": {"own_embedding": False},
    "two_layers": {"num_layers": 2},
    "bin": {"files": "bin"},
    "sharded": {"files": "sharded"},
}


@pytest.mark.parametrize("architecture", ["llama", "llama_eager"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_equations(tmp_path: Path, variant: dict[str, Any], architecture: str) -> None:
    target: Any = build(architecture)
    tensors = write_eagle(tmp_path, target, **variant)
    head = EagleHead.from_checkpoint(Checkpoint.open(tmp_path), target)
    texts = draw_texts([5, 1, 11], 32, 64, drafts=4)
    shared = {"embed_tokens.weight": target.model.embed_tokens.weight.detach()}
    run = eagle(shared | tensors, variant.get("num_layers", 1))
    for text, logits in zip(texts, cached_logits(head, texts, drafts=4), strict=True):
        expected = unroll(run, target.lm_head, text.states, text.tokens)
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def test_attributes(tmp_path: Path) -> None:
    target = build("llama")
    write_eagle(tmp_path, target, own_embedding=False)
    head = EagleHead.from_checkpoint(Checkpoint.open(tmp_path), target)
    assert head.aux_hidden_layers == (-1,)
    assert (head.hidden_size, head.num_modules, head.vocabulary) == (32, 1, None)
    assert not head.training
    assert not any(parameter.requires_grad for parameter in head.parameters())
    owned = {id(parameter) for parameter in target.parameters()}
    assert not any(id(parameter) in owned for parameter in head.parameters())


def test_takes_the_targets_dtype_but_keeps_exact_rotations(tmp_path: Path) -> None:
    target = build("llama").bfloat16()
    write_eagle(tmp_path, target)
    head = EagleHead.from_checkpoint(Checkpoint.open(tmp_path), target)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert head.rotary_emb.inv_freq.dtype == torch.float32


def test_a_copy_of_the_targets_output_head_is_left_alone(tmp_path: Path) -> None:
    target: Any = build("llama")
    write_eagle(tmp_path, target)
    checkpoint = Checkpoint.open(tmp_path)
    tensors = checkpoint.read(checkpoint.names) | {"lm_head.weight": torch.zeros(64, 32)}
    save(tmp_path, checkpoint.config, tensors, "safetensors")
    head = EagleHead.from_checkpoint(Checkpoint.open(tmp_path), target)
    hidden = torch.randn(2, 32)
    assert torch.equal(head.logits(hidden), target.lm_head(hidden))


def test_another_target(tmp_path: Path) -> None:
    write_eagle(tmp_path, build("llama"))
    checkpoint = Checkpoint.open(tmp_path)
    other = build("llama", vocab_size=80, hidden_size=48)
    with pytest.raises(ModelError) as caught:
        EagleHead.from_checkpoint(checkpoint, other)
    assert "hidden_size: expected 48, found 32" in str(caught.value)
    assert "vocab_size: expected 80, found 64" in str(caught.value)


def test_another_kind_of_head(tmp_path: Path) -> None:
    target = build("llama")
    target.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"fc.weight: expected \[32, 64\], found none"):
        EagleHead.from_checkpoint(Checkpoint.open(tmp_path), target)
