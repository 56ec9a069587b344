"""The MTP module of Qwens: its equations, both layouts of its checkpoints, what is read."""

from __future__ import annotations

import importlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.mtp import QwenMtpHead
from guided_spec.models.loading import load_model
from tests.models.heads.head_steps import HeadSteps, draft_logits
from tests.models.heads.mtp_checkpoints import (
    DRAFT_STEPS,
    TEXTS,
    Written,
    expand_blocks,
    names_read,
    reference_logits,
    save,
    write,
)
from tests.models.tiny import build

FAMILIES = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
MOE = ["qwen3_next", "qwen3_5_moe"]
SPECULATORS_NAMES = {
    "mtp.pre_fc_norm_embedding": "mtp_layers.0.token_layernorm",
    "mtp.pre_fc_norm_hidden": "mtp_layers.0.hidden_layernorm",
    "mtp.fc": "mtp_layers.0.input_proj",
    "mtp.norm": "mtp_layers.0.final_layernorm",
    "mtp.layers.0": "mtp_layers.0",
}


def load(folder: Path, target: PreTrainedModel) -> QwenMtpHead:
    return QwenMtpHead.from_checkpoint(Checkpoint.open(folder), target)


def check_drafts(written: Written, target: PreTrainedModel, head: QwenMtpHead) -> None:
    scores = draft_logits(head, target, TEXTS, DRAFT_STEPS)
    for row, text in enumerate(TEXTS):
        expected = reference_logits(written, target, text, DRAFT_STEPS)
        torch.testing.assert_close(scores[row], expected, atol=1e-5, rtol=1e-5)


def write_speculators(folder: Path, written: Written) -> None:
    """The same module as speculators saves it: one file of its own, experts fused."""
    renamed = {}
    for name, tensor in written.tensors.items():
        prefix = next(prefix for prefix in SPECULATORS_NAMES if name.startswith(prefix))
        renamed[SPECULATORS_NAMES[prefix] + name.removeprefix(prefix)] = tensor
    config = json.loads((written.folder / "config.json").read_text())
    fields = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
    save(folder, [renamed], fields | {"transformer_layer_config": config})


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_files", [1, 2])
def test_drafts_follow_the_published_equations(tmp_path: Path, name: str, num_files: int) -> None:
    written = write(tmp_path, name, num_files=num_files)
    target = load_model(tmp_path)
    check_drafts(written, target, load(tmp_path, target))


@pytest.mark.parametrize("name", MOE)
def test_experts_may_be_fused(tmp_path: Path, name: str) -> None:
    written = write(tmp_path, name, fused=True)
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in written.tensors
    target = load_model(tmp_path)
    check_drafts(written, target, load(tmp_path, target))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layout_of_speculators(tmp_path: Path, name: str) -> None:
    written = write(tmp_path, name, fused=True)
    write_speculators(tmp_path / "head", written)
    target = load_model(tmp_path)
    check_drafts(written, target, load(tmp_path / "head", target))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_a_published_checkpoint_nests_the_text_model(tmp_path: Path, name: str) -> None:
    """Published Qwen3.5 are multimodal: our loader takes the language model out of them."""
    written = write(tmp_path, name)
    path = tmp_path / "config.json"
    text = json.loads(path.read_text())
    wrapper = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": name}
    path.write_text(json.dumps(wrapper | {"text_config": text, "vision_config": {}}))
    target = load_model(tmp_path)
    check_drafts(written, target, load(tmp_path, target))
    text["mtp_num_hidden_layers"] = 0
    path.write_text(json.dumps(wrapper | {"text_config": text, "vision_config": {}}))
    with pytest.raises(ModelError, match="mtp_num_hidden_layers of at least 1, found 0"):
        load(tmp_path, target)


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_module_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    written = write(tmp_path, name, num_files=2)
    target = load_model(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    read = names_read(monkeypatch, partial(load, tmp_path, target))
    assert sorted(read) == sorted(written.tensors)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_is_like_its_target_and_owns_nothing_of_it(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    target = load_model(tmp_path, dtype=torch.bfloat16)
    head = load(tmp_path, target)
    assert (head.num_modules, head.hidden_size, head.aux_hidden_layers) == (1, 32, (-1,))
    assert head.vocabulary is None
    assert not head.training
    targets_own = {tensor.data_ptr() for tensor in target.parameters()}
    for parameter in head.parameters():
        assert parameter.dtype == torch.bfloat16
        assert parameter.data_ptr() not in targets_own
        assert not parameter.requires_grad
    assert len(target.config.layer_types) == 4
    steps = HeadSteps(head, slots=[0])
    assert steps.cache.layer_types == ["full_attention"]
    assert not steps.cache.has_linear_state


def test_fp8_weights_are_multiplied_out(tmp_path: Path) -> None:
    target = build("qwen3_5")
    written = write(tmp_path, "qwen3_5", quantized=("q_proj.weight",))
    weight = written.tensors["mtp.layers.0.self_attn.q_proj.weight"]
    scale = written.tensors["mtp.layers.0.self_attn.q_proj.weight_scale_inv"]
    state = load(tmp_path, target).state_dict()
    expected = weight.float() * expand_blocks(scale, weight.shape)
    torch.testing.assert_close(state["layers.0.self_attn.q_proj.weight"], expected)


def test_a_checkpoint_without_the_module_is_an_error(tmp_path: Path) -> None:
    target = build("qwen3_5")
    target.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"expected .*mtp\.\*.* found only lm_head\.\*, model\.\*"):
        load(tmp_path, target)


def test_the_module_of_another_target_is_an_error(tmp_path: Path) -> None:
    written = write(tmp_path, "qwen3_5")
    with pytest.raises(ModelError, match=r"fc.weight: expected \[48, 96\], found \[32, 64\]"):
        load(tmp_path, build("qwen3_5", hidden_size=48))
    with pytest.raises(ModelError, match=r"mlp.gate_proj.weight: expected none, found \[64, 32\]"):
        load(tmp_path, build("qwen3_5_moe"))
    tensors = {name: t for name, t in written.tensors.items() if "q_norm" not in name}
    save(tmp_path, [tensors], json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(ModelError, match=r"q_norm.weight: expected \[8\], found none"):
        load(tmp_path, build("qwen3_5"))


@pytest.mark.filterwarnings("ignore")  # another package's
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_the_logits_are_those_of_speculators(tmp_path: Path, name: str) -> None:
    pytest.importorskip("speculators")
    write(tmp_path, name)
    target: Any = load_model(tmp_path)
    text = torch.tensor([TEXTS[0]])
    hidden = target.model(text).last_hidden_state
    steps = 3
    theirs: Any = build_speculators(tmp_path, target, steps)
    expected = theirs(input_ids=text, hidden_states=hidden)[0]
    assert len(expected) == steps
    head = load(tmp_path, target)
    length = text.shape[1] - steps - 1
    for step, scores in enumerate(expected):
        # It trains with the true tokens, and with no keys of the step before.
        ids = text[:, step + 1 : step + 1 + length]
        hidden = HeadSteps(head, slots=[0]).forward(ids, hidden[:, :length], [0], [length])
        torch.testing.assert_close(head.logits(hidden), scores, atol=1e-5, rtol=1e-5)


def build_speculators(folder: Path, target: Any, steps: int) -> Any:
    """speculators' own model, with weights that its own converter read."""
    config, convert, mtp, greedy = (
        importlib.import_module(f"speculators.{name}")
        for name in ("config", "convert.mtp", "models.mtp", "proposals.greedy")
    )
    verifier = config.VerifierConfig(name_or_path=str(folder), architectures=["X"])
    method = config.SpeculatorsConfig(
        algorithm="mtp",
        proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=steps)],
        default_proposal_method="greedy",
        verifier=verifier,
    )
    model = mtp.MTPDraftModel(
        mtp.MTPSpeculatorConfig(transformer_layer_config=target.config, speculators_config=method)
    )
    model.eval()
    weights = convert.MTPConverter().convert_to_state_dict(folder)
    weights["embed_tokens.weight"] = target.get_input_embeddings().weight
    weights["lm_head.weight"] = target.lm_head.weight
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    return model
