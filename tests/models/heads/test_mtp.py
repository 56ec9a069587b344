"""The MTP modules of DeepSeek and GLM: their equations, transformers' drafts, what is read."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.candidate_generator import MTPCandidateGenerator

from guided_spec.errors import ModelError
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.mtp import MtpHead
from guided_spec.models.loading import load_model
from tests.models.heads.head_steps import HeadSteps, draft_logits
from tests.models.heads.mtp_checkpoints import (
    DRAFT_STEPS,
    TEXTS,
    expand_blocks,
    names_read,
    reference_logits,
    save,
    write,
)
from tests.models.tiny import build

FAMILIES = ["deepseek_v3", "deepseek_v32", "glm4_moe"]
FIRST = "model.layers.4."  # tiny targets have four layers


def load(folder: Path, target: PreTrainedModel) -> MtpHead:
    return MtpHead.from_checkpoint(Checkpoint.open(folder), target)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("num_files", [1, 2])
def test_drafts_follow_the_published_equations(tmp_path: Path, name: str, num_files: int) -> None:
    written = write(tmp_path, name, num_files=num_files)
    target = load_model(tmp_path)
    scores = draft_logits(load(tmp_path, target), target, TEXTS, DRAFT_STEPS)
    for row, text in enumerate(TEXTS):
        expected = reference_logits(written, target, text, DRAFT_STEPS)
        torch.testing.assert_close(scores[row], expected, atol=1e-5, rtol=1e-5)


def test_eager_attention_gives_the_same(tmp_path: Path) -> None:
    written = write(tmp_path, "deepseek_v3")
    target = load_model(tmp_path, attn_implementation="eager")
    scores = draft_logits(load(tmp_path, target), target, TEXTS, DRAFT_STEPS)
    expected = reference_logits(written, target, TEXTS[0], DRAFT_STEPS)
    torch.testing.assert_close(scores[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("num_modules", [1, 2])
def test_the_drafts_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, num_modules: int
) -> None:
    write(tmp_path, name, num_modules=num_modules)
    target: Any = load_model(tmp_path)
    drafts = record_drafts(monkeypatch)
    patterns = [rf"model\.layers\.{4 + module}.*" for module in range(num_modules)]
    monkeypatch.setattr(target, "_keys_to_ignore_on_load_unexpected", patterns)
    prompt = torch.tensor([TEXTS[0]])
    options = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    target.generate(prompt, use_mtp=True, **options)
    assert len(drafts) > 3
    head = load(tmp_path, target)
    assert head.num_modules == num_modules
    for text, draft in drafts:
        assert chain(head, target, text) == draft


def record_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Filled with (text, draft) of each call of transformers' own generator."""
    drafts: list[tuple[list[int], list[int]]] = []
    original: Any = MTPCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: Tensor, *args: Any, **options: Any) -> Any:
        result = original(self, input_ids, *args, **options)
        candidates, length = result[0][0].tolist(), input_ids.shape[1]
        if len(candidates) > length:
            drafts.append((candidates[:length], candidates[length:]))
        return result

    monkeypatch.setattr(MTPCandidateGenerator, "get_candidates", get_candidates)
    return drafts


@torch.no_grad()
def chain(head: MtpHead, target: Any, text: list[int]) -> list[int]:
    """One greedy token of each module, of which each is fed the output of the one before."""
    rows = HeadSteps(head, slots=[0])
    hidden = target.model(torch.tensor([text[:-1]])).last_hidden_state
    ids, draft = torch.tensor([text[1:]]), []
    for module in range(head.num_modules):
        hidden = rows.forward(ids, hidden, [0], [ids.shape[1]], module=module)
        token = head.logits(hidden[:, -1:]).argmax(-1)
        ids = torch.cat([ids[:, 1:], token], 1)
        draft.append(int(token))
    return draft


@pytest.mark.parametrize("name", FAMILIES)
def test_only_the_modules_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    written = write(tmp_path, name, num_files=2)
    target = load_model(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    read = names_read(monkeypatch, partial(load, tmp_path, target))
    copies = {f"{FIRST}embed_tokens.weight", f"{FIRST}shared_head.head.weight"}
    assert set(read) == written.tensors.keys() - copies
    assert len(read) == len(set(read))


def test_a_head_is_like_its_target_and_owns_nothing_of_it(tmp_path: Path) -> None:
    write(tmp_path, "deepseek_v32", num_modules=2)
    target = load_model(tmp_path, dtype=torch.bfloat16)
    head = load(tmp_path, target)
    assert (head.num_modules, head.hidden_size, head.aux_hidden_layers) == (2, 32, (-1,))
    assert head.vocabulary is None
    assert not head.training
    targets_own = {tensor.data_ptr() for tensor in target.parameters()}
    for name, parameter in head.named_parameters():
        is_exact = any(part in name for part in target._keep_in_fp32_modules_strict or ())
        assert parameter.dtype == (torch.float32 if is_exact else torch.bfloat16), name
        assert parameter.data_ptr() not in targets_own
        assert not parameter.requires_grad
    for name, buffer in head.named_buffers():
        assert (name.rsplit(".")[-1], buffer.dtype) == ("e_score_correction_bias", torch.float32)
    assert target.config.num_hidden_layers == 4
    steps = HeadSteps(head, slots=[0])
    assert len(steps.cache.layers) == 2
    assert set(steps.cache.layer_types) == set(target.config.layer_types)


def test_fp8_weights_are_multiplied_out(tmp_path: Path) -> None:
    target = build("deepseek_v3")
    written = write(tmp_path, "deepseek_v3", quantized=("o_proj.weight", "up_proj.weight"))
    state = load(tmp_path, target).state_dict()
    stored = written.tensors

    def multiplied(name: str) -> Tensor:
        weight, scale = stored[f"{FIRST}{name}"], stored[f"{FIRST}{name}_scale_inv"]
        return weight.float() * expand_blocks(scale, weight.shape)

    o_proj = multiplied("self_attn.o_proj.weight")
    torch.testing.assert_close(state["layers.0.mtp_block.self_attn.o_proj.weight"], o_proj)
    experts = state["layers.0.mtp_block.mlp.experts.gate_up_proj"]
    up_proj = multiplied("mlp.experts.3.up_proj.weight")
    torch.testing.assert_close(experts[3, len(up_proj) :], up_proj)


def test_a_checkpoint_that_declares_no_modules_is_an_error(tmp_path: Path) -> None:
    target = build("deepseek_v32")
    target.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="num_nextn_predict_layers of at least 1, found None"):
        load(tmp_path, target)


def test_a_checkpoint_that_lacks_the_tensors_is_an_error(tmp_path: Path) -> None:
    target = build("deepseek_v3")
    target.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"expected .*model\.layers\.4\.\*.* layers 0, 1, 2, 3;"):
        load(tmp_path, target)


def test_modules_of_another_target_are_an_error(tmp_path: Path) -> None:
    written = write(tmp_path, "deepseek_v3")
    target = build("deepseek_v3", hidden_size=48)
    with pytest.raises(ModelError, match=r"enorm.weight: expected \[48\], found \[32\]"):
        load(tmp_path, target)
    tensors = {name: t for name, t in written.tensors.items() if "hnorm" not in name}
    tensors[f"{FIRST}extra.weight"] = torch.zeros(3)
    save(tmp_path, [tensors], json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(ModelError) as raised:
        load(tmp_path, build("deepseek_v3"))
    assert "hnorm.weight: expected [32], found none" in str(raised.value)
    assert "extra.weight: expected none, found [3]" in str(raised.value)
