"""What of a training is compiled where it runs on CUDA: passes that memory bounds, not products.

One kernel reads a row once or twice, and what was between its passes is not written. Everything
runs as well without; on a CPU it does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor

Returned = TypeVar("Returned")

# Each depth of an unroll is compiled by itself, and once more for batches of one. Beyond torch's
# own limit, which is 8, the others would run as they are.
MOST_KINDS = 64


def compiled_on_cuda(run: Callable[..., Returned]) -> Callable[..., Returned]:
    """``run``, compiled for calls whose first argument, a tensor [..., D], is on CUDA.

    Tensors are [n], [n, D], [n, heads, D] or [B, heads, ..., T, D]. Widths and heads are those of
    a model and compiled in, since kernels divide by them for each number that they read; n, B and T
    are not.
    Tensors of one row of D and of none would compile anew, and are left out.
    """
    compiled: list[Callable[..., Returned]] = []

    @wraps(run)
    def call(first: Tensor, *others: Any, **named: Any) -> Returned:
        if not first.is_cuda or first.numel() <= first.shape[-1]:
            return run(first, *others, **named)
        if not compiled:  # not on import, which it would slow down
            compiled.append(compile_kinds(run))
        _fix_widths((first, *others))
        return compiled[0](first, *others, **named)

    return call


def compile_kinds(run: Callable[..., Returned]) -> Callable[..., Returned]:
    """``run``, compiled for as many kinds of arguments as an unroll has; lengths are no kind."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_KINDS)
    return torch.compile(run, dynamic=True)


def _fix_widths(arguments: Iterable[Any]) -> None:
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.dim() >= 2:
            torch._dynamo.mark_static(argument, argument.dim() - 1)
            if argument.dim() >= 3:
                torch._dynamo.mark_static(argument, 1)
        elif isinstance(argument, list | tuple):
            _fix_widths(argument)
