"""The EAGLE-3 head gives the logits of its equations, in every layout and with every flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.eagle import Eagle3Head
from tests.models.heads.equations import cached_logits, draw_texts, eagle3, unroll
from tests.models.heads.heads import SPECULATORS_CONFIG, save, write_eagle3
from tests.models.heads.speculators_models import eagle3_logits
from tests.models.tiny import build

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
ALL_ON = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}

VARIANTS: dict[str, dict[str, Any]] = {
    "safeailab": {"files": "bin"},
    "specforge": {"layout": "specforge", "own_embedding": True},
    "speculators": {"layout": "speculators", "own_embedding": True},
    "speculators_defaults": {"layout": "speculators", "own_embedding": True, "flags": ALL_ON},
    "sharded": {"layout": "speculators", "files": "sharded"},
    "norm_before_residual": {"flags": {"norm_before_residual": True}},
    "norm_before_fc": {"flags": {"norm_before_fc": True}},
    "fc_norm": {"layout": "speculators", "flags": {"fc_norm": True}},
    "eagle_3_1": {"layout": "specforge", "flags": {"fc_norm": True, "norm_output": True}},
    "norm_output": {"layout": "speculators", "flags": {"norm_output": True}},
    "no_aux_hidden_state": {"flags": {"use_aux_hidden_state": False}, "layer_ids": None},
    "two_features": {"layout": "speculators", "layer_ids": (1, 4)},
    "full_vocabulary": {"draft_vocab_size": None},
    "targets_output_head": {"draft_vocab_size": None, "own_lm_head": False},
    "narrow": {"hidden_size": 24, "own_embedding": True, "flags": {"fc_norm": True}},
    "odd_width": {"hidden_size": 30, "own_embedding": True},
    "targets_config": {"changes": {"model_type": "phi3", "layer_types": ["sliding_attention"] * 9}},
    "qwen3": {"layout": "speculators", "model_type": "qwen3", "flags": ALL_ON},
    "two_layers": {"num_layers": 2},
    "three_layers": {"layout": "speculators", "num_layers": 3, "flags": {"norm_output": True}},
}


@pytest.mark.parametrize("architecture", ["llama", "llama_eager"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_equations(tmp_path: Path, variant: dict[str, Any], architecture: str) -> None:
    target: Any = build(architecture)
    tensors = borrow(target, write_eagle3(tmp_path, target, **variant))
    head = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    count = len(head.aux_hidden_layers)
    expected = eagle3(tensors, variant.get("flags", {}), variant.get("num_layers", 1), count=count)
    texts = draw_texts([5, 1, 11], 32 * count, 64, drafts=4)
    for text, logits in zip(texts, cached_logits(head, texts, drafts=4), strict=True):
        features = expected.features(text.states)
        wanted = unroll(expected.run, expected.score, features, text.tokens)
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_sliding_layers(tmp_path: Path, model_type: str) -> None:
    target = build("llama")
    options: Any = {"layout": "speculators", "model_type": model_type, "num_layers": 2}
    tensors = borrow(target, write_eagle3(tmp_path, target, **options))
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.config["transformer_layer_config"] |= SLIDING | {"use_sliding_window": True}
    head = Eagle3Head.from_checkpoint(checkpoint, target)
    expected = eagle3(tensors, {}, 2, window=3)
    texts = draw_texts([9, 4], 96, 64, drafts=3)
    for text, logits in zip(texts, cached_logits(head, texts, drafts=3), strict=True):
        features = expected.features(text.states)
        wanted = unroll(expected.run, expected.score, features, text.tokens)
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


def borrow(target: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, and the target's ends where there are none."""
    ends = {
        "embed_tokens.weight": target.model.embed_tokens.weight.detach(),
        "lm_head.weight": target.lm_head.weight.detach(),
    }
    return ends | tensors


def test_attributes(tmp_path: Path) -> None:
    target = build("llama")
    tensors = write_eagle3(tmp_path, target)
    head = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    assert (head.hidden_size, head.num_modules) == (32, 1)
    assert head.vocabulary is not None
    kept = tensors["t2d"].nonzero()[:, 0]
    assert torch.equal(head.vocabulary.target_ids, kept)
    assert not head.training
    assert not any(parameter.requires_grad for parameter in head.parameters())
    owned = {id(parameter) for parameter in target.parameters()}
    assert not any(id(parameter) in owned for parameter in head.parameters())


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (2, 4, 5)),
        ({LAYER_IDS: [1, 4, 6]}, (1, 4, 6)),
        ({LAYER_IDS: [6, 1, 4]}, (1, 4, 6)),
        ({"eagle_config": {LAYER_IDS: [1, 3, 4]}}, (2, 4, 5)),
        ({"eagle_config": {LAYER_IDS: []}}, (2, 4, 5)),
        ({LAYER_IDS: [2, 4, 5, 8]}, (2, 4, 5)),
        ({LAYER_IDS: [2, 4, 8]}, (2, 4, 8)),
    ],
)
def test_aux_hidden_layers(
    tmp_path: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    target = build("llama", num_hidden_layers=8)
    write_eagle3(tmp_path, target, layer_ids=None, changes=changes)
    head = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    assert head.aux_hidden_layers == layers


@pytest.mark.parametrize("ids", [[2, 4], [2, 4, 9], [-1, 2, 4], [2, 4, 5, 6]])
def test_wrong_layer_ids(tmp_path: Path, ids: list[int]) -> None:
    target = build("llama", num_hidden_layers=8)
    write_eagle3(tmp_path, target, layer_ids=None, changes={LAYER_IDS: ids})
    with pytest.raises(ModelError, match=f"{LAYER_IDS}: expected the 3 hidden states"):
        Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)


def test_a_scaled_embedding_is_read_bare(tmp_path: Path) -> None:
    target: Any = build("gemma3")
    tensors = write_eagle3(tmp_path, target)
    head = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    expected = eagle3(borrow(target, tensors), {})
    (text,) = draw_texts([6], 96, 64, drafts=2)
    (logits,) = cached_logits(head, [text], drafts=2)
    wanted = unroll(expected.run, expected.score, expected.features(text.states), text.tokens)
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


def test_axes_of_a_part_of_a_head_are_left_out(tmp_path: Path) -> None:
    """As of a head that has the rotary embedding of its target, Qwen 3.5, in its configuration."""
    target = build("llama")
    rope = {"rope_type": "default", "mrope_section": [1, 0, 0], "partial_rotary_factor": 0.25}
    write_eagle3(tmp_path, target, changes={"rope_scaling": rope})
    head: Any = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    assert "mrope_section" not in head.config.rope_parameters


def test_offsets_that_are_all_zero_are_no_vocabulary(tmp_path: Path) -> None:
    """SpecForge writes them where the vocabularies are the same."""
    target = build("llama")
    write_eagle3(tmp_path, target, draft_vocab_size=64)
    head = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    assert head.vocabulary is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "mrope"}}, "rope_type of its layers: expected .*'mrope'"),
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}},
            r"mrope_section: expected 3 parts of a half head's 4 numbers, found \[1, 1, 1\]",
        ),
        (
            {"transformer_layer_config": {"model_type": "deepseek_v3"}},
            "model_type of its layers: expected one of llama, qwen3, found 'deepseek_v3'",
        ),
        ({"vocab_size": 80}, "vocab_size: expected 64, found 80"),
        ({"hidden_size": 64}, "target_hidden_size: expected 32, found 64"),
        ({"target_hidden_size": 48}, "target_hidden_size: expected 32, found 48"),
        ({"draft_vocab_size": 20}, r"d2t: expected int64 \[20\], found \[24\]"),
        ({"norm_before_fc": True}, r"input_norm.weight: expected \[96\], found none"),
        ({"num_key_value_heads": 4}, r"k_proj.weight: expected \[32, 64\], found \[16, 64\]"),
        ({"num_attention_heads": "four"}, "expected the sizes of llama layers"),
        ({"quantization_config": {"quant_method": "gptq"}}, "found quant_method='gptq'"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    target = build("llama")
    write_eagle3(tmp_path, target)
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.config.update(changes)
    with pytest.raises(ModelError, match=message):
        Eagle3Head.from_checkpoint(checkpoint, target)


@pytest.mark.parametrize(
    ("options", "lost", "message"),
    [
        ({}, "d2t", r"d2t: expected int64 \[24\], found none"),
        ({}, "lm_head.weight", r"lm_head.weight: expected \[24, 32\], found none"),
        ({"hidden_size": 24}, "", r"embed_tokens.weight: expected \[64, 24\], found none"),
        ({}, "midlayer.hidden_norm.weight", "hidden_norm.weight: expected"),
    ],
)
def test_missing_tensors(tmp_path: Path, options: dict[str, Any], lost: str, message: str) -> None:
    target = build("llama")
    write_eagle3(tmp_path, target, **options)
    checkpoint = Checkpoint.open(tmp_path)
    save(tmp_path, checkpoint.config, checkpoint.read(checkpoint.names - {lost}), "safetensors")
    with pytest.raises(ModelError, match=message):
        Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)


@pytest.mark.filterwarnings("default")  # speculators' own dependencies warn
@pytest.mark.parametrize(
    "options",
    [
        {"flags": ALL_ON},
        {"flags": {"fc_norm": True}},
        {"model_type": "qwen3", "flags": {"norm_before_residual": True}, "num_layers": 2},
        {"draft_vocab_size": None, "num_layers": 2},
    ],
    ids=["defaults", "fc_norm", "qwen3", "full_vocabulary"],
)
def test_speculators_gives_the_same_logits(tmp_path: Path, options: dict[str, Any]) -> None:
    """Its steps in training: at each, position p recycles what p gave the step before."""
    pytest.importorskip("speculators")
    target: Any = build("llama")
    target.save_pretrained(tmp_path / "target")
    verifier = {"name_or_path": str(tmp_path / "target"), "architectures": ["LlamaForCausalLM"]}
    options = {"layout": "speculators", "own_embedding": True, **options}
    options["changes"] = {"speculators_config": {**SPECULATORS_CONFIG, "verifier": verifier}}
    write_eagle3(tmp_path, target, **options)
    head = Eagle3Head.from_checkpoint(Checkpoint.open(tmp_path), target)
    (text,) = draw_texts([7], 96, 64, drafts=4)
    wanted = eagle3_logits(tmp_path, text, steps=4)
    for position in range(7):
        # At position p, its step k saw features up to p only, then k recycled states.
        prefix = text._replace(
            states=text.states[: position + 1], tokens=text.tokens[: position + 4]
        )
        (logits,) = cached_logits(head, [prefix], drafts=3)
        for step in range(4):
            if position + step < 7:
                torch.testing.assert_close(
                    logits[position + step], wanted[step][position], rtol=1e-5, atol=1e-5
                )
