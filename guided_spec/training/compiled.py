"""What of a training is compiled where it runs on CUDA: passes that memory bounds, not products.

One kernel reads a row once or twice, and what was between its passes is not written. Everything
runs as well without; on a CPU it does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from guided_spec.models.heads.eagle import PARTS

NORMS = tuple(parts.norm for parts in PARTS.values())
MLPS = tuple(parts.mlp for parts in PARTS.values())
Returned = TypeVar("Returned")


def compiled_on_cuda(run: Callable[..., Returned]) -> Callable[..., Returned]:
    """``run``, compiled for calls whose first argument, a tensor [..., D], is on CUDA.

    Tensors of one row of D and of none would compile anew, and are left out.
    """
    compiled: list[Callable[..., Returned]] = []

    @wraps(run)
    def call(first: Tensor, *others: Any, **named: Any) -> Returned:
        if not first.is_cuda or first.numel() <= first.shape[-1]:
            return run(first, *others, **named)
        if not compiled:  # not on import, which it would slow down
            compiled.append(torch.compile(run, dynamic=True))
        return compiled[0](first, *others, **named)

    return call


def compile_layers(model: nn.Module) -> None:
    """In place, what is between the products of heads that are on CUDA: norms, and MLPs' gates.

    Norms return the dtype of autocast. Products are what reads them, and would each make that of
    float32 anew.
    """
    for kinds, run in ((NORMS, _run_norm), (MLPS, _run_mlp)):
        for module in model.modules():
            if isinstance(module, kinds) and next(module.parameters()).is_cuda:
                vars(module).update(forward=partial(run, module))


def _run_norm(norm: Any, x: Tensor) -> Tensor:
    return _normed(x.flatten(0, -2), norm.weight, norm.variance_epsilon).view_as(x)


@compiled_on_cuda
def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    kind, wide = x.device.type, x.float()
    wide = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    scaled = weight * wide.to(x.dtype)
    if torch.is_autocast_enabled(kind):
        return scaled.to(torch.get_autocast_dtype(kind))
    return scaled


def _run_mlp(mlp: Any, x: Tensor) -> Tensor:
    rows = x.flatten(0, -2)
    gated = _gate(mlp.gate_proj(rows), mlp.up_proj(rows), mlp.act_fn)
    output: Tensor = mlp.down_proj(gated).view_as(x)
    return output


@compiled_on_cuda
def _gate(gate: Tensor, up: Tensor, activate: Callable[[Tensor], Tensor]) -> Tensor:
    return activate(gate) * up
