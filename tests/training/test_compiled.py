"""What is compiled on CUDA can be compiled whole, and computes the same."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from guided_spec.training import compiled, objective, target_rows
from guided_spec.training.objective import Objective
from guided_spec.training.target_rows import TargetScores

V, D, N, M, H = 64, 32, 5, 9, 8
WHOLE: Any = {"dynamic": True, "fullgraph": True, "backend": "aot_eager"}
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


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch looks at that of its inputs
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
