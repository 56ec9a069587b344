"""A linear layer, which is laid out for reading its weight where few tokens wait for that.

The torch code here is the definition; on CUDA the kernels of
``guided_spec.ops.linear.linear_triton`` take up to ``MOST_TOKENS`` tokens, and a library the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.ops.kernels import has_triton, kernels_of

MOST_TOKENS = 16  # above which a library is as fast
FEWEST_OUTPUTS = 1024  # of several tokens: there are too few tiles below
DTYPES = (torch.bfloat16, torch.float16)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., O]: x [..., I] times the weight [O, I], plus the bias [O].

    All of one floating dtype, that of the result, and on one device. Sums in float32 where a
    kernel makes it, which has no gradient: with gradients on, torch does.
    """
    if _is_served(x, weight):
        found: Tensor = kernels_of(__name__).linear(x, weight, bias)
        return found
    return functional.linear(x, weight, bias)


def _is_served(x: Tensor, weight: Tensor) -> bool:
    if not x.is_cuda or torch.is_grad_enabled() or torch.is_autocast_enabled("cuda"):
        return False
    count = x.numel() // max(x.shape[-1], 1)
    is_one_kind = x.dtype == weight.dtype and x.dtype in DTYPES and x.device == weight.device
    if not 0 < count <= MOST_TOKENS or not is_one_kind or not weight.is_contiguous():
        return False
    if count == 1 or not has_triton():
        return has_triton()
    return len(weight) >= FEWEST_OUTPUTS and bool(kernels_of(__name__).has_capacity(x.get_device()))
