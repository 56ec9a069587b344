"""Attention of new tokens over texts that are kept in the slots of one key and value buffer.

One operator writes the new tokens' keys and values where they belong and attends over each row's
own slot, so that rows of any lengths share a batch without a mask and without a copy of the slots.
What it does depends on tensors of the device only, never on integers of the host: it can be
captured in a CUDA graph, and be compiled as one node of a larger graph.

The torch code here is the definition; on CUDA, ``guided_spec.ops.slot_attention_triton`` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.errors import ConfigError

__all__ = [
    "HeadNorms",
    "HeadShape",
    "KeyValues",
    "Rotation",
    "SlotPlaces",
    "slot_attention",
    "store_keys_values",
]

# Written out, because not every supported version of torch infers it from postponed annotations.
SCHEMA = (
    "(Tensor query, Tensor? key, Tensor? value, Tensor(a!) keys, Tensor(b!) values, Tensor slots, "
    "Tensor starts, float scale, int window, int view) -> Tensor"
)


class KeyValues(NamedTuple):
    """Keys and values that belong together, [N, Hkv, L, D] of one dtype on one device.

    Of new tokens, N is B and L is T, with any strides. Of a layer's buffers, which are contiguous,
    N is the number of slots and L is max_length + 1: the last position, the sink, takes what is
    written behind the others.
    """

    keys: Tensor
    values: Tensor


class SlotPlaces(NamedTuple):
    """Where the tokens of a batch belong: token t of row b is position starts[b] + t of its slot.

    slots: [B] int64; -1 marks an unused row. starts: [B] int64, 0 or more. Both on the device of
        the buffers, which may change them between two replays of a CUDA graph. Rows of one slot
        must not overlap; they see each other, since all is written before anything is read.
    view: about how many positions the longest row will have: how finely CUDA kernels divide the
        texts. It changes no result. None: as long as the buffer.
    """

    slots: Tensor
    starts: Tensor
    view: int | None = None


class HeadShape(NamedTuple):
    """How the heads lie in a packed projection: queries, then keys, then values.

    queries, keys: numbers of heads (there are as many values as keys). size: D of each, even.
    """

    queries: int
    keys: int
    size: int

    @property
    def width(self) -> int:
        """Columns of the packed projection."""
        return (self.queries + 2 * self.keys) * self.size


class HeadNorms(NamedTuple):
    """RMS norms over single heads, before they are rotated, as of Qwen3: weights [D] each."""

    query: Tensor
    key: Tensor
    eps: float


class Rotation(NamedTuple):
    """The rotary embedding of positions 0 to P - 1: [P, D] each, both halves of a row equal.

    Rows contiguous; in the dtype of the model. Positions beyond are embedded like the last one.
    """

    cos: Tensor
    sin: Tensor


def slot_attention(
    query: Tensor,
    new: KeyValues | None,
    buffers: KeyValues,
    places: SlotPlaces,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """[B, T, Hq, D]: what each new token sees; contiguous, in the dtype of ``query``.

    query: [B, Hq, T, D] float32, bfloat16 or float16, D up to 256. new: [B, Hkv, T, D] each,
        in the dtype of the buffers; None where they are in the slots already
        (``store_keys_values``). Hq is a multiple of Hkv. buffers: the layer's; written to.
        places: see ``SlotPlaces``. All on one device.
    scale: multiplies the scores. window: how many positions a token sees, itself included; None:
        all.

    Token t of row b writes its key and value to position p = starts[b] + t of slot slots[b], or to
    the sink if p >= max_length. Then it sees the slot's positions 0 to p that lie before
    max_length and, with a window, behind p - window; zeros come out where it sees none. An unused
    row writes nothing that is ever seen, and its output is zeros. Positions that no token of a row
    sees may hold anything, NaN included.

    Scores, softmax and sums are float32. For inference: it has no gradient. Never waits for the
    device. Raises ConfigError for shapes that do not fit.
    """
    _check(query, new, buffers, window)
    key, value = (None, None) if new is None else new
    view = buffers.keys.shape[2] if places.view is None else places.view
    attended: Tensor = _operator(
        query, key, value, *buffers, places.slots, places.starts, scale, window or 0, view
    )
    return attended


def store_keys_values(new: KeyValues, buffers: KeyValues, places: SlotPlaces) -> None:
    """Put the new tokens where ``slot_attention`` would; in torch, on any device."""
    steps = torch.arange(new.keys.shape[2], device=places.starts.device)
    positions = places.starts.unsqueeze(1) + steps
    for states, buffer in zip(new, buffers, strict=True):
        _write(buffer, states, places.slots, positions)


def _check(query: Tensor, new: KeyValues | None, buffers: KeyValues, window: int | None) -> None:
    heads, width = buffers.keys.shape[1], buffers.keys.shape[3]
    if query.shape[1] % heads != 0 or query.shape[3] != width:
        fix = f"must be [B, a multiple of {heads}, T, {width}], as the buffers are"
        raise ConfigError("query", tuple(query.shape), fix)
    shape = (query.shape[0], heads, query.shape[2], width)
    for states, buffer in zip(new or (None, None), buffers, strict=True):
        if states is not None and states.shape != shape:
            raise ConfigError("new", tuple(states.shape), f"must be {shape}")
        if buffer.shape != buffers.keys.shape or not buffer.is_contiguous():
            raise ConfigError("buffers", tuple(buffer.shape), "must be alike and contiguous")
    if window is not None and window < 1:
        raise ConfigError("window", window, "must be at least 1, or None")


def _reference(  # noqa: PLR0913 - the schema of an operator is flat
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    starts: Tensor,
    scale: float,
    window: int,
    view: int,
) -> Tensor:
    del view
    positions = starts.unsqueeze(1) + torch.arange(query.shape[2], device=starts.device)
    if key is not None and value is not None:
        _write(keys, key, slots, positions)
        _write(values, value, slots, positions)
    length = keys.shape[2] - 1
    rows = slots.clamp_min(0)
    stored = torch.arange(length, device=slots.device)
    visible = (stored <= positions.unsqueeze(2)) & (slots >= 0).view(-1, 1, 1)  # [B, T, length]
    if window:
        visible &= stored > positions.unsqueeze(2) - window
    # A value that nobody sees is multiplied by 0, and 0 * NaN would show.
    unseen = ~visible.any(1).view(-1, 1, length, 1)
    seen_values = values[rows, :, :length].float().masked_fill(unseen, 0)
    grouped = query.float().unflatten(1, (keys.shape[1], -1))  # [B, Hkv, G, T, D]
    scores = grouped @ keys[rows, :, :length].float().mT.unsqueeze(2) * scale
    hidden = ~visible[:, None, None]
    probs = torch.softmax(scores.masked_fill(hidden, torch.finfo(torch.float32).min), -1)
    attended = probs.masked_fill(hidden, 0) @ seen_values.unsqueeze(2)
    return attended.flatten(1, 2).transpose(1, 2).to(query.dtype).contiguous()


def _write(buffer: Tensor, states: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Put states [B, heads, T, D] where the tokens belong."""
    sink = buffer.shape[2] - 1
    # An unused row goes to a sink: to leave it out would take a wait for the device.
    used = (slots >= 0).unsqueeze(1)
    rows = slots.clamp_min(0).unsqueeze(1)
    columns = positions.clamp_max(sink).where(used, sink)
    buffer[rows, :, columns] = states.transpose(1, 2).to(buffer.dtype)


@cache
def _kernel() -> Callable[..., Tensor]:
    if find_spec("triton") is None:  # it exists for Linux only
        return _reference
    from guided_spec.ops import slot_attention_triton  # imported here: it needs triton

    return slot_attention_triton.slot_attention


def _on_cuda(*arguments: Any) -> Tensor:
    return _kernel()(*arguments)


def _shape(query: Tensor, *_: Any) -> Tensor:
    batch, heads, tokens, width = query.shape
    return query.new_empty(batch, tokens, heads, width)


_operator = torch.library.custom_op(
    "guided_spec::slot_attention", _reference, mutates_args=("keys", "values"), schema=SCHEMA
)
_operator.register_kernel("cuda", _on_cuda)
_operator.register_fake(_shape)
