"""Layers as they are trained on CUDA compute what transformers' own do, compiled or not."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from guided_spec.models.heads.config import HeadShape
from guided_spec.models.heads.eagle import Eagle3Head, Eagle3Layout, EagleHead, EagleLayout
from guided_spec.training import compiled_layers, unroll_attention
from guided_spec.training.algorithms.heads import unroll
from tests.models.tiny import build
from tests.training.compiled_whole import LOOKS, compiled_whole

H = 8
KINDS = ["eagle", "llama", "qwen3", "llama norm_before_residual"]
CONFIG = LlamaConfig(hidden_size=H, intermediate_size=12, num_attention_heads=2)
NAMES = ("_gate", "_normed", "_rotate", "_join_normed", "_add_normed")
COMPILED = [
    *((compiled_layers, name) for name in NAMES),
    *((unroll_attention, name) for name in ("_mixed", "_mixed_backward")),
]


@pytest.fixture(autouse=True)
def _forget() -> None:
    """Each test compiles anew: a function has a limited number of variants."""
    torch.compiler.reset()


def _trained(head: Any, *, recompute: bool) -> list[Tensor]:
    """The states of three depths, and the gradients of what is trained."""
    tokens = torch.arange(22).view(2, 11)
    drawn = torch.randn(2, 11, len(head.aux_hidden_layers) * 32, generator=DICE.manual_seed(5))
    states = list(unroll(head, tokens, drawn, 3, recompute=recompute))
    weights = torch.linspace(-0.1, 0.1, states[0].numel()).view_as(states[0])
    trained = [p for name, p in head.named_parameters() if not name.startswith(("norm", "lm_head"))]
    total = (torch.stack(states) * weights).sum()
    return [*states, *torch.autograd.grad(total, trained)]


DICE = torch.Generator()


def _head(kind: str) -> nn.Module:
    target = build("qwen3", vocab_size=64)
    torch.manual_seed(4)
    if kind == "eagle":
        return EagleHead.fresh(target, layout=EagleLayout.fresh(target, HeadShape(num_layers=2)))
    model_type, _, flag = kind.partition(" ")
    flags: dict[str, Any] = {flag: True} if flag else {}
    layout = Eagle3Layout.fresh(target, HeadShape(num_layers=2), model_type, **flags)
    return Eagle3Head.fresh(target, layout=layout)


def _replaced(kind: str) -> Any:
    return _replace(_head(kind))


def _replace(model: Any) -> Any:
    for module in model.modules():
        if type(module) in compiled_layers._RUNS:
            compiled_layers._replace(module)
    return model


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_an_unroll(kind: str, recompute: bool) -> None:  # noqa: FBT001
    ours, wanted = (_trained(make(kind), recompute=recompute) for make in (_replaced, _head))
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_layers_of_a_whole_model(name: str) -> None:
    """Their attention is as it was; so are layers of other families."""
    tokens, found = torch.arange(22).view(2, 11), []
    for model in (build(name), _replace(build(name))):
        logits = model(tokens).logits
        trained = list(model.parameters())
        found.append([logits, *torch.autograd.grad(logits.logsumexp(-1).mean(), trained)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@LOOKS
@pytest.mark.parametrize("kind", KINDS[-2:])
def test_an_unroll_compiles(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    wanted = _trained(_head(kind), recompute=False)
    for module, name in COMPILED:
        monkeypatch.setattr(module, name, compiled_whole(vars(module)[name]))
    torch.testing.assert_close(
        _trained(_replaced(kind), recompute=False), wanted, rtol=1e-5, atol=1e-5
    )


@LOOKS
def test_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, norm, x = LlamaMLP(CONFIG), LlamaRMSNorm(H), torch.randn(2, 3, H)
    for run in (inspect.unwrap, compiled_whole):
        for name in ("_gate", "_normed"):
            monkeypatch.setattr(compiled_layers, name, run(vars(compiled_layers)[name]))
        torch.testing.assert_close(compiled_layers._run_mlp(mlp, x), mlp(x))
        torch.testing.assert_close(compiled_layers._run_norm(norm, x), norm(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = compiled_layers._run_norm(norm, x)
        torch.testing.assert_close(found, norm(x).bfloat16())


@pytest.mark.gpu
def test_on_cuda() -> None:
    """Norms and MLPs of a head are what is compiled, in place; on a CPU nothing is."""
    layers = torch.nn.ModuleList([LlamaRMSNorm(H), LlamaMLP(CONFIG)]).cuda()
    x = torch.randn(2, 3, H, device="cuda")
    wanted = [layer(x) for layer in layers]
    compiled_layers.compile_layers(layers)
    torch.testing.assert_close([layer(x) for layer in layers], wanted)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layers[0](x).dtype == torch.bfloat16
