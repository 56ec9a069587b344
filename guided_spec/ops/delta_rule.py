"""The gated delta rule over slots: linear attention that keeps one state a text.

A token with key k, value v, decay a in (0, 1] and step b moves the state S [K, V] of a head to

    S' = a S + b k (v - a S^T k)^T

and its query reads S'^T q. Yang, Kautz and Hatamizadeh, "Gated delta networks: improving Mamba2
with delta rule" (2024, arXiv:2412.06464). Queries, keys and values come from a causal convolution
over the last few tokens, and what is read is normed and gated, as in Qwen3-Next and Qwen3.5.

A token that was folded into a state cannot be taken out again. So the state stays before the tokens
of the last forward, whose projections are kept next to it. The next forward's first position says
how many of them stay: these are folded in first. Nothing has to be done between forwards, and a
rollback costs as many numbers as the tokens have, not a state each.

The torch code here is the definition; on CUDA, ``guided_spec.ops.delta_rule_triton`` runs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from guided_spec.errors import ConfigError
from guided_spec.ops.attention.slot_attention import SlotIndex
from guided_spec.ops.host import zeros_on_demand
from guided_spec.ops.kernels import has_triton, kernels_of

CHUNK = 64  # tokens that are folded in by one set of matrix products
NORM_EPS = 1e-6  # of queries and keys, under the root


class DeltaShape(NamedTuple):
    """The heads of a layer.

    keys, values: numbers of heads; each key head (and its query) serves values / keys neighbouring
        value heads. key_size, value_size: K and V of each. taps: tokens that a convolution sees.
    """

    keys: int
    values: int
    key_size: int
    value_size: int
    taps: int

    @property
    def channels(self) -> int:
        """C: of the convolution. Queries, then keys, then values, head after head."""
        return 2 * self.keys * self.key_size + self.values * self.value_size


class DeltaColumns(NamedTuple):
    """Which columns of a packed projection are what, int32 on its device.

    kept: [C + 2 * Hv]: the channels in their order, then what the steps and what the decays of the
        heads are made of. gate: [Hv * V].
    """

    kept: Tensor
    gate: Tensor


class DeltaLayer(NamedTuple):
    """What a layer computes with, on one device.

    taps: [C, taps] of the convolution, the newest token last. rates, biases: [Hv], the logarithm of
        each head's rate of decay, and what is added under its softplus. step_scale: times a step's
        sigmoid. norm: [V], times what is read, normed. eps: of this norm.
    """

    shape: DeltaShape
    columns: DeltaColumns
    taps: Tensor
    rates: Tensor
    biases: Tensor
    step_scale: float
    norm: Tensor
    eps: float


class DeltaStates(NamedTuple):
    """What a layer keeps of the texts in its slots.

    state: float32 [num_slots, Hv, K, V], after the first ``extent[slot, 0]`` tokens of each text.
    recent: [num_slots, R, C + 2 * Hv], the kept columns of the last tokens: those of position p in
        entry p % R. extent: int64 [num_slots, 2], that length, and how many tokens after it are
        in ``recent`` that may stay.
    """

    state: Tensor
    recent: Tensor
    extent: Tensor

    @classmethod
    def empty(
        cls, shape: DeltaShape, num_slots: int, longest_draft: int, like: Tensor
    ) -> DeltaStates:
        """For rows of up to ``longest_draft`` tokens that may go back.

        like: of the dtype and device of the projections.
        """
        width, entries = shape.channels + 2 * shape.values, longest_draft + shape.taps - 1
        size = (num_slots, shape.values, shape.key_size, shape.value_size)
        return cls(
            zeros_on_demand(like.float(), size),
            zeros_on_demand(like, (num_slots, entries, width)),
            like.new_zeros(num_slots, 2, dtype=torch.int64),
        )

    def longest_draft(self, shape: DeltaShape) -> int:
        """Tokens of a row that may go back."""
        return self.recent.shape[1] - shape.taps + 1


def gated_delta(packed: Tensor, layer: DeltaLayer, states: DeltaStates, index: SlotIndex) -> Tensor:
    """[N, Hv * V]: what each token reads, normed and gated, in the dtype of ``packed``.

    packed: [N, X], the projections of the tokens, rows contiguous; ``layer.columns`` says what
        lies where. states: modified. index: see ``SlotIndex``; slots have one row each.

    A row that starts at position s continues the first s tokens of its slot's text: of the tokens
    of the slot's last row, those before s stay. It may start anywhere in that row or after it, if
    that row had at most ``DeltaStates.longest_draft`` tokens; only after it if it had more. A row
    that starts at 0 is a new text. The outputs of unused tokens are 0.

    States and sums are float32, in the rounding of transformers' modules. For inference: it has no
    gradient. Never waits for the device where a kernel runs. Raises ConfigError for shapes that do
    not fit.
    """
    _check(packed, layer, states)
    if packed.is_cuda and has_triton():
        found: Tensor = kernels_of(__name__).gated_delta(packed, layer, states, index)
        return found
    read = packed.new_zeros(len(packed), layer.shape.values, layer.shape.value_size)
    for rows in _rows_of(index):
        history = _history(layer, states, rows, packed)
        mixed = _convolved(history, layer)
        kept, gates = mixed[:, -rows.width :], history[:, -rows.width :, layer.shape.channels :]
        state = _states_before(layer, states, rows)
        found, last = _fold(_Tokens.of(kept, gates, layer), state)
        stays = rows.width > states.longest_draft(layer.shape)
        states.state[rows.slots] = last if stays else state
        read[rows.tokens] = found.to(packed.dtype)
        _keep(states, rows, history, stays=stays)
    return _gated(read, packed[:, layer.columns.gate.long()], layer)


class _Rows(NamedTuple):
    """Rows of one width.

    slots, starts: int64 [G]. tokens: int64 [G, T], of the line.
    """

    slots: Tensor
    starts: Tensor
    tokens: Tensor

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def before(self, count: int) -> Tensor:
        """int64 [G, count]: the positions in front of the rows; some may be below 0."""
        steps = torch.arange(-count, 0, device=self.starts.device)
        return self.starts.unsqueeze(1) + steps


def _rows_of(index: SlotIndex) -> list[_Rows]:
    first, by_width = 0, dict[int, list[tuple[int, int, int]]]()
    for slot, start, end in index.rows.T.tolist():
        if slot >= 0 and end > first:
            by_width.setdefault(end - first, []).append((slot, start, first))
        first = max(first, end)
    found = []
    for width, rows in by_width.items():
        slots, starts, firsts = torch.tensor(rows, device=index.rows.device).T
        steps = torch.arange(width, device=firsts.device)
        found.append(_Rows(slots, starts, firsts.unsqueeze(1) + steps))
    return found


def _check(packed: Tensor, layer: DeltaLayer, states: DeltaStates) -> None:
    shape, kept = layer.shape, len(layer.columns.kept)
    if packed.dim() != 2 or packed.stride(1) != 1:
        raise ConfigError("packed", tuple(packed.shape), "must be [N, X] with contiguous rows")
    width = shape.channels + 2 * shape.values
    if kept != width or states.recent.shape[2] != width:
        fix = f"must have {width} columns, as the layer's kept ones ({kept})"
        raise ConfigError("states.recent", tuple(states.recent.shape), fix)
    size = (shape.values, shape.key_size, shape.value_size)
    if states.state.shape[1:] != size or states.state.dtype != torch.float32:
        fix = f"must be float32 [num_slots, {size[0]}, {size[1]}, {size[2]}]"
        raise ConfigError("states.state", tuple(states.state.shape), fix)


def _history(layer: DeltaLayer, states: DeltaStates, rows: _Rows, packed: Tensor) -> Tensor:
    """[G, taps - 1 + T, C + 2 * Hv]: the kept columns of the rows, and of the tokens before."""
    new = packed[:, layer.columns.kept.long()][rows.tokens]
    return torch.cat([_recent(states, rows, rows.before(layer.shape.taps - 1)), new], 1)


def _recent(states: DeltaStates, rows: _Rows, positions: Tensor) -> Tensor:
    """[G, n, C + 2 * Hv]: what is kept of positions int64 [G, n]; 0 below position 0."""
    found = states.recent[rows.slots.unsqueeze(1), positions % states.recent.shape[1]]
    return found.masked_fill((positions < 0).unsqueeze(2), 0)


def _convolved(history: Tensor, layer: DeltaLayer) -> Tensor:
    """[G, n, C], after the first taps - 1 of [G, taps - 1 + n, C + 2 * Hv]."""
    windows = history[..., : layer.shape.channels].unfold(1, layer.shape.taps, 1)
    summed = (windows.float() * layer.taps.float()).sum(-1).to(history.dtype)
    return silu(summed)


def _states_before(layer: DeltaLayer, states: DeltaStates, rows: _Rows) -> Tensor:
    """float32 [G, Hv, K, V]: the rows' states, before their first tokens."""
    shape, (lengths, held) = layer.shape, states.extent[rows.slots].T
    is_new = rows.starts == 0
    staying = (rows.starts - lengths).clamp_min(0).minimum(held).masked_fill(is_new, 0)
    state = states.state[rows.slots].masked_fill(is_new[:, None, None, None], 0)
    most = int(staying.max())
    if most == 0:
        return state
    steps = torch.arange(1 - shape.taps, most, device=staying.device)
    history = _recent(states, rows, lengths.unsqueeze(1) + steps)
    gates = history[:, shape.taps - 1 :, shape.channels :]
    tokens = _Tokens.of(_convolved(history, layer), gates, layer)
    is_gone = (torch.arange(most, device=staying.device) >= staying.unsqueeze(1)).unsqueeze(2)
    # Without decay and step a token leaves the state as it is.
    decay, step = (part.masked_fill(is_gone, 0) for part in (tokens.decay, tokens.step))
    return _fold(tokens._replace(decay=decay, step=step), state)[1]


class _Tokens(NamedTuple):
    """float32: query, key [G, T, Hv, K]; value [G, T, Hv, V]; decay (its logarithm), step [G, T,
    Hv].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    step: Tensor

    @classmethod
    def of(cls, mixed: Tensor, gates: Tensor, layer: DeltaLayer) -> _Tokens:
        """mixed: [G, T, C]. gates: [G, T, 2 * Hv]."""
        shape = layer.shape
        width = shape.keys * shape.key_size
        parts = mixed.float().split([width, width, shape.values * shape.value_size], 2)
        query, key = (
            _normed(part.unflatten(2, (shape.keys, -1))).repeat_interleave(
                shape.values // shape.keys, 2
            )
            for part in parts[:2]
        )
        value = parts[2].unflatten(2, (shape.values, -1))
        step, decay = gates.split(shape.values, 2)
        rates = -layer.rates.float().exp()
        return cls(
            *(query * shape.key_size**-0.5, key, value),
            rates * softplus(decay.float() + layer.biases.float()),
            step.sigmoid().float() * layer.step_scale,
        )

    def chunk(self, at: int) -> _Tokens:
        """Some of them, heads first: [G, Hv, n, ...]."""
        return _Tokens(*(part[:, at : at + CHUNK].transpose(1, 2) for part in self))


def _normed(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + NORM_EPS)


def _fold(tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """([G, T, Hv, V] what the tokens read, the state [G, Hv, K, V] after all of them)."""
    read = []
    for at in range(0, tokens.key.shape[1], CHUNK):
        found, state = _fold_chunk(tokens.chunk(at), state)
        read.append(found)
    return torch.cat(read, 2).transpose(1, 2), state


def _fold_chunk(tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """``_fold`` of tokens [G, Hv, n, ...], without a step for each token.

    With d the decay summed up, the state after token t is e^d_t S + sum over i <= t of
    e^(d_t - d_i) k_i u_i^T, where u_t = b_t (v_t - a_t S_(t-1)^T k_t). Put into one another, these
    are triangular equations for all u.
    """
    query, key, value, decay, step = tokens
    summed, step = decay.cumsum(2), step.unsqueeze(3)
    between = (summed.unsqueeze(3) - summed.unsqueeze(2)).tril().exp().tril()  # [G, Hv, n, n]
    grown = summed.exp().unsqueeze(3)
    equations = step * between * (key @ key.transpose(2, 3))
    known = step * (value - grown * (key @ state))
    moved = torch.linalg.solve_triangular(equations, known, upper=False, unitriangular=True)
    read = grown * (query @ state) + (between * (query @ key.transpose(2, 3))) @ moved
    rest = between[:, :, -1].unsqueeze(3)
    return read, grown[:, :, -1:] * state + (rest * key).transpose(2, 3) @ moved


def _keep(states: DeltaStates, rows: _Rows, history: Tensor, *, stays: bool) -> None:
    """The projections of the last tokens; stays: all of the rows' own, which are folded in."""
    width, entries = rows.width, states.recent.shape[1]
    count = min(width, entries)
    positions = (rows.starts + width).unsqueeze(1) + torch.arange(
        -count, 0, device=rows.starts.device
    )
    states.recent[rows.slots.unsqueeze(1), positions % entries] = history[:, -count:]
    lengths, held = (rows.starts + width, 0) if stays else (rows.starts, width)
    states.extent[rows.slots, 0] = lengths
    states.extent[rows.slots, 1] = held


def _gated(read: Tensor, gate: Tensor, layer: DeltaLayer) -> Tensor:
    """[N, Hv * V] of read [N, Hv, V] and gate [N, Hv * V]."""
    wide = read.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + layer.eps)
    normed = (layer.norm * wide.to(read.dtype)).flatten(1)
    return (normed * silu(gate.float())).to(read.dtype)
