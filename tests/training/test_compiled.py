"""What is compiled on CUDA can be compiled whole, and computes the same."""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from guided_spec.training import compiled, objective, rows, target_rows, unroll_attention
from guided_spec.training.objective import Objective
from guided_spec.training.target_rows import TargetScores
from tests.training.compiled_whole import LOOKS, compiled_whole

V, D, N, M = 64, 32, 5, 9


def test_scores() -> None:
    dice = torch.Generator().manual_seed(2)
    words = torch.randint(-(2**31), 2**31, (N, 3), generator=dice, dtype=torch.int32)
    masks = words.tensor_split([2], 1)
    given = (torch.randn(N, V, generator=dice).bfloat16(), torch.arange(0, V, 2)[None], *masks)
    token, at = torch.arange(N), torch.arange(M) // 2
    draft = torch.randn(M, D, generator=dice).bfloat16().requires_grad_()
    aim = Objective.parse(steps=1, decay=1.0, loss="kl=0.9,total_variation=0.1", masked=True)
    found: list[Any] = []
    for run in (inspect.unwrap, compiled_whole):
        read: Any = run(target_rows._read)
        goal = TargetScores._make([*read(*given), token])
        parts = run(objective._compare)(draft, goal, at, aim, doubts=True)
        found.append([*goal, *parts, *torch.autograd.grad(parts.losses.sum(), draft)])
    torch.testing.assert_close(*found)


def test_widths_are_compiled_in_and_rows_are_not() -> None:
    kept: list[Any] = []

    def keep(graph: Any, given: Any) -> Any:
        kept.append([part.shape for part in given if isinstance(part, Tensor)])
        return graph

    def add(parts: Any) -> Any:
        return parts[0] + parts[1]

    run: Any = torch.compile(add, dynamic=True, backend=keep)
    for sizes in [(2, 4, 3, 8), (5, 4, 6, 8), (3, 4, 7), (2, 4, 7), (3, 9), (6, 9)]:
        parts = [torch.ones(sizes), torch.ones(1, *sizes[1:])]
        compiled._fix_widths([parts])
        run(parts)
    assert [[shapes[0][1], shapes[0][-1]] for shapes in kept] == [[4, 8], [4, 7], [9, 9]]


def test_every_depth_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would leave those beyond its limit as they are."""
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))

    def add_all(states: Tensor) -> Tensor:
        return torch.stack(list(states.unbind(0))).sum(0)

    with torch._dynamo.config.patch(recompile_limit=8):
        run = compiled.compile_kinds(add_all)
        for depths in range(2, 15):
            assert run(torch.ones(depths, 3)).tolist() == [depths] * 3
    assert counter.frame_count == 13


@LOOKS
@pytest.mark.parametrize("at", [[3, 0, 4], [2], []])
def test_rows(monkeypatch: pytest.MonkeyPatch, at: list[int]) -> None:
    states, picked = torch.randn(N, D, requires_grad=True), torch.tensor(at, dtype=torch.int64)
    weights = torch.randn(len(at), D)
    found: list[Any] = []
    for pick in (Tensor.index_select, lambda states, _, at: rows.pick_rows(states, at)):
        output = pick(states, 0, picked)
        found.append([output, *torch.autograd.grad((output * weights).sum(), states)])
    monkeypatch.setattr(rows, "_put_back", compiled_whole(rows._put_back))
    output = rows.pick_rows(states, picked)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    torch.testing.assert_close(
        [output, *torch.autograd.grad((output * weights).sum(), states)], found[0], rtol=0, atol=0
    )


@pytest.mark.slow
@pytest.mark.parametrize("repeats", [1, 2])
def test_attention_of_an_unroll(monkeypatch: pytest.MonkeyPatch, repeats: int) -> None:
    dice = torch.Generator().manual_seed(3)
    sizes = [(4, 5), *[(2, 5 + 5 * repeats)] * 2]
    given = [torch.randn(2, *size, 8, generator=dice, requires_grad=True) for size in sizes]
    weights = torch.linspace(-1, 1, 5 * 4 * 8).view(5, 4, 8).transpose(0, 1)
    found: list[Any] = []
    for run in (inspect.unwrap, compiled_whole):
        for name in ("_mixed", "_mixed_backward"):
            monkeypatch.setattr(unroll_attention, name, run(vars(unroll_attention)[name]))
        output = unroll_attention.unrolled_attention(*given, scale=0.3)
        assert output.transpose(1, 2).is_contiguous()
        found.append([output, *torch.autograd.grad((output * weights).sum(), given)])
    torch.testing.assert_close(*found)
