"""Kernels that begin while the one before them ends (programmatic dependent launch).

A kernel launched so is set up while its predecessor runs; it says that its own successor may be
set up, and waits until all before it is done and seen. Every kernel that is launched so must wait:
then whoever waits for one has waited for all before it. (CUDA C++ programming guide, "Programmatic
dependent launch and synchronization".)
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["await_previous", "dependent_launch"]

FIRST_CAPABILITY = (9, 0)


def dependent_launch(tensor: Tensor) -> dict[str, Any]:
    """The options of a launch whose kernel begins with ``await_previous``.

    tensor: any of its arguments.
    """
    if tensor.is_cuda and _is_served(tensor.get_device()):
        return {"IS_DEPENDENT": True, "launch_pdl": True}
    return {"IS_DEPENDENT": False}


@cache
def _is_served(device: int) -> bool:
    is_nvidia = torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


@triton.jit  # type: ignore[untyped-decorator]
def await_previous(IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel be set up, and wait for those before this one."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
