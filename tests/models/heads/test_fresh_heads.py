"""Heads made from nothing: how they start, what they share, that all of them can be trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from guided_spec.errors import ConfigError, ModelError
from guided_spec.models.heads.config import HeadShape
from guided_spec.models.heads.eagle import Eagle3Head, Eagle3Layout
from guided_spec.models.target import TargetLayers
from tests.models.heads.fresh import KINDS, fresh_head, spread, vocabulary_of
from tests.models.heads.head_steps import draft_logits
from tests.models.heads.mtp_checkpoints import DRAFT_STEPS, TEXTS, Written, reference_logits
from tests.models.tiny import build

TARGETS = ["llama", "qwen3", "mistral", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "bitnet"]


def run(head: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """The first module's draft logits behind three tokens of random states, float32 [1, 3, D]."""
    random = torch.Generator().manual_seed(2)
    states = torch.randn(1, 3, 32 * len(head.aux_hidden_layers), generator=random).to(dtype)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    additive = torch.zeros(1, 1, 3, 3).masked_fill(~mask, torch.finfo(torch.float32).min)
    hidden = head(
        torch.tensor([[5, 3, 8]]),
        head.features(states),
        module=0,
        position_ids=torch.arange(3)[None],
        attention_mask=mask if head.config._attn_implementation == "sdpa" else additive,
        cache=None,
    )
    logits: Tensor = head.logits(hidden).float()
    return logits


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_is_float32_and_gets_a_gradient(kind: str, name: str) -> None:
    target = build(name).bfloat16().requires_grad_(requires_grad=False)
    before = copy.deepcopy(target.state_dict())
    head = fresh_head(kind, target)
    assert head.training
    targets_own = {tensor.data_ptr() for tensor in target.parameters()}
    run(head, torch.bfloat16).logsumexp(-1).sum().backward()
    for path, parameter in head.named_parameters():
        assert parameter.dtype == torch.float32, path
        assert parameter.data_ptr() not in targets_own, path
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path
    assert all(torch.equal(t, before[key]) for key, t in target.state_dict().items())


def test_states_are_widened_only_where_a_product_needs_it() -> None:
    head: Any = fresh_head("eagle3", build("llama"))
    states, fed = torch.randn(1, 3, head.fc.in_features).bfloat16(), []
    head.fc.register_forward_pre_hook(lambda _, given: fed.append(given[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow = head.features(states)
        wide = head.features(states.float())
    assert torch.equal(narrow, wide)
    head.features(states)
    assert [given.dtype for given in fed] == [torch.bfloat16, torch.float32, torch.float32]
    assert fed[0] is states


@pytest.mark.parametrize("kind", KINDS)
def test_the_embedding_takes_no_gradient(kind: str) -> None:
    target: Any = build("llama")
    run(fresh_head(kind, target)).logsumexp(-1).sum().backward()
    assert target.model.embed_tokens.weight.grad is None


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_says_the_weights(kind: str, name: str) -> None:
    target = build(name)
    first, again = fresh_head(kind, target).state_dict(), fresh_head(kind, target).state_dict()
    assert first.keys() == again.keys()
    assert all(torch.equal(tensor, again[path]) for path, tensor in first.items())


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_start_as_in_transformers(kind: str, name: str) -> None:
    target = build(name, hidden_size=64, initializer_range=0.03)
    options = {} if "mtp" not in kind else {"initialize": "random"}
    head = fresh_head(kind, target, **options)
    scales_by_one_plus = "mtp" in kind and name != "llama"
    for path, module in head.named_modules():
        if "norm" in path and isinstance(getattr(module, "weight", None), Tensor):
            assert module.weight.unique().tolist() == [0.0 if scales_by_one_plus else 1.0], path
        if isinstance(module, nn.Linear) and path != "lm_head":
            assert module.bias is None
            assert 0.027 < float(module.weight.detach().std()) < 0.033, path


def test_routers_and_experts_start_too() -> None:
    head = fresh_head("mtp", build("deepseek_v3"), initialize="random")
    experts = head.layers[0].mtp_block.mlp.experts
    for weight in (head.layers[0].mtp_block.mlp.gate.weight, experts.gate_up_proj):
        assert 0.015 < float(weight.detach().std()) < 0.025
    assert not head.layers[0].mtp_block.mlp.gate.e_score_correction_bias.any()


def test_the_output_head_of_eagle3_starts_as_the_targets_rows() -> None:
    target: Any = build("llama")
    head = fresh_head("eagle3", target)
    kept = head.vocabulary.target_ids
    assert torch.equal(head.lm_head.weight, target.lm_head.weight[kept])
    assert head.embed_tokens is None
    whole = fresh_head("eagle3", target, draft_vocab_size=None)
    assert torch.equal(whole.lm_head.weight, target.lm_head.weight)
    assert whole.vocabulary is None


@pytest.mark.parametrize("kind", ["mtp", "qwen_mtp"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4_moe", "qwen3_5_moe"])
def test_mtp_layers_start_as_the_targets_last(kind: str, name: str) -> None:
    target: Any = build(name).bfloat16()
    last = target.model.layers[-1].state_dict()
    for layer in fresh_head(kind, target, num_modules=2).layers:
        block = layer.mtp_block if kind == "mtp" else layer
        copied = block.state_dict()
        assert copied.keys() == last.keys()
        assert all(torch.equal(tensor, last[path].float()) for path, tensor in copied.items())
    drawn = fresh_head(kind, target, initialize="random").layers[0]
    block = drawn.mtp_block if kind == "mtp" else drawn
    assert not torch.equal(block.self_attn.o_proj.weight, last["self_attn.o_proj.weight"].float())


@pytest.mark.parametrize("kind", ["mtp", "qwen_mtp"])
def test_a_last_layer_of_linear_attention_is_not_copied(kind: str) -> None:
    target = build("qwen3_5", layer_types=["full_attention", *["linear_attention"] * 3])
    head = fresh_head(kind, target)
    assert head.config.layer_types == ["full_attention"]
    block = head.layers[0].mtp_block if kind == "mtp" else head.layers[0]
    assert 0.015 < float(block.self_attn.o_proj.weight.detach().std()) < 0.025  # the target's: 0.25
    assert run(head).isfinite().all()


@pytest.mark.parametrize("kind", ["mtp", "qwen_mtp"])
@pytest.mark.parametrize("name", ["llama", "llama3_rope", "qwen3", "mistral", "gemma3"])
def test_mtp_of_any_target_follows_the_published_equations(kind: str, name: str) -> None:
    """A donor, a model of one layer, says what the module gives: see ``mtp_checkpoints``."""
    types: Any = {"layer_types": ["full_attention"]} if name == "gemma3" else {}
    target: Any = build(name)
    donor: Any = build(name, num_hidden_layers=1, **types)
    head = fresh_head(kind, target)
    spread(head)
    is_deepseek = kind == "mtp"
    block = head.layers[0].mtp_block if is_deepseek else head.layers[0]
    donor.model.layers[0].load_state_dict(block.state_dict())
    norm = head.layers[0].post_norm if is_deepseek else head.norm
    donor.model.norm.load_state_dict(norm.state_dict())
    source = head.layers[0] if is_deepseek else head
    prefix = "model.layers.4." if is_deepseek else "mtp."
    names = _own_names(kind)
    tensors = {f"{prefix}{own}.weight": source.get_submodule(own).weight for own in names}
    if name == "gemma3":  # it scales its embedding, which heads are given bare, and norms by 1 + w
        target.model.embed_tokens = _bare(target.model.embed_tokens)
        tensors = {key: 1 + t if "norm" in key else t for key, t in tensors.items()}
    scores = draft_logits(head, target, TEXTS, DRAFT_STEPS)
    for row, text in enumerate(TEXTS):
        written = Written(Path(), [donor], tensors)
        expected = reference_logits(written, target, text, DRAFT_STEPS)
        # How float32 rounds through these layers differs between processors.
        torch.testing.assert_close(scores[row], expected, atol=1e-4, rtol=1e-4)


def _own_names(kind: str) -> tuple[str, str, str]:
    if kind == "mtp":
        return ("enorm", "hnorm", "eh_proj")
    return ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc")


def _bare(embedding: nn.Embedding) -> nn.Embedding:
    bare: nn.Embedding = nn.Embedding.from_pretrained(embedding.weight.detach())
    return bare


@given(depth=st.integers(1, 12))
def test_default_layers_are_those_of_all_runtimes(depth: int) -> None:
    target = build("llama", num_hidden_layers=depth)
    layers = Eagle3Layout.fresh(target).aux_hidden_layers
    wanted = (2, depth // 2, depth - 3)
    assert [*layers] == sorted({*layers})
    assert layers[0] >= 1
    assert layers[-1] <= depth
    if len(set(wanted)) == 3 and all(1 <= index <= depth for index in wanted):
        assert layers == tuple(sorted(wanted))


def test_a_layout_says_what_it_was_asked_for() -> None:
    shape = HeadShape(2, num_attention_heads=8, num_key_value_heads=4, head_dim=6)
    target = build("llama3_rope")
    layout = Eagle3Layout.fresh(target, shape, "qwen3", (4, 0), 30, fc_norm=True, norm_output=True)
    config = layout.config
    assert (config.model_type, config.num_hidden_layers, config.head_dim) == ("qwen3", 2, 6)
    assert (config.num_attention_heads, config.num_key_value_heads) == (8, 4)
    assert (config.hidden_size, config.intermediate_size) == (32, 64)
    assert config.rope_parameters["rope_type"] == "llama3"
    assert layout.aux_hidden_layers == (0, 4)
    assert layout.draft_vocab_size == 30
    flags = (layout.norm_before_fc, layout.fc_norm, layout.norm_before_residual, layout.norm_output)
    assert flags == (False, True, False, True)
    vocabulary = vocabulary_of(30)
    head = Eagle3Head.fresh(target, vocabulary=vocabulary, layout=layout)
    assert run(head).shape == (1, 3, 30)


def test_compressed_keys_and_partial_rotations_do_not_reach_a_head() -> None:
    config = Eagle3Layout.fresh(build("deepseek_v3")).config
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 2, 12)
    rope = Eagle3Layout.fresh(build("qwen3_5")).config.rope_parameters
    assert set(rope) == {"rope_type", "rope_theta"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_type": "mamba"}, "model_type='mamba': must be one of llama, qwen3"),
        ({"norm_before_fc": True, "fc_norm": True}, "fc_norm=True: excludes norm_before_fc"),
        ({"draft_vocab_size": 65}, "draft_vocab_size=65: must be 1 to 64"),
        ({"aux_hidden_layers": (1, 5)}, r"aux_hidden_layers=\(1, 5\): must be .* 0 to 4"),
        ({"aux_hidden_layers": (1, 1)}, r"aux_hidden_layers=\(1, 1\): must be different"),
        ({"aux_hidden_layers": ()}, r"aux_hidden_layers=\(\): must be different"),
        ({"shape": HeadShape(num_layers=0)}, "num_layers=0: must be at least 1"),
        ({"shape": HeadShape(head_dim=7)}, "head_dim=7: must be even"),
        ({"shape": HeadShape(num_key_value_heads=3)}, "num_key_value_heads=3: must divide"),
    ],
)
def test_what_cannot_be_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Eagle3Layout.fresh(build("llama"), **options)


def test_a_vocabulary_of_another_size_is_an_error() -> None:
    target = build("llama")
    layout = Eagle3Layout.fresh(target, draft_vocab_size=20)
    for vocabulary in (vocabulary_of(24), None):
        with pytest.raises(ConfigError, match="vocabulary=.* must have 20 of 64 tokens"):
            Eagle3Head.fresh(target, vocabulary=vocabulary, layout=layout)


@pytest.mark.parametrize("kind", ["mtp", "qwen_mtp"])
def test_arguments_of_mtp_heads_are_checked(kind: str) -> None:
    target = build("llama")
    with pytest.raises(ConfigError, match="num_modules=0: must be at least 1"):
        fresh_head(kind, target, num_modules=0)
    with pytest.raises(ConfigError, match="initialize='zeros': must be 'target' or 'random'"):
        fresh_head(kind, target, initialize="zeros")


@pytest.mark.parametrize("kind", ["mtp", "qwen_mtp"])
def test_layers_that_do_not_run_alone_are_an_error(kind: str) -> None:
    with pytest.raises(ModelError, match="model_type='gemma3n_text': .* use EAGLE-3"):
        fresh_head(kind, build("gemma3n"))


def test_a_target_without_the_usual_parts_is_an_error() -> None:
    target: Any = build("llama")
    del target.model.rotary_emb
    with pytest.raises(ModelError, match=r"found no decoder\.rotary_emb"):
        TargetLayers(target)
