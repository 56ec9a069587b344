"""Attention of new tokens over texts that are kept in blocks of one key and value buffer.

The tokens of a step are one flat sequence, row after row, so that rows of any lengths share a
forward without padding: drafts, forced spans and pieces of prompts. Each writes its key and value
into its slot and attends over that slot, whose blocks a table lists. On CUDA everything depends on
device tensors only, never on integers of the host: it can be captured in a CUDA graph.

Blocks and tables are those of Kwon et al., "Efficient memory management for large language model
serving with PagedAttention" (2023). The torch code here is the definition; on CUDA,
``guided_spec.ops.attention.slot_attention_triton`` runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.errors import ConfigError
from guided_spec.ops.kernels import has_triton, kernels_of

Position = TypeVar("Position", int, Tensor)
MOST_IN_PLACE = 32  # queries of a head of keys; for more, torch's attention over a copy is faster
FP8 = torch.float8_e4m3fn  # that keys and values may be kept in


class KeyValues(NamedTuple):
    """Keys and values that belong together, of one dtype on one device.

    Buffers may be float8_e4m3fn, whatever the dtype of new tokens; see ``as_kept``.

    Of new tokens: [N, Hkv, D] each, with any strides. Of a layer's buffers, which are contiguous:
    [num_blocks, Hkv, block, D], where ``block`` positions of a text lie together. Of latent
    attention: the latents, which are keys and values, and the rotary part of the keys.
    """

    keys: Tensor
    values: Tensor


class SharedPositions(NamedTuple):
    """Tokens whose texts begin in the same blocks: a kernel reads these once for all of them.

    tokens: int64 [2, N]: the tokens of the line in the order of their groups, those of none last;
        and where each token stands in that order. All tokens of a row are in one group.
    groups: int64 [3, G]: of each group a slot that has the blocks, the positions that all of its
        slots have in the same whole blocks, none after a token of the group, and where it ends in
        that order. An unused group ends where the one before it does.

    Changes no result beyond rounding ("cascade inference" in FlashInfer, arXiv:2501.01005; Juravsky
    et al., "Hydragen: high-throughput LLM inference with shared prefixes", 2024).
    """

    tokens: Tensor
    groups: Tensor


class Span(NamedTuple):
    """Tokens of a row that see each other, those that come later too, as of a picture in Gemma 3.

    slot: of the row. first: where they begin in the line. positions: in the slot, all of which the
    forward writes, so that the last token sees no more than it does by itself.
    """

    slot: int
    first: int
    positions: range


class Ahead(NamedTuple):
    """Tokens that see what comes later. windowed_only: in layers that have a window alone."""

    spans: tuple[Span, ...] = ()
    windowed_only: bool = False

    def in_layer(self, window: Window | None) -> tuple[Span, ...]:
        """Those that do so in a layer with this window."""
        return () if self.windowed_only and window is None else self.spans


NONE_AHEAD = Ahead()


@dataclass(frozen=True, eq=False)
class SlotIndex:
    """Where the tokens of a forward belong.

    tokens: int64 [2, N]: the slot of each token, -1 for an unused one, and its position there.
    rows: int64 [3, R]: the slot of each row, the position of its first token, and where it ends in
        the line of tokens; it begins where the row before it ends. A row without tokens is unused,
        and ends where the one before it does.
    tables: int32 [num_slots, P]: which block holds the positions p * block to (p + 1) * block - 1
        of a slot. The position ``max_length`` takes what is written beyond the others, and needs a
        block too; several slots may have the same one for it.
    max_length: positions of a slot.
    width, view: about how many tokens a row has, and how many positions it will have at most: how
        CUDA kernels divide the work. They change no result. None: as many as there can be.
    shared: which texts share a prefix; None: each is read by itself.
    fits: whether it is known that no token goes beyond ``max_length``.
    axes: int32 [num_slots, A, max_length + 1]: by which positions each text's tokens are rotated,
        where these have several axes; see ``Rotation``. None: by those in the text.
    ahead: which tokens see what comes later: known to the host, so not for a CUDA graph.

    Tensors on the device of the buffers, which may change their values between two replays of a
    CUDA graph, but not while a forward is computed in torch: it works out once, not in each layer,
    what they say. Kernels look them up before their predecessor is done, so that another launch
    must lie between what writes them and the attention, as a layer's product does. Rows of one slot
    must not overlap; they see each other, since all is written before anything is read.
    """

    tokens: Tensor
    rows: Tensor
    tables: Tensor
    max_length: int
    width: int | None = None
    view: int | None = None
    shared: SharedPositions | None = None
    fits: bool = False
    axes: Tensor | None = None
    ahead: Ahead = NONE_AHEAD
    # By the positions of a block, and the window.
    _stored: dict[int, StoredAt] = field(default_factory=dict, init=False, repr=False)
    _seen: dict[Any, list[SeenRow]] = field(default_factory=dict, init=False, repr=False)

    @property
    def positions(self) -> Tensor:
        """int64 [N]: the position of each token in its text."""
        return self.tokens[1]

    @cached_property
    def on_axes(self) -> Tensor | None:
        """int64 [N, A]: the position of each token on each axis; None without ``axes``."""
        if self.axes is None:
            return None
        slots, positions = self.tokens
        found = self.axes[slots.clamp_min(0), :, positions.clamp_max(self.max_length)]
        return found.long()

    def stored(self, block: int) -> StoredAt:
        """Where the tokens' keys and values go, in blocks of so many positions."""
        if block not in self._stored:
            slots, positions = self.tokens
            # An unused token goes after the positions: leaving it out would wait for the device.
            stored_at = positions.clamp_max(self.max_length).where(slots >= 0, self.max_length)
            found = self.tables[slots.clamp_min(0), stored_at // block].long()
            self._stored[block] = StoredAt(found, stored_at % block)
        return self._stored[block]

    @cached_property
    def pages(self) -> Pages:
        """The rows, as FlashAttention asks about them; nothing waits for the device."""
        slots, first, ends = self.rows
        starts = functional.pad(ends, (1, 0)).int()
        counts = starts.diff()
        lengths, used = first + counts, (counts > 0) & (slots >= 0)
        tables = self.tables[slots.clamp_min(0)]
        return Pages(starts, lengths.where(used, 0).int(), tables)

    def seen(self, block: int, window: Window | None = None) -> list[SeenRow]:
        """What each used row sees."""
        if (block, window) not in self._seen:
            self._seen[block, window] = list(self._see(block, window))
        return self._seen[block, window]

    def _see(self, block: int, window: Window | None) -> Iterator[SeenRow]:
        first = 0
        for slot, start, end in self.rows.T.tolist():
            count, low = end - first, 0 if window is None else max(window.first(start), 0)
            # All between the first position that the first token sees and the last of the last one.
            seen = range(low, min(start + count, self.max_length))
            if count > 0 and slot >= 0 and seen:
                asking = range(start, start + count)
                visible = _visible(asking, seen, window, self.rows)
                blocks = self.tables[slot, seen.start // block : -(-seen.stop // block)]
                listed = blocks.tolist()
                is_one_piece = listed == [*range(listed[0], listed[0] + len(listed))]
                begins_whole = seen.start % block == 0
                piece = listed[0] if is_one_piece and begins_whole else None
                yield SeenRow(slice(first, end), seen, blocks.long(), visible, piece)
            first = max(end, first)

    def seen_ahead(self, block: int, window: Window | None) -> list[SeenRow]:
        """What the tokens see that see what comes later; nothing waits for the device."""
        if not (spans := self.ahead.in_layer(window)):  # as of nearly all forwards
            return []
        key = (block, window, self.ahead)
        if key not in self._seen:
            self._seen[key] = [self._whole(span, block, window) for span in spans]
        return self._seen[key]

    def _whole(self, span: Span, block: int, window: Window | None) -> SeenRow:
        low = 0 if window is None else max(window.first(span.positions.start), 0)
        seen, visible = range(low, span.positions.stop), None
        if window is not None:  # it cuts what is before alone
            device = self.tables.device
            asking, stored = (
                torch.arange(one.start, one.stop, device=device) for one in (span.positions, seen)
            )
            visible = stored >= window.first(asking).unsqueeze(1)
        blocks = self.tables[span.slot, low // block : -(-seen.stop // block)].long()
        tokens = slice(span.first, span.first + len(span.positions))
        return SeenRow(tokens, seen, blocks, visible, None)


class StoredAt(NamedTuple):
    """int64 [N] each: of every token the block, and the offset in it."""

    blocks: Tensor
    within: Tensor


class Pages(NamedTuple):
    """What FlashAttention's kernel asks about the rows of a line, on their device.

    starts: int32 [R + 1], where each row begins in the line, and where the last one ends. lengths:
    int32 [R], positions of each text with the row's tokens. tables: int32 [R, P], of each row.
    """

    starts: Tensor
    lengths: Tensor
    tables: Tensor


class SeenRow(NamedTuple):
    """What a row of tokens sees.

    tokens: which of the line they are. positions: of the slot, that any of them sees.
    blocks: int64 [n], which hold those. visible: see ``_visible``.
    first: the first of the blocks where they are contiguous in the buffer and the positions begin
        with one, else None.
    """

    tokens: slice
    positions: range
    blocks: Tensor
    visible: Tensor | None
    first: int | None

    def read(self, buffer: Tensor) -> Tensor:
        """[Hkv, L, D]: the positions that it sees, of a layer's keys or values."""
        heads, block, width = buffer.shape[1:]
        # A head's part of a block is contiguous, so that a row of this view is one.
        parts = self.blocks * heads + torch.arange(heads, device=self.blocks.device).unsqueeze(1)
        found = _movable(buffer).view(-1, block * width).index_select(0, parts.flatten())
        found = found.view(buffer.dtype).view(heads, -1, width)
        before = self.positions.start // block * block
        return found[:, self.positions.start - before : self.positions.stop - before]


class QkvShape(NamedTuple):
    """The layout of heads in a packed projection: queries, then keys, then values.

    queries, keys: numbers of heads (there are as many values as keys). size: D of each, even.
    has_gates: whether a gate of so many numbers comes after each query, as of Qwen3-Next.
    in_pairs: whether a number is rotated with the next one, as of GLM; else with that which comes
        half of what is rotated after it.
    """

    queries: int
    keys: int
    size: int
    has_gates: bool = False
    in_pairs: bool = False

    @property
    def stride(self) -> int:
        """Heads from one query to the next."""
        return 2 if self.has_gates else 1

    @property
    def width(self) -> int:
        """Columns of the packed projection."""
        return (self.stride * self.queries + 2 * self.keys) * self.size


class HeadNorms(NamedTuple):
    """RMS norms over single heads, as of Qwen3: weights [D] each.

    are_whole: over all queries together and all keys, as of Olmo: weights [Hq * D] and [Hkv * D];
        of no shape with gates.
    come_after: the rotation of single heads, as of Hunyuan.
    """

    query: Tensor
    key: Tensor
    eps: float
    are_whole: bool = False
    come_after: bool = False


class Rotation(NamedTuple):
    """The rotary embedding of positions 0 to P - 1: [P, R] each, both halves of a row equal.

    R: even, up to D; the numbers of a head after the first R are not rotated. Rows contiguous; in
    the dtype of the model. Positions beyond are embedded like the last one.
    axis_of: int32 [R / 2], the axis of ``SlotIndex.axes`` by which each number and its other half
        are rotated (M-RoPE, Wang et al., "Qwen2-VL", 2024). None: by the position in the text.
    """

    cos: Tensor
    sin: Tensor
    axis_of: Tensor | None = None

    def at(self, index: SlotIndex) -> Rotation:
        """That of each token of ``index``: [N, R] each."""
        last = len(self.cos) - 1
        if self.axis_of is None or index.on_axes is None:
            positions = index.positions.clamp_max(last)
            return Rotation(self.cos[positions], self.sin[positions])
        half = index.on_axes.clamp_max(last)[:, self.axis_of.long()]
        positions = torch.cat([half, half], 1)
        return Rotation(self.cos.gather(0, positions), self.sin.gather(0, positions))


class Window(NamedTuple):
    """How many positions a token sees, itself included.

    is_chunk: it sees those from the last multiple of ``size`` on instead (Llama 4).
    """

    size: int
    is_chunk: bool = False

    def first(self, position: Position) -> Position:
        """The first one that the token at ``position`` sees; below 0 where it sees all."""
        return position - (position % self.size if self.is_chunk else self.size - 1)


def slot_attention(  # noqa: PLR0913 - what attends, to what, and how
    query: Tensor,
    new: KeyValues | None,
    buffers: KeyValues,
    index: SlotIndex,
    *,
    scale: float,
    window: Window | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[N, Hq, D]: what each new token sees; contiguous, in the dtype of ``query``.

    query: [N, Hq, D] float32, bfloat16 or float16, D up to 256. new: [N, Hkv, D] each, in the dtype
        of the buffers, or of ``query`` where these are fp8; None where they are in the blocks
        already (``store_keys_values``). Hq is a multiple of Hkv. buffers: the layer's; written to.
        index: see ``SlotIndex``. All on one device.
    scale: positive, multiplies the scores. window: the positions that a token sees; None: all.
    sinks: [Hq], a score of each head that takes its share of the softmax and adds nothing to the
        sum, as of gpt-oss (Xiao et al., "Efficient streaming language models with attention
        sinks", 2023); None for none.

    A token at position p of a slot writes its key and value there, or to position max_length if p
    is not below that. Then it sees the slot's positions 0 to p that lie before max_length and, with
    a window, from ``window.first(p)`` on; zeros come out where it sees none. Tokens of
    ``index.ahead`` see all of their span besides. An unused token writes
    nothing that is ever seen, and its output may be anything. Positions that no token sees may hold
    anything, NaN included.

    Scores, softmax and sums are float32. For inference: it has no gradient. Never waits for the
    device where a kernel runs. Raises ConfigError for shapes that do not fit.
    """
    _check(query, new, buffers, window, sinks)
    if query.is_cuda and has_triton():
        attend = kernels_of(__name__).slot_attention
        attended: Tensor = attend(
            *(query, new, buffers, index), scale=scale, window=window, sinks=sinks
        )
    else:
        if new is not None:
            store_keys_values(new, buffers, index)
        attended = _attend(query, buffers, index, scale, window, sinks)
    for row in index.seen_ahead(buffers.keys.shape[2], window):
        found = _attend_row(query[row.tokens].float(), buffers, row, scale, sinks)
        attended[row.tokens] = found.to(attended.dtype)
    return attended


def window_code(window: Window | None) -> int:
    """As kernels take it: 0 for none, -size for a chunk."""
    size = 0 if window is None else window.size
    return -size if window is not None and window.is_chunk else size


def store_keys_values(new: KeyValues, buffers: KeyValues, index: SlotIndex) -> None:
    """Put the new tokens where ``slot_attention`` would; in torch, on any device."""
    blocks, within = index.stored(buffers.keys.shape[2])
    for states, buffer in zip(new, buffers, strict=True):
        _movable(buffer)[blocks, :, within] = _movable(as_kept(states, buffer.dtype))


def as_kept(states: Tensor, dtype: torch.dtype) -> Tensor:
    """New keys or values, of any shape, in the dtype of their buffer.

    float8_e4m3fn takes numbers beyond its largest one, 448, as that one, with their sign; others go
    to the nearest, ties to even, and NaN stays. There is no scale.
    """
    if dtype == FP8:  # by itself, torch makes NaN of larger numbers in some versions
        most = torch.finfo(FP8).max
        states = states.clamp(-most, most)
    return states.to(dtype)


def _movable(numbers: Tensor) -> Tensor:
    """The same memory as torch can index it: not every operator knows fp8."""
    return numbers.view(torch.uint8) if numbers.dtype == FP8 else numbers


def _check(
    query: Tensor,
    new: KeyValues | None,
    buffers: KeyValues,
    window: Window | None,
    sinks: Tensor | None,
) -> None:
    heads, size = buffers.keys.shape[1], buffers.keys.shape[3]
    if query.dim() != 3 or query.shape[1] % heads != 0 or query.shape[2] != size:
        fix = f"must be [N, a multiple of {heads}, {size}], as the buffers are"
        raise ConfigError("query", tuple(query.shape), fix)
    shape = (len(query), heads, size)
    for states, buffer in zip(new or (None, None), buffers, strict=True):
        if states is not None and states.shape != shape:
            raise ConfigError("new", tuple(states.shape), f"must be {shape}")
        if buffer.shape != buffers.keys.shape or not buffer.is_contiguous():
            raise ConfigError(
                "buffers", tuple(buffer.shape), "must have equal shapes and be contiguous"
            )
    if window is not None and window.size < 1:
        raise ConfigError("window", window, "must be at least 1, or None")
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ConfigError("sinks", tuple(sinks.shape), f"must be [{query.shape[1]}], one a head")


def _attend(
    query: Tensor,
    buffers: KeyValues,
    index: SlotIndex,
    scale: float,
    window: Window | None,
    sinks: Tensor | None,
) -> Tensor:
    attended = torch.zeros_like(query, memory_format=torch.contiguous_format)
    for row in index.seen(buffers.keys.shape[2], window):
        asked, heads = query[row.tokens].float(), buffers.keys.shape[1]
        is_short = asked.shape[0] * asked.shape[1] <= MOST_IN_PLACE * heads
        if is_short and row.first is not None and sinks is None:
            found = _attend_contiguous(asked, buffers, row, scale)
        else:
            found = _attend_row(asked, buffers, row, scale, sinks)
        if row.visible is not None:
            found = found.masked_fill(~row.visible.any(1)[:, None, None], 0)
        attended[row.tokens] = found.to(query.dtype)
    return attended


def _visible(asking: range, seen: range, window: Window | None, like: Tensor) -> Tensor | None:
    """bool [T, L]: which of the positions ``seen`` each of ``asking`` sees; None: all see all."""
    if len(asking) == 1 and window is None and seen.stop <= asking.start + 1:
        return None
    positions = torch.arange(asking.start, asking.stop, device=like.device).unsqueeze(1)
    stored = torch.arange(seen.start, seen.stop, device=like.device)
    visible = stored <= positions
    return visible if window is None else visible & (stored >= window.first(positions))


def _attend_row(
    query: Tensor, buffers: KeyValues, row: SeenRow, scale: float, sinks: Tensor | None
) -> Tensor:
    """[T, Hq, D] of one row: T queries in float32 over a copy of what they see, [Hkv, L, D]."""
    keys, values = (row.read(buffer).float() for buffer in buffers)
    asked, visible = query.transpose(0, 1), row.visible
    mask = visible
    if sinks is not None:  # one more key of each head, which scores as the sink does and holds 0
        keys, values = (functional.pad(part, (0, 0, 0, 1)) for part in (keys, values))
        mask = asked.new_zeros(*asked.shape[:2], keys.shape[1])
        mask[:, :, -1] = sinks.float().unsqueeze(1)
        if visible is not None:
            mask[:, :, :-1].masked_fill_(~visible, -torch.inf)
    found: Tensor = functional.scaled_dot_product_attention(
        *(asked[None], keys[None], values[None], mask),
        scale=scale,
        enable_gqa=len(asked) > len(keys),
    )
    return found[0].transpose(0, 1)


def _attend_contiguous(query: Tensor, buffers: KeyValues, row: SeenRow, scale: float) -> Tensor:
    """``_attend_row`` over blocks at their addresses, as one matrix product each."""
    assert row.first is not None
    count, (_, heads, block, size) = len(query), buffers.keys.shape
    # Anything may be stored after the last position: its block is read by itself, up to there.
    num_whole, rest = divmod(len(row.positions), block)
    last = row.first + num_whole
    wholes = [buffer[row.first : last].float() for buffer in buffers]
    ends = [buffer[last, :, :rest].float() for buffer in buffers] if rest else []
    asked = scale * query.view(count, heads, -1, size).permute(1, 2, 0, 3).reshape(heads, -1, size)
    scores = (asked @ wholes[0].transpose(-1, -2)).permute(1, 2, 0, 3).flatten(2)
    if ends:
        scores = torch.cat([scores, asked @ ends[0].transpose(-1, -2)], 2)
    if row.visible is not None:
        scores.unflatten(1, (-1, count)).masked_fill_(~row.visible, -torch.inf)
    shares = scores.softmax(2)
    of_whole = shares[:, :, : num_whole * block].unflatten(2, (num_whole, block))
    mixed: Tensor = (of_whole.permute(2, 0, 1, 3) @ wholes[1]).sum(0)
    if ends:
        mixed = mixed.baddbmm(shares[:, :, num_whole * block :], ends[1])
    return mixed.view(heads, -1, count, size).permute(2, 0, 1, 3).reshape(query.shape)
