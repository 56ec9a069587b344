"""The product of each row with the matrix of its own expert, for few rows.

torch's grouped product sorts its rows by experts and takes three times what reading the weights
takes where each expert has a row or two. There a row and a slice of its matrix are enough work for
a program. The torch code here is the definition; on CUDA, one kernel of
``guided_spec.ops.linear.expert_linear_triton`` runs. For inference: it has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from guided_spec.errors import ConfigError
from guided_spec.ops.kernels import kernels_of

__all__ = ["expert_linear"]


def expert_linear(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[S, O]: row s of the result is weight[experts[s]] times its row of x, plus the bias.

    x: [N, I], of which each row serves S / N pairs behind one another. experts: integers [S] in
    [0, E). weight: [E, O, I] with any strides, bias: [E, O], of the dtype of ``x``; all on one
    device. Sums in float32, rounded once. Never waits for the device.

    Raises ConfigError for shapes that do not fit.
    """
    count, pairs = len(x), len(experts)
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        raise ConfigError("x", tuple(x.shape), f"must be [N, {weight.shape[-1]}], as weight is")
    if count == 0 or pairs % count != 0:
        raise ConfigError("experts", pairs, f"must be a multiple of the {count} rows of x")
    if x.is_cuda:
        found: Tensor = kernels_of(__name__).expert_linear(x, experts, weight, bias)
        return found
    rows = x.repeat_interleave(pairs // count, 0).float().unsqueeze(-1)
    product = torch.bmm(weight[experts].float(), rows).squeeze(-1)
    if bias is not None:
        product = product + bias[experts].float()
    return product.to(x.dtype)
