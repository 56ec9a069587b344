"""What the chosen experts of few tokens make of them, in three steps, or by a product alone.

``route`` or ``route_in_groups`` chooses, ``open_experts`` is gate, up and activation,
``close_experts`` is down and the sum by the weights of the choice. The torch code here is the
definition; on CUDA each is one kernel of ``guided_spec.ops.linear.experts_triton``, which reads the
matrices of the chosen experts where they lie. For inference: they have no gradient.

Shazeer et al., "Outrageously large neural networks: the sparsely-gated mixture-of-experts layer"
(2017); Shazeer, "GLU variants improve transformer" (2020).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.errors import ConfigError
from guided_spec.ops.kernels import kernels_of
from guided_spec.ops.linear.fp8_linear import can_read_fp8

NO_ZERO = 1e-20  # added to sums that divide, as transformers does


class Routes(NamedTuple):
    """experts: int64 [N, K], the largest first, then one that all tokens take, if any.

    shares: float32 [N, K], the weights of them.
    """

    experts: Tensor
    shares: Tensor


class Projection(NamedTuple):
    """weight: [E, O, I], contiguous. bias: [E, O], or None.

    scales: of weights in fp8, float32 [E, ceil(O / block[0]), ceil(I / block[1])], the factors of
    blocks as ``Fp8Weight`` says; None for other weights.
    shared: [O, I], contiguous and in the form of the others: expert E, which lies elsewhere; None
    for none. shared_scales: its own. Not with biases.
    """

    weight: Tensor
    bias: Tensor | None
    scales: Tensor | None = None
    block: tuple[int, int] = (1, 1)
    shared: Tensor | None = None
    shared_scales: Tensor | None = None

    def of(self, experts: Tensor) -> Tensor:
        """float32 [..., O, I]: the matrices of these experts, integers [...]."""
        if self.shared is None:
            return self._of(self.weight, self.scales, experts)
        last = len(self.weight)
        found = self._of(self.weight, self.scales, experts.clamp_max(last - 1))
        scales = None if self.shared_scales is None else self.shared_scales[None]
        shared = self._of(self.shared[None], scales, torch.zeros_like(experts))
        return torch.where((experts == last)[..., None, None], shared, found)

    def _of(self, weight: Tensor, scales: Tensor | None, experts: Tensor) -> Tensor:
        if scales is None:
            return weight[experts].float()
        bytes_ = weight.view(torch.uint8)[experts]  # not every torch picks among fp8
        (rows, columns), (outputs, inputs) = self.block, weight.shape[1:]
        spread = scales[experts].repeat_interleave(rows, -2)[..., :outputs, :]
        spread = spread.repeat_interleave(columns, -1)[..., :inputs]
        return bytes_.view(weight.dtype).float() * spread


class Gating(NamedTuple):
    """How gate and up become one.

    is_interleaved: outputs 2i and 2i + 1 are gate and up i; else up is the second half.
    limit: None is silu(gate) * up. Else gate is at most ``limit``, up within it on both sides, and
        the result is gate * sigmoid(alpha * gate) * (up + 1), as of gpt-oss.
    """

    is_interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0


def route(logits: Tensor, count: int, *, is_normalized: bool, has_shared: bool = False) -> Routes:
    """Choose ``count`` experts for each token.

    logits: [N, E]. The shares are the softmax of the logits, in float32, over all experts; or, if
    is_normalized, over those that were chosen. Of equal logits any may be chosen.
    has_shared: logits are [N, E + 1], and K is count + 1: every token takes expert E after the
    others, by the sigmoid of its logit, as of Qwen3-Next.

    Raises ConfigError for a count of none, or more than there are.
    """
    num_experts = logits.shape[-1] - has_shared
    if not 1 <= count <= num_experts:
        raise ConfigError("count", count, f"must be 1 to {num_experts}, of the experts")
    if logits.is_cuda:
        choose = kernels_of(__name__).route
        routes: Routes = choose(logits, count, is_normalized=is_normalized, has_shared=has_shared)
        return routes
    wide = logits.float()
    found, experts = wide[..., :num_experts].topk(count, -1)
    total = (found if is_normalized else wide[..., :num_experts]).logsumexp(-1, keepdim=True)
    shares = (found - total).exp()
    if has_shared:
        experts = functional.pad(experts, (0, 1), value=num_experts)
        shares = torch.cat([shares, wide[..., num_experts:].sigmoid()], -1)
    return Routes(experts, shares)


class GroupedChoice(NamedTuple):
    """How experts are chosen by groups, as of DeepSeek-V2 and V3.

    top_k: experts of a token. groups: of equally many experts that follow one another. chosen:
        groups that experts may come from, those with the largest sums of their ``ranked_by`` best
        scores, 1 or 2.
    is_sigmoid: scores are sigmoids of the logits, else their softmax. bias: float32 [E], added to
        scores where experts are chosen, not to shares; None for none.
    is_normalized: whether shares are scores by their sum. factor: of all shares.
    has_shared: every token takes expert E after the others, with a share of 1.
    """

    top_k: int
    groups: int = 1
    chosen: int = 1
    ranked_by: int = 1
    is_sigmoid: bool = False
    bias: Tensor | None = None
    is_normalized: bool = False
    factor: float = 1.0
    has_shared: bool = False


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """float32 [N, E]: x [N, H] times the weight [E, H], of any floating dtypes, in float32.

    Rounded logits would choose other experts.
    """
    if x.is_cuda:
        logits: Tensor = kernels_of(__name__).router_logits(x, weight)
        return logits
    return functional.linear(x.float(), weight.float())


def route_in_groups(logits: Tensor, choice: GroupedChoice) -> Routes:
    """Choose ``choice.top_k`` experts for each token, from few groups of them.

    logits: [N, E]; scores and shares are float32. Of equal scores any may be chosen.

    Raises ConfigError for groups that do not divide the experts, or have too few of them.
    """
    size, rest = divmod(logits.shape[-1], choice.groups)
    most = size * choice.chosen
    if rest or choice.ranked_by > size or not 1 <= choice.chosen <= choice.groups:
        fix = f"must divide {logits.shape[-1]} experts, and be as many as are chosen of them"
        raise ConfigError("groups", choice.groups, fix)
    if not 1 <= choice.top_k <= most:
        raise ConfigError("top_k", choice.top_k, f"must be 1 to {most}, of the chosen groups")
    if logits.is_cuda:
        routes: Routes = kernels_of(__name__).route_in_groups(logits, choice)
        return routes
    wide = logits.float()
    scores = wide.sigmoid() if choice.is_sigmoid else wide.softmax(-1)
    ranked = scores if choice.bias is None else scores + choice.bias
    groups = ranked.unflatten(-1, (choice.groups, size))
    best = groups.topk(choice.ranked_by, -1).values.sum(-1).topk(choice.chosen, -1).indices
    is_open = torch.zeros_like(groups, dtype=torch.bool).scatter_(
        1, best.unsqueeze(-1).expand(-1, -1, size), value=True
    )
    experts = ranked.masked_fill(~is_open.flatten(1), -torch.inf).topk(choice.top_k, -1).indices
    shares = scores.gather(1, experts)
    if choice.is_normalized:
        shares = shares / (shares.sum(-1, keepdim=True) + NO_ZERO)
    shares = shares * choice.factor
    if choice.has_shared:
        experts = functional.pad(experts, (0, 1), value=logits.shape[-1])
        shares = functional.pad(shares, (0, 1), value=1.0)
    return Routes(experts, shares)


def open_experts(x: Tensor, experts: Tensor, opening: Projection, gating: Gating) -> Tensor:
    """[N, K, O / 2]: gate and up of each token's experts, made one.

    x: [N, I]. experts: int64 [N, K]. opening: [E, O, I]. Sums in float32, rounded once, after the
    activation.

    Raises ConfigError for shapes that do not fit.
    """
    _check(x, experts, opening.weight)
    if x.is_cuda and _has_kernel(opening, 2):
        opened: Tensor = kernels_of(__name__).open_experts(x, experts, opening, gating)
        return opened
    both = torch.einsum("nkoi,ni->nko", opening.of(experts), x.float())
    if opening.bias is not None:
        both = both + opening.bias[experts].float()
    if gating.is_interleaved:
        gate, up = both[..., ::2], both[..., 1::2]
    else:
        gate, up = both.chunk(2, -1)
    if gating.limit is None:
        return (functional.silu(gate) * up).to(x.dtype)
    gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return (gate * torch.sigmoid(gating.alpha * gate) * (up + 1)).to(x.dtype)


def close_experts(opened: Tensor, routes: Routes, closing: Projection) -> Tensor:
    """[N, O]: the sum over K of each expert's product, times its share.

    opened: [N, K, I]. closing: [E, O, I]. Sums in float32, rounded once.

    Raises ConfigError for shapes that do not fit.
    """
    _check(opened, routes.experts, closing.weight)
    if opened.is_cuda and _has_kernel(closing, 1):
        closed: Tensor = kernels_of(__name__).close_experts(opened, routes, closing)
        return closed
    found = torch.einsum("nkoi,nki->nko", closing.of(routes.experts), opened.float())
    if closing.bias is not None:
        found = found + closing.bias[routes.experts].float()
    return torch.einsum("nko,nk->no", found, routes.shares).to(opened.dtype)


def are_served(opening: Projection, closing: Projection) -> bool:
    """Whether kernels read these matrices, on the device where they are."""
    return opening.weight.is_cuda and _has_kernel(opening, 2) and _has_kernel(closing, 1)


def _has_kernel(projection: Projection, parts: int) -> bool:
    if projection.scales is not None and not can_read_fp8(projection.weight.get_device()):
        return False
    return bool(kernels_of(__name__).serves(projection, parts))


def _check(x: Tensor, experts: Tensor, weight: Tensor) -> None:
    if x.shape[-1] != weight.shape[2]:
        raise ConfigError("x", tuple(x.shape), f"must be [..., {weight.shape[2]}], as weight is")
    if experts.dim() != 2 or len(experts) != len(x):
        raise ConfigError("experts", tuple(experts.shape), f"must be [{len(x)}, K]")
    if not weight.is_contiguous():
        raise ConfigError("weight", weight.stride(), "must be contiguous: turn it")


def expert_linear(x: Tensor, experts: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[S, O]: row s of the result is weight[experts[s]] times its row of x, plus the bias.

    x: [N, I], of which each row serves S / N consecutive pairs. experts: integers [S] in
    [0, E). weight: [E, O, I] with any strides, bias: [E, O], of the dtype of ``x``; all on one
    device. Sums in float32, rounded once. Never waits for the device.

    torch's grouped product sorts its rows by experts and takes three times what reading the weights
    takes where each expert has a row or two.

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
