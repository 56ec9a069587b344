"""Which attention kernels serve batches whose shape changes from call to call."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["shape_free_kernels"]

KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def shape_free_kernels() -> AbstractContextManager[None]:
    """Without cuDNN's attention, which builds a plan for every new shape.

    That takes some 25 ms for each forward and backward call on one H200 (torch 2.11), a hundred
    times what the attention itself takes, and here nearly every shape is new.
    """
    context: AbstractContextManager[None] = sdpa_kernel(KERNELS)
    return context
