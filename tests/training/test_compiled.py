"""What is compiled on CUDA can be compiled whole, and computes the same."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from guided_spec.training import compiled, objective, target_rows, unroll_attention
from guided_spec.training.objective import Objective
from guided_spec.training.target_rows import TargetScores

V, D, N, M, H = 64, 32, 5, 9, 8
WHOLE: Any = {"dynamic": True, "fullgraph": True, "backend": "aot_eager"}
LOOKS = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch, at that of its inputs
CONFIG = LlamaConfig(hidden_size=H, intermediate_size=12, num_attention_heads=2)


def test_scores() -> None:
    dice = torch.Generator().manual_seed(2)
    words = torch.randint(-(2**31), 2**31, (N, 3), generator=dice, dtype=torch.int32)
    masks = words.tensor_split([2], 1)
    given = (torch.randn(N, V, generator=dice).bfloat16(), torch.arange(0, V, 2), *masks)
    token, at = torch.arange(N), torch.arange(M) // 2
    draft = torch.randn(M, D, generator=dice).bfloat16().requires_grad_()
    aim = Objective.parse(steps=1, decay=1.0, loss="kl=0.9,total_variation=0.1", masked=True)
    found: list[Any] = []
    for run in (inspect.unwrap, _whole):
        read: Any = run(target_rows._read)
        goal = TargetScores._make([*read(*given), token])
        parts = run(objective._compare)(draft, goal, at, aim, doubts=True)
        found.append([*goal, *parts, *torch.autograd.grad(parts.losses.sum(), draft)])
    torch.testing.assert_close(*found)


def _whole(run: Any) -> Any:
    return torch.compile(inspect.unwrap(run), **WHOLE)


@LOOKS
def test_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    mlp, norm, x = LlamaMLP(CONFIG), LlamaRMSNorm(H), torch.randn(2, 3, H)
    for run in (inspect.unwrap, _whole):
        for name in ("_gate", "_normed"):
            monkeypatch.setattr(compiled, name, run(vars(compiled)[name]))
        torch.testing.assert_close(compiled._run_mlp(mlp, x), mlp(x))
        torch.testing.assert_close(compiled._run_norm(norm, x), norm(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = compiled._run_norm(norm, x)
        torch.testing.assert_close(found, norm(x).bfloat16())


@LOOKS
@pytest.mark.parametrize("repeats", [0, 1, 2])
def test_attention_of_an_unroll(monkeypatch: pytest.MonkeyPatch, repeats: int) -> None:
    dice = torch.Generator().manual_seed(3)
    sizes = [(4, 5), *[(2, 5 + 5 * repeats)] * 2]
    given = [torch.randn(2, *size, 8, generator=dice, requires_grad=True) for size in sizes]
    weights = torch.linspace(-1, 1, 5 * 4 * 8).view(5, 4, 8).transpose(0, 1)
    found: list[Any] = []
    for run in (inspect.unwrap, _whole):
        for name in ("_mixed", "_mixed_backward"):
            monkeypatch.setattr(unroll_attention, name, run(vars(unroll_attention)[name]))
        output = unroll_attention.unrolled_attention(*given, scale=0.3)
        assert output.transpose(1, 2).is_contiguous()
        found.append([output, *torch.autograd.grad((output * weights).sum(), given)])
    torch.testing.assert_close(*found)


@pytest.mark.gpu
def test_on_cuda() -> None:
    """Norms and MLPs of a head are what is compiled, in place; on a CPU nothing is."""
    layers = torch.nn.ModuleList([LlamaRMSNorm(H), LlamaMLP(CONFIG)]).cuda()
    x = torch.randn(2, 3, H, device="cuda")
    wanted = [layer(x) for layer in layers]
    compiled.compile_layers(layers)
    torch.testing.assert_close([layer(x) for layer in layers], wanted)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layers[0](x).dtype == torch.bfloat16
