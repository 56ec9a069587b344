"""A block head: one forward drafts a whole block, whose positions see one another.

Chen, Liang and Liu, "DFlash: Block Diffusion for Flash Speculative Decoding", 2026. With the
outputs of some of the target's layers at each position before the last token, and the embeddings of
the block [last token, mask, mask, ...]:

    c = hidden_norm(fc([outputs]))                                 ``features``
    k, v = k_proj(c), v_proj(c)                                    ``context``, of each layer
    n = input_layernorm(x)
    x = x + attention(q(n), [k of c ; k(n)], [v of c ; v(n)])      sees the context and the block
    x = x + mlp(post_attention_layernorm(x))                       ``forward``
    logits = lm_head(norm(x))                                      ``logits``

Queries and keys are normed and rotated as Qwen3's are. The output at a mask predicts the token of
that position, or the next one (``BlockLayout.from_anchor``). DSpark, DFlash 2, Domino and LiLiCorr
are such heads with a ``transition``; JetSpec's are causal. Around attention and MLP, DFlash 2 has a
convolution over the block, whose kernel is made from what goes in, n, in groups of channels:

    d = kernel_projection(n), [side, tap, group]
    mix(y, side)_i = sum over taps t of (base_kernel[side, t] + d_i[side, t]) * y_(i - t)
    x = x + mix(attention(mix(n, 0)), 1)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from guided_spec.models.heads.block.lattice import RENAMED, CandidateLattice, HeadEnds
from guided_spec.models.heads.block.layout import BlockLayout, ConvShape
from guided_spec.models.heads.block.transitions import (
    BlockPlanner,
    CandidateSelector,
    ConfidenceHead,
    MarkovHead,
    PrefixHead,
    RecurrentMarkovHead,
    Transition,
)
from guided_spec.models.heads.draft_head import LayoutHead, layer_run, product_input
from guided_spec.ops.attention.slot_attention import KeyValues, Window

PREFIX_PARTS = ("prefix_gru.", "embed_proj.")
LATTICE = "lilicorr."


class BlockContext(NamedTuple):
    """What the positions of a block see of the text before it.

    layers: keys and values [R, Hkv, L, D] of each layer, rotated. lengths: int64 [R], how many of
    the L positions are the row's; the block begins after them. Others hold zeros.
    """

    layers: Sequence[KeyValues]
    lengths: Tensor


class _Conv(nn.Module):
    """A convolution before and after a part of a layer; see the module's docstring."""

    def __init__(self, shape: ConvShape, hidden_size: int) -> None:
        super().__init__()
        self._taps, self._groups = shape.taps, hidden_size // shape.group_size
        self.base_kernel = nn.Parameter(torch.empty(2, shape.taps, hidden_size))
        outputs = 2 * shape.taps * self._groups
        self.kernel_projection = nn.Linear(hidden_size, outputs, bias=False)

    def around(self, part: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """``part`` of x [R, T, H], mixed over T before and after it."""
        shape = (*x.shape[:2], 2, self._taps, self._groups)
        moved = self.kernel_projection(x).view(shape)
        kernels = self.base_kernel + moved.repeat_interleave(x.shape[2] // self._groups, -1)
        before, after = kernels.unbind(2)  # [R, T, taps, H]
        return _mix(part(_mix(x, before)), after)


def _mix(x: Tensor, kernel: Tensor) -> Tensor:
    """Each position of x [R, T, H] as a sum over it and those before, kernel [R, T, taps, H]."""
    mixed = x * kernel[:, :, 0]
    for tap in range(1, min(kernel.shape[2], x.shape[1])):
        shifted = functional.pad(x[:, :-tap], (0, 0, tap, 0))
        mixed = mixed + shifted * kernel[:, :, tap]
    return mixed


class Sight(NamedTuple):
    """What of a block a query sees: all, or what is before it; and how far to either side."""

    is_causal: bool
    window: Window | None


class _Layer(nn.Module):
    """A decoder layer of Qwen3 over a block and its context."""

    def __init__(self, layout: BlockLayout, index: int) -> None:
        super().__init__()
        config = layout.config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = qwen3.Qwen3Attention(config, index)
        self.mlp = qwen3.Qwen3MLP(config)
        self.input_layernorm = qwen3.Qwen3RMSNorm(size, eps)
        self.post_attention_layernorm = qwen3.Qwen3RMSNorm(size, eps)
        self.index = index
        is_sliding = config.layer_types[index] == "sliding_attention"
        self.sight = Sight(
            is_causal=is_sliding if layout.is_causal is None else layout.is_causal,
            window=Window(config.sliding_window) if is_sliding and config.sliding_window else None,
        )
        self.attention_conv: _Conv | None = None
        self.mlp_conv: _Conv | None = None
        if layout.conv is not None:
            self.attention_conv, self.mlp_conv = (_Conv(layout.conv, size) for _ in range(2))

    def keys_values(self, states: Tensor, rotation: tuple[Tensor, Tensor]) -> KeyValues:
        """[..., T, H] and rotations [..., T, D] to [..., T, Hkv, D] each."""
        attention = self.self_attn
        shape = (*states.shape[:-1], -1, attention.head_dim)
        keys = attention.k_norm(attention.k_proj(states).view(shape))
        return KeyValues(_rotate(keys, rotation), attention.v_proj(states).view(shape))

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], context: Context, visible: Tensor
    ) -> Tensor:
        """[R, T, H] to such; visible: bool [R, 1, T, L + T]."""
        before = context(self)

        def attend(fed: Tensor) -> Tensor:
            return self._attend(fed, rotation, before, visible)

        normed = self.input_layernorm(x)
        conv = self.attention_conv
        x = x + (attend(normed) if conv is None else conv.around(attend, normed))
        normed, conv = self.post_attention_layernorm(x), self.mlp_conv
        output: Tensor = x + (self.mlp(normed) if conv is None else conv.around(self.mlp, normed))
        return output

    def _attend(
        self, fed: Tensor, rotation: tuple[Tensor, Tensor], context: KeyValues, visible: Tensor
    ) -> Tensor:
        attention = self.self_attn
        shape = (*fed.shape[:-1], -1, attention.head_dim)
        query = _rotate(attention.q_norm(attention.q_proj(fed).view(shape)), rotation)
        own = self.keys_values(fed, rotation)
        keys, values = (
            torch.cat([before, block.transpose(1, 2)], 2)
            for before, block in zip(context, own, strict=True)
        )
        found = _grouped_attention(query.transpose(1, 2), keys, values, visible, attention.scaling)
        output: Tensor = attention.o_proj(found.transpose(1, 2).flatten(2))
        return output


def _grouped_attention(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float
) -> Tensor:
    """[R, Hq, T, D], over [R, Hkv, S, D]; visible: bool [R, 1, T, S].

    Heads that share keys are more queries of one head: so the kernels that need no memory for the
    scores take it, which under a mask take no groups of heads.
    """
    count, (heads, length) = keys.shape[1], query.shape[1:3]
    folded = query.unflatten(1, (count, -1)).flatten(2, 3)
    mask = visible.repeat(1, 1, heads // count, 1)
    found = functional.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    spread: Tensor = found.unflatten(2, (-1, length)).flatten(1, 2)
    return spread


# The keys and values of the text before, as of ``BlockContext``. A layer asks for its own, because
# they are made with its weights, which are there only while it runs where a run shards them.
Context = Callable[[_Layer], KeyValues]


class BlockIndex(NamedTuple):
    """Where T positions of blocks are in each of R texts. position, start: int64 [R, T], their own
    and that of their block's first. block: int64 [T], which of them make a block."""

    position: Tensor
    start: Tensor
    block: Tensor

    @classmethod
    def of(cls, starts: Tensor, count: int) -> BlockIndex:
        """Blocks of ``count`` positions from ``starts`` int64 [R, A] on; T = A * count."""
        steps = torch.arange(count, device=starts.device)
        position = (starts.unsqueeze(2) + steps).flatten(1)
        block = torch.arange(starts.shape[1], device=starts.device).repeat_interleave(count)
        return cls(position, starts.repeat_interleave(count, 1), block)

    def visible(self, sight: Sight, length: int) -> Tensor:
        """Bool [R, 1, T, length + T]: the text before the block, and the block."""
        asking = self.position.unsqueeze(2)
        held = torch.arange(length, device=asking.device)
        before = held < self.start.unsqueeze(2)
        own = self.block.unsqueeze(1) == self.block
        stored = self.position.unsqueeze(1)
        if sight.is_causal:
            own = own & (stored <= asking)
        if sight.window is not None:
            first = sight.window.first(asking)
            before = before & (held >= first)
            own = own & (stored >= first) & (stored < asking + sight.window.size)
        return torch.cat([before, own.expand(len(before), -1, -1)], 2).unsqueeze(1)


class BlockHead(LayoutHead):
    """A head that drafts a block. transition: how a position depends on the one before."""

    layout: BlockLayout
    layout_class = BlockLayout
    fresh_biases = ("confidence_head.proj.bias", "markov_head.gate_proj.bias")

    def _build(self) -> Any:
        layout, config, size = self.layout, self.config, self.hidden_size
        self.fc = nn.Linear(len(layout.aux_hidden_layers) * size, size)
        self.hidden_norm = qwen3.Qwen3RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            _Layer(layout, index) for index in range(config.num_hidden_layers)
        )
        self.norm = qwen3.Qwen3RMSNorm(size, config.rms_norm_eps)
        self.markov_head = self.candidate_selector = self.confidence_head = None
        self.prefix_head: PrefixHead | None = None
        if layout.markov is not None:
            make = RecurrentMarkovHead if layout.markov.kind == "rnn" else MarkovHead
            self.markov_head = make(layout.markov, size, config.vocab_size, self.vocabulary)
        if layout.prefix is not None:
            self.prefix_head = PrefixHead(layout.prefix, size, config.vocab_size, self.embed)
        self.lilicorr: CandidateLattice | None = None
        if layout.lattice is not None:
            ends = HeadEnds(self.embed, self.features)
            sizes = (layout.block_size, size, config.rms_norm_eps)
            self.lilicorr = CandidateLattice(layout.lattice, *sizes, ends)
        if layout.selector is not None:
            self.candidate_selector = CandidateSelector(layout.selector, size, config.vocab_size)
        if layout.confidence_width:
            self.confidence_head = ConfidenceHead(layout.confidence_width)
        return qwen3.Qwen3RotaryEmbedding

    @property
    def transition(self) -> Transition | None:
        """How a position depends on the one before it; None: it does not."""
        return self.markov_head or self.candidate_selector or self.prefix_head or self.lilicorr

    @property
    def planner(self) -> BlockPlanner | None:
        """What looks at a block as a whole; None: nothing does."""
        return self.lilicorr

    @classmethod
    def _own_name(cls, name: str) -> str:
        """Domino's parts are not in one module, and its GRU is one of torch's layers."""
        if name.startswith(PREFIX_PARTS):
            return f"prefix_head.{name.removesuffix('_l0')}"
        if name.startswith(LATTICE):
            for theirs, ours in RENAMED:
                name = name.replace(theirs, ours)
        return name

    @classmethod
    def _own_shape(cls, name: str, tensor: Tensor) -> Tensor:
        """Some checkpoints have one more dimension of the embeddings of candidates."""
        is_deep = name.startswith(LATTICE) and tensor.dim() == 5
        return tensor.squeeze(1) if is_deep else tensor

    def features(self, hidden_states: Tensor) -> Tensor:
        """Target states [..., len(aux_hidden_layers) * H] fused to [..., H]."""
        fused: Tensor = self.hidden_norm(self.fc(product_input(hidden_states, self.fc.weight)))
        return fused

    def context(self, features: Tensor, position_ids: Tensor) -> list[KeyValues]:
        """Each layer's keys and values [N, Hkv, D] of features [N, H] at int64 [N] positions."""
        rotation = self._rotation(features.unsqueeze(0), position_ids.unsqueeze(0))
        rotation = rotation[0][0], rotation[1][0]
        layers: list[Any] = list(self.layers)
        return [layer.keys_values(features, rotation) for layer in layers]

    def forward(self, last: Tensor, width: int, context: BlockContext) -> Tensor:
        """The normed outputs [R, width, H] of the positions after each row's last token, int64 [R].

        width: at most ``layout.width``.
        """

        def stored(layer: _Layer) -> KeyValues:
            return context.layers[layer.index]

        length = context.layers[0].keys.shape[2]
        starts = context.lengths.unsqueeze(1)
        return self._outputs(last.unsqueeze(1), starts, width, stored, length)[:, 0]

    def train_blocks(
        self,
        last: Tensor,
        starts: Tensor,
        width: int,
        states: Tensor,
        *,
        recompute: bool = False,
    ) -> Tensor:
        """``forward`` after A positions of each of R texts at once: [R, A, width, H].

        last: int64 [R, A], tokens of the texts. starts: int64 [R, A], where they stand, so that a
        block sees its text up to there and itself. states: [R, L, len(aux_hidden_layers) * H], the
        target's. recompute: run each layer again in the backward pass; only its input is kept until
        then. Only for a head without convolutions, which would mix the blocks.
        """
        features = self.features(states)
        positions = torch.arange(states.shape[1], device=states.device).unsqueeze(0)
        rotation = self._rotation(features, positions)

        def made(layer: _Layer) -> KeyValues:
            found = layer.keys_values(features, rotation)
            return KeyValues(found.keys.transpose(1, 2), found.values.transpose(1, 2))

        return self._outputs(last, starts, width, made, states.shape[1], recompute=recompute)

    def _outputs(
        self,
        last: Tensor,
        starts: Tensor,
        width: int,
        context: Context,
        length: int,
        *,
        recompute: bool = False,
    ) -> Tensor:
        count = width + (not self.layout.from_anchor)
        masks = last.new_full((*last.shape, count - 1), self.layout.mask_token_id)
        x = self.embed(torch.cat([last.unsqueeze(2), masks], 2).flatten(1))
        x = x.to(self.norm.weight.dtype) * self.layout.embedding_scale
        index = BlockIndex.of(starts, count)
        rotation = self._rotation(x, index.position)
        layers: list[Any] = list(self.layers)
        visible: dict[Sight, Tensor] = {}
        for layer in layers:
            if layer.sight not in visible:
                visible[layer.sight] = index.visible(layer.sight, length)
            run = layer_run(layer, recompute=recompute)
            x = run(x, rotation, context, visible[layer.sight])
        blocks = x.unflatten(1, (last.shape[1], count))
        output: Tensor = self.norm(blocks[:, :, count - width :])
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Outputs [..., H] to logits [..., D], of each position by itself."""
        scores, cap = self.score(hidden), self.layout.softcap
        if self.layout.logit_scale != 1:
            scores = scores * self.layout.logit_scale
        return torch.tanh(scores / cap) * cap if cap > 0 else scores

    def _rotation(self, like: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self.rotary_emb(like, position_ids)
        return cos, sin


def _rotate(states: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """[..., T, heads, D] by rotations [..., T, D]."""
    cos, sin = (part.unsqueeze(-2) for part in rotation)
    rotated: Tensor = states * cos + qwen3.rotate_half(states) * sin
    return rotated
