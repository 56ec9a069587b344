"""LiLiCorr: the candidates of all positions of a block score each other before one is drafted.

arXiv:2608.20530; the equations are those of TensorRT-LLM's ``modeling_lilicorr``, which agree with
ModelOpt's. Of the k likeliest tokens of each position, with p their probabilities, best first:

    x = token_proj(embedding) + pass_hidden_proj(output)
        + feature_mlp(feature_norm([log p, p, log p - max log p, rank, is first]))
        + slot_embedding + rank_embedding
    x = layers(x)            attention over all candidates, biased by how far their positions are
    a = anchor_norm(context_proj(features of the last verified position))
    f = silu(factor_input_proj([x ; a ; x * a]))
    score(first) = c * normed(anchor_out_head(a)) . normed(in_head(f))
    score(next after previous) = c * normed(out_head(f of previous)) . normed(in_head(f of next))

and no other token is drafted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from guided_spec.models.heads.block.transitions import BlockPosition, likeliest

NUM_FEATURES = 5
# As others write the modules, in their order: a sequence's places become names.
RENAMED = (
    ("feature_mlp.0.", "feature_norm."),
    ("feature_mlp.1.", "feature_mlp.up_proj."),
    ("feature_mlp.3.", "feature_mlp.down_proj."),
    (".mlp.0.", ".mlp.up_proj."),
    (".mlp.2.", ".mlp.down_proj."),
)


class LatticeShape(NamedTuple):
    """The sizes of the part, by their names in ``dflash_config`` without ``lilicorr_``."""

    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_ratio: float
    candidate_topk: int
    factor_dim: int
    vector_eps: float
    logit_scale: float


class HeadEnds(NamedTuple):
    """Of the head that the lattice belongs to.

    embed: token ids int64 [...] to [..., H]. features: the target's states [..., X] to [..., H].
    """

    embed: Callable[[Tensor], Tensor]
    features: Callable[[Tensor], Tensor]


class _Mlp(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(inputs, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(functional.silu(self.up_proj(x)))
        return found


class _Attention(nn.Module):
    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * size))
        self.out_proj = nn.Linear(size, size)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """[R, N, S] to such; bias: [1, heads, N, N]."""
        joined = functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        parts = joined.unflatten(-1, (3, self._num_heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        found = functional.scaled_dot_product_attention(query, key, value, bias)
        attended: Tensor = self.out_proj(found.transpose(1, 2).flatten(2))
        return attended


class _Layer(nn.Module):
    def __init__(self, shape: LatticeShape, eps: float) -> None:
        super().__init__()
        size = shape.hidden_size
        self.attn_norm, self.mlp_norm = Qwen3RMSNorm(size, eps), Qwen3RMSNorm(size, eps)
        self.attn = _Attention(size, shape.num_heads)
        self.mlp = _Mlp(size, int(size * shape.mlp_ratio), size)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        found: Tensor = x + self.mlp(self.mlp_norm(x))
        return found


class Lattice(NamedTuple):
    """C candidates of each of a block's W positions.

    ids: int64 [R, W, C]. scores: float32 [R, W, C, C], of a position's candidates after each of the
    position before; those of the first position are the same after all.
    """

    ids: Tensor
    scores: Tensor

    def packed(self) -> Tensor:
        """Float32 [R, L]: all of it; ids stay exact."""
        return torch.cat([part.float().flatten(1) for part in self], 1)

    @classmethod
    def unpacked(cls, packed: Tensor, count: int) -> Lattice:
        """The inverse, of ``count`` candidates a position."""
        width = packed.shape[1] // (count + count * count)
        ids, scores = packed.tensor_split([width * count], 1)
        shape = (width, count, count)
        return cls(ids.long().unflatten(1, shape[:2]), scores.unflatten(1, shape))


class CandidateLattice(nn.Module):
    """A ``Transition``, and the ``BlockPlanner`` of its blocks.

    block_size: positions of a block, the last token's among them. hidden_size: H, of the head.
    """

    state_size = 0

    def __init__(
        self, shape: LatticeShape, block_size: int, hidden_size: int, eps: float, ends: HeadEnds
    ) -> None:
        super().__init__()
        size, count = shape.hidden_size, shape.candidate_topk
        self._shape, self._count = shape, count
        self._block_size, self._ends = block_size, ends
        self.token_proj: nn.Module = nn.Identity()
        if size != hidden_size:
            self.token_proj = nn.Linear(hidden_size, size)
        self.pass_hidden_proj = nn.Linear(hidden_size, size)
        self.feature_norm = nn.LayerNorm(NUM_FEATURES)
        self.feature_mlp = _Mlp(NUM_FEATURES, size, size)
        self.slot_embedding = nn.Parameter(torch.empty(1, block_size - 1, 1, size))
        self.rank_embedding = nn.Parameter(torch.empty(1, 1, count, size))
        self.relative_slot_bias = nn.Parameter(torch.empty(shape.num_heads, 2 * block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.empty(shape.num_heads))
        self.context_proj = nn.Linear(hidden_size, size)
        self.layers = nn.ModuleList(_Layer(shape, eps) for _ in range(shape.num_layers))
        self.output_norm, self.anchor_norm = Qwen3RMSNorm(size, eps), Qwen3RMSNorm(size, eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head, self.anchor_out_head = (
            nn.Linear(size, shape.factor_dim) for _ in range(3)
        )

    def plan_size(self, width: int) -> int:
        """L, of ``width`` positions."""
        return width * self._count * (1 + self._count)

    def anchors(self, states: Tensor) -> Tensor:
        """The target's states [R, X] at the last verified positions to [R, H]."""
        return self._ends.features(states)

    def plan(self, logits: Tensor, outputs: Tensor, anchors: Tensor) -> Tensor:
        """Float32 [R, L], for ``BlockPosition.plan``.

        logits: [R, W, D], of each position by itself. outputs: [R, W, H]. anchors: [R, H].
        """
        values, ids = likeliest(logits.float(), self._count)
        values = values - logits.float().logsumexp(-1, keepdim=True)
        kind = self.context_proj.weight.dtype
        x = self._mixed(ids, values, outputs.to(kind))
        anchor = self.anchor_norm(self.context_proj(anchors.to(kind)))
        same = anchor[:, None, None].expand_as(x)
        factors = functional.silu(self.factor_input_proj(torch.cat([x, same, x * same], -1)))
        leaving = self._unit(self.out_head(factors[:, :-1]))
        entering = self._unit(self.in_head(factors))
        start = self._unit(self.anchor_out_head(anchor))[:, None].expand(-1, self._count, -1)
        leaving = torch.cat([start.unsqueeze(1), leaving], 1)
        scores = (leaving @ entering.transpose(-1, -2)).float() * self._shape.logit_scale
        return Lattice(ids, scores).packed()

    def advance(self, state: Tensor, hidden: Tensor, previous: Tensor) -> Tensor:
        """Nothing; see ``Transition``."""
        del hidden, previous
        return state

    def step(self, logits: Tensor, position: BlockPosition) -> Tensor:
        """Logits [R, D] to float32 [R, D]: -inf for all but the candidates.

        After a token that was none of its position's candidates the logits stay.
        """
        assert position.plan is not None
        lattice, depth = Lattice.unpacked(position.plan, self._count), position.depth
        row, is_first = torch.arange(len(depth), device=depth.device), depth == 0
        ids = lattice.ids[row, (depth - 1).clamp_min(0)]
        is_previous = (ids == position.previous.unsqueeze(1)) | is_first.unsqueeze(1)
        scores = lattice.scores[row, depth, is_previous.int().argmax(1)]
        kept = torch.full_like(logits, -torch.inf, dtype=torch.float32)
        kept.scatter_(1, lattice.ids[row, depth], scores)
        return kept.where(is_previous.any(1, keepdim=True), logits.float())

    def _mixed(self, ids: Tensor, log_probs: Tensor, outputs: Tensor) -> Tensor:
        """What attention makes of the candidates [R, W, C]: [R, W, C, S]. outputs: [R, W, H]."""
        width = ids.shape[1]
        embedded = self._ends.embed(ids).to(outputs.dtype)
        x = self.token_proj(embedded) + self.pass_hidden_proj(outputs).unsqueeze(2)
        features = self.feature_norm(_features(log_probs).to(outputs.dtype))
        x = x + self.feature_mlp(features) + self.slot_embedding[:, :width] + self.rank_embedding
        at = torch.arange(width, device=ids.device).repeat_interleave(self._count)
        relative = at.unsqueeze(1) - at
        bias = self.relative_slot_bias[:, relative + self._block_size - 1]
        bias = bias + self.same_slot_bias[:, None, None] * (relative == 0)
        x = x.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, bias.to(x.dtype).unsqueeze(0))
        found: Tensor = self.output_norm(x).unflatten(1, (width, self._count))
        return found

    def _unit(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1, eps=self._shape.vector_eps)


def _features(log_probs: Tensor) -> Tensor:
    """[..., C, 5] of candidates [..., C], the best first."""
    count = log_probs.shape[-1]
    ranks = torch.arange(count, device=log_probs.device)
    rank = (ranks / max(count - 1, 1)).expand_as(log_probs)
    is_first = (ranks == 0).float().expand_as(log_probs)
    return torch.stack(
        [log_probs, log_probs.exp(), log_probs - log_probs[..., :1], rank, is_first], -1
    )
