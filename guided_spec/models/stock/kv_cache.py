"""A KV cache of fixed slots for stock transformers models.

Each slot holds one text. A forward writes every row's new keys and values at that row's own
positions into that row's own slot, so rows of one batch may have any lengths, and rolling back
rejected tokens is a matter of integers: what is after a row's length is masked, and overwritten
before it can be seen.

Everything this package relies on of transformers' cache internals is here; tested with transformers
5.17 to 5.24.

Layers with a state (gated delta rules, Mamba-2) have one a slot, which ``commit`` moves to behind
the tokens that stay, see ``state_rules``. Layers of short convolutions (LFM2) have the window of
theirs alone, which ``commit`` cuts out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    LinearAttentionLayer,
    get_layer_types_and_kwargs,
)

from guided_spec.errors import ModelError
from guided_spec.models.attention import UNMASKED
from guided_spec.models.stock.state_rules import RecordedCall, show_state, take_recorded
from guided_spec.ops.attention.slot_attention import KeyValues, Window
from guided_spec.ops.host import to_device, zeros_on_demand

VIEW_BUCKET = 64


class StepPlan:
    """Made once a forward from host integers; shared by all layers, so that each does little.

    slots: [B] distinct slots. starts: [B] tokens already in each. counts: [B] real tokens of the
    ``num_tokens`` fed. Nothing here waits for the device.

    view: how many positions are read of every slot; None is as many as are needed, and few more.

    Buffers are [num_slots, heads, max_length + 1, head_dim]; position max_length takes the padding.
    """

    def __init__(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        num_tokens: int,
        max_length: int,
        view: int | None = None,
    ) -> None:
        self.slots = list(slots)
        self.num_tokens = num_tokens
        self.fresh = [slot for slot, start in zip(slots, starts, strict=True) if start == 0]
        end = max(start + count for start, count in zip(starts, counts, strict=True))
        buckets = -(-max(end, 1) // VIEW_BUCKET)
        self.view = min(max_length, buckets * VIEW_BUCKET) if view is None else view
        first = self.slots[0]
        self._range = first if self.slots == list(range(first, first + len(slots))) else None
        self._positions, self._columns = _positions_and_columns(
            starts, counts, num_tokens, max_length
        )
        self._on_device: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self._targets: dict[tuple[torch.device, int, int], Tensor] = {}

    def positions(self, device: torch.device) -> Tensor:
        """[B, T] int64: each token's position; 0 for padding, which any model can embed."""
        return self._upload(device)[1]

    def write(self, buffer: Tensor, states: Tensor) -> None:
        """Put states [B, heads, T, head_dim] where the tokens belong."""
        heads, length, width = buffer.shape[1:]
        rows = self._rows(buffer.device, heads, length)
        # One index for slot, head and position: much faster than index_put_ with one for each.
        buffer.view(-1, width).index_copy_(0, rows, states.reshape(-1, width))

    def read(self, buffer: Tensor) -> Tensor:
        """[B, heads, view, head_dim]: the batch's slots; a view where they are neighbours."""
        return self.gather(buffer.narrow(2, 0, self.view))

    def gather(self, buffer: Tensor) -> Tensor:
        """[B, ...]: the batch's slots of [num_slots, ...]; a view where they are neighbours."""
        if self._range is not None:
            return buffer.narrow(0, self._range, len(self.slots))
        return buffer.index_select(0, self._upload(buffer.device)[0])

    def scatter(self, buffer: Tensor, rows: Tensor) -> None:
        """Put rows [B, ...] into the batch's slots of [num_slots, ...]."""
        buffer.index_copy_(0, self._upload(buffer.device)[0], rows)

    def _upload(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """(slots [B], positions [B, T], columns [B, T]) on ``device``, by one copy."""
        if device not in self._on_device:
            slots = torch.tensor(self.slots).unsqueeze(1)
            packed = torch.cat([slots, self._positions, self._columns], 1)
            if device.type == "cuda":
                packed = packed.pin_memory().to(device, non_blocking=True)
            elif device.type != "cpu":
                packed = packed.to(device)
            first, last = packed[:, 1 : 1 + self.num_tokens], packed[:, 1 + self.num_tokens :]
            self._on_device[device] = (packed[:, 0], first.contiguous(), last)
        return self._on_device[device]

    def _rows(self, device: torch.device, heads: int, length: int) -> Tensor:
        """[B * heads * T]: where each vector of [B, heads, T] goes in the flattened buffer."""
        key = (device, heads, length)
        if key not in self._targets:
            slots, _, columns = self._upload(device)
            head = torch.arange(heads, device=device) + slots.unsqueeze(1) * heads  # [B, heads]
            rows = head.unsqueeze(2) * length + columns.unsqueeze(1)
            self._targets[key] = rows.flatten()
        return self._targets[key]


def _positions_and_columns(
    starts: Sequence[int], counts: Sequence[int], num_tokens: int, max_length: int
) -> tuple[Tensor, Tensor]:
    """([B, T] positions, [B, T] buffer columns), int64 on the CPU."""
    steps = torch.arange(num_tokens)
    positions = torch.tensor(starts).unsqueeze(1) + steps
    if all(count == num_tokens for count in counts):
        return positions, positions
    padding = steps >= torch.tensor(counts).unsqueeze(1)
    return positions.masked_fill(padding, 0), positions.masked_fill(padding, max_length)


class SavedState(NamedTuple):
    """Copies of the states of some slots: conv [n, channels, kernel], recurrent [n, ...] if any."""

    conv: Tensor
    recurrent: Tensor | None


class SlotLinearLayer(LinearAttentionLayer):
    """The convolution window of one layer, and its recurrent state if any, for every slot."""

    def __init__(self, num_slots: int) -> None:
        super().__init__()
        self.record_past = True  # keeps single tokens off the path that overwrites states
        self._num_slots = num_slots
        self._conv: Tensor | None = None  # [num_slots, channels, kernel]
        self._recurrent: Tensor | None = None  # [num_slots, heads, k_dim, v_dim]
        self._plan: StepPlan | None = None
        self._window: Tensor | None = None  # [B, channels, kernel + T]
        self._call: RecordedCall | None = None
        self._final: Tensor | None = None  # the recurrent state after all T tokens

    @property
    def nbytes(self) -> int:
        """Bytes of all slots' states."""
        return sum(b.nbytes for b in (self._conv, self._recurrent) if b is not None)

    def begin(self, plan: StepPlan) -> None:
        """Show transformers the states of the batch's slots; new texts start from zeros."""
        self._plan, self._window, self._call, self._final = plan, None, None, None
        for buffer, shown in zip(
            (self._conv, self._recurrent), (self.conv_states, self.recurrent_states), strict=True
        ):
            if buffer is not None:
                if plan.fresh:
                    # Through the CPU: a tensor made on a GPU from a list would wait for the GPU.
                    buffer.index_fill_(0, to_device(plan.fresh, buffer.device), 0)
                # A copy: a kernel may overwrite it, and the state before is needed again.
                shown[0] = plan.gather(buffer).clone()
                self.has_previous_state[0] = True

    def update_conv_state(
        self,
        conv_states: Tensor,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """[B, channels, kernel + T]: the window before the new columns, then the columns."""
        if state_idx != 0 or conv_kernel_size is None:
            raise ModelError("a linear-attention layer with several convolutions is not supported")
        if self._conv is None:
            shape = (self._num_slots, conv_states.shape[1], conv_kernel_size)
            self._conv = conv_states.new_zeros(shape)
            self.is_conv_states_initialized[0] = True
        assert self._plan is not None, "begin() comes before the forward"
        self._window = torch.cat([self._plan.gather(self._conv), conv_states], -1)
        show_state(self.recurrent_states[0])
        return self._window

    def update_recurrent_state(
        self, recurrent_states: Tensor, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Keep the state after all T tokens, and the call that led to it, until ``commit``."""
        call = take_recorded()
        if state_idx != 0:
            raise ModelError("a linear-attention layer with several states is not supported")
        if self._recurrent is None:
            shape = (self._num_slots, *recurrent_states.shape[1:])
            self._recurrent = recurrent_states.new_zeros(shape)
            self.is_recurrent_states_initialized[0] = True
        self._call, self._final = call, recurrent_states
        return recurrent_states

    def commit(self, keep: Tensor | None) -> None:
        """Store the states after the first ``keep`` [B] (on the CPU) tokens; None: after all."""
        assert self._plan is not None, "begin() comes before commit()"
        if self._window is None:
            return
        assert self._conv is not None
        kernel, final = self._conv.shape[-1], self._final
        if keep is None:
            conv = self._window[..., -kernel:]
        else:
            on_device = keep.to(self._window.device, non_blocking=True)
            columns = on_device[:, None] + torch.arange(kernel, device=on_device.device)
            columns = columns.unsqueeze(1).expand(-1, self._window.shape[1], -1)
            conv = self._window.gather(2, columns)
            final = None if final is None else self._replay(on_device)
        self._plan.scatter(self._conv, conv)
        if final is not None:
            assert self._recurrent is not None
            self._plan.scatter(self._recurrent, final.to(self._recurrent.dtype))
        self._window = self._call = self._final = None

    def save(self, slots: Sequence[int]) -> SavedState:
        """A copy of the states of ``slots``."""
        conv, recurrent = self._states()
        rows = to_device(slots, conv.device)
        kept = None if recurrent is None else recurrent.index_select(0, rows)
        return SavedState(conv.index_select(0, rows), kept)

    def load(self, slots: Sequence[int], saved: SavedState) -> None:
        """Put copies made by ``save`` into ``slots``."""
        conv, recurrent = self._states()
        rows = to_device(slots, conv.device)
        conv.index_copy_(0, rows, saved.conv)
        if recurrent is not None and saved.recurrent is not None:
            recurrent.index_copy_(0, rows, saved.recurrent)

    def _states(self) -> tuple[Tensor, Tensor | None]:
        assert self._conv is not None, "the first forward allocates the states"
        return self._conv, self._recurrent

    def _replay(self, keep: Tensor) -> Tensor:
        """The recurrent state after the first ``keep`` [B] tokens of the recorded call."""
        assert self._call is not None
        assert self._plan is not None
        assert self._recurrent is not None
        dropped = torch.arange(self._plan.num_tokens, device=keep.device) >= keep[:, None]
        return self._call.state(dropped, self._plan.gather(self._recurrent).clone())


# What transformers calls the layers of DeepSeek sparse attention: now, and up to 5.17.
INDEXED_TYPES = ("indexed_attention", "deepseek_sparse_attention")


class SlotCache(Cache):
    """The cache of one model: pass it as ``past_key_values`` after ``begin``.

    config: the model's configuration.
    num_slots: texts that can be stored.
    max_length: tokens of one text; position ``max_length`` takes what padding writes.

    Buffers [num_slots, heads, max_length + 1, head_dim] are allocated on the device of each layer
    by the first forward. Raises ModelError for a kind of layer that cannot be kept in slots.
    """

    def __init__(self, config: Any, *, num_slots: int, max_length: int) -> None:
        self.num_slots = num_slots
        self.max_length = max_length
        self.layer_types, self.windows = read_layers(config)
        most = unscaled_length(config)
        if most is not None and max_length > most:
            raise ModelError(
                f"model_type={config.model_type!r}: beyond {most} tokens it scales queries by "
                f"positions that it counts by itself; with max_model_len={most} texts run together"
            )
        self._plan: StepPlan | None = None
        super().__init__(layers=[self._build_layer(kind, config) for kind in self.layer_types])
        self._linear = [layer for layer in self.layers if isinstance(layer, SlotLinearLayer)]
        self._slotted = [layer for layer in self.layers if isinstance(layer, SlotLayer)]
        hybrid = [layer for layer in self._linear if isinstance(layer, SlotHybridLayer)]
        self._slotted += [layer.attention for layer in hybrid]

    @property
    def plan(self) -> StepPlan:
        """What the current forward feeds."""
        assert self._plan is not None, "begin() comes before the forward"
        return self._plan

    @property
    def has_linear_state(self) -> bool:
        """Whether some layers keep a state that has to be committed, not only keys and values."""
        return bool(self._linear)

    def begin(self, plan: StepPlan) -> None:
        """Say what the next forward feeds; drops what the last one left uncommitted."""
        self._plan = plan
        for layer in self._linear:
            layer.begin(plan)

    def commit(self, keep: Sequence[int]) -> None:
        """Move the linear states to after the first ``keep[b]`` tokens of each row just fed."""
        if self._linear:
            plan = self.plan
            kept = None if all(n == plan.num_tokens for n in keep) else torch.tensor(keep)
            for layer in self._linear:
                layer.commit(kept)

    def copy_slot(self, source: int, destinations: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions and the linear states of one slot to others."""
        for layer in self._slotted:
            _copy_positions(layer.buffers(), source, destinations, length)
        saved = self.save_states([source])
        for slot in destinations:
            self.load_states([slot], saved)

    def repeat(self, slot: int, source: int, start: int, end: int) -> None:
        """Fill positions ``start`` to ``end`` - 1 of a slot with what its ``source`` holds."""
        for layer in self._slotted:
            for buffer in layer.buffers():
                states = buffer[slot]
                states[..., start:end, :] = states[..., source : source + 1, :]

    def save_states(self, slots: Sequence[int]) -> list[SavedState]:
        """A copy of the linear states of ``slots``."""
        return [layer.save(slots) for layer in self._linear]

    def load_states(self, slots: Sequence[int], saved: list[SavedState]) -> None:
        """Put saved linear states into ``slots``, in the order they were saved in."""
        for layer, state in zip(self._linear, saved, strict=True):
            layer.load(slots, state)

    def layer_memory(self) -> list[KeyValues | None] | None:
        """Keys and values of each layer, None of those with a linear state.

        None in all when some layer keeps anything else, or none has keys. Once the first forward
        has allocated them they stay where they are.
        """
        memory: list[KeyValues | None] = []
        for layer in self.layers:
            if type(layer) is SlotLinearLayer:
                memory.append(None)
                continue
            if type(layer) is not SlotLayer or layer.keys is None or layer.values is None:
                return None
            memory.append(KeyValues(layer.keys, layer.values))
        return memory if any(memory) else None

    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token; 0 before the first forward."""
        buffers = [buffer for layer in self._slotted for buffer in layer.buffers()]
        return sum(b.nbytes // (b.shape[0] * b.shape[-2]) for b in buffers)

    def numbers_per_token(self) -> int:
        """Numbers in the keys and values of one token; 0 before the first forward."""
        buffers = [buffer for layer in self._slotted for buffer in layer.buffers()]
        return sum(b.numel() // (b.shape[0] * b.shape[-2]) for b in buffers)

    def state_bytes(self) -> int:
        """Bytes of linear state of one slot; 0 before the first forward."""
        return sum(layer.nbytes for layer in self._linear) // self.num_slots

    def _build_layer(self, kind: str, config: Any) -> Any:
        if kind in ("full_attention", "sliding_attention", "chunked_attention"):
            return SlotLayer(self)
        if kind in INDEXED_TYPES:
            return SlotIndexedLayer(self)
        if kind in UNMASKED:
            return SlotLinearLayer(self.num_slots)
        if kind == "hybrid":
            return SlotHybridLayer(self)
        if kind == "dummy":
            # Imported here: older versions leave such layers out of the list instead.
            from transformers import cache_utils

            dummy: Any = cache_utils
            return dummy.DummyLayer()
        raise ModelError(
            f"model_type={config.model_type!r}: layers of type {kind!r} cannot be kept in slots; "
            "use a model of full, sliding, chunked, indexed (DSA) or gated-delta attention, or of "
            "convolutions between them"
        )


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer; sliding layers keep their full length, the mask cuts them."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the slots; key_states and value_states: [B, heads, T, head_dim]."""
        self.keys = self._allocate(key_states)
        self.values = self._allocate(value_states)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [B, heads, T, head_dim]; returns the batch's [B, heads, view, head_dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values, plan = self.keys, self.values, self._cache.plan
        assert keys is not None
        assert values is not None
        plan.write(keys, key_states)
        plan.write(values, value_states)
        return plan.read(keys), plan.read(values)

    def buffers(self) -> list[Tensor]:
        """The slot buffers [num_slots, ..., max_length + 1, head_dim] there are by now."""
        return [buffer for buffer in (self.keys, self.values) if buffer is not None]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the keys that ``update`` returns."""
        del query_length
        return self._cache.plan.view, 0

    def get_seq_length(self) -> int:
        """Positions in front of those fed if they end the view: there is no length for all rows."""
        return self._cache.plan.view - self._cache.plan.num_tokens

    def get_max_length(self) -> int:
        """Tokens a slot can hold."""
        return self._cache.max_length

    def _allocate(self, states: Tensor) -> Tensor:
        slots, length = self._cache.num_slots, self._cache.max_length
        # Zeros, not garbage: a masked value is multiplied by 0, and 0 * NaN would show.
        return zeros_on_demand(states, (slots, states.shape[1], length + 1, states.shape[3]))


class SlotHybridLayer(SlotLinearLayer):
    """A layer with a state and with keys and values (Falcon-H1, Zamba 2)."""

    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__(cache.num_slots)
        self.attention = SlotLayer(cache)

    def update(self, *states: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """As ``SlotLayer.update``."""
        return self.attention.update(*states, **options)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As ``SlotLayer.get_mask_sizes``."""
        return self.attention.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        """As ``SlotLayer.get_seq_length``."""
        return self.attention.get_seq_length()

    def get_max_length(self) -> int:
        """As ``SlotLayer.get_max_length``."""
        return self.attention.get_max_length()


CacheLayerMixin.register(SlotHybridLayer)  # transformers asks whether a layer attends


class SlotIndexedLayer(SlotLayer):
    """A layer of DeepSeek sparse attention: it keeps one more key a token, for its indexer."""

    is_indexer_initialized = True

    def __init__(self, cache: SlotCache) -> None:
        super().__init__(cache)
        self.indexer_keys: Tensor | None = None  # [num_slots, 1, max_length + 1, index_head_dim]
        self.indexer_position_ids: Tensor | None = None

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Write [B, T, index_head_dim]; returns [B, view, index_head_dim]."""
        states = indexer_key_states.unsqueeze(1)
        if self.indexer_keys is None:
            self.indexer_keys = self._allocate(states)
        plan = self._cache.plan
        plan.write(self.indexer_keys, states)
        return plan.read(self.indexer_keys).squeeze(1)

    def buffers(self) -> list[Tensor]:
        """Keys, values and, where there is an indexer, its keys; see ``SlotLayer.buffers``."""
        indexer = [] if self.indexer_keys is None else [self.indexer_keys]
        return super().buffers() + indexer


def _copy_positions(
    buffers: Iterable[Tensor], source: int, destinations: Sequence[int], length: int
) -> None:
    """Copy the first ``length`` positions of one slot to others; buffers as of ``SlotLayer``."""
    for buffer in buffers:
        prefix = buffer[source].narrow(-2, 0, length)
        for slot in destinations:
            buffer[slot].narrow(-2, 0, length).copy_(prefix)


def unscaled_length(config: Any) -> int | None:
    """Up to how many tokens queries are not scaled by their positions, as Llama 4's are; None: any.

    It counts these positions by itself, for all rows together.
    """
    text_config = config.get_text_config(decoder=True)
    if not getattr(text_config, "attn_temperature_tuning", False):
        return None
    return int(text_config.floor_scale) - 1


def read_layers(config: Any) -> tuple[list[str], dict[str, Window]]:
    """The type of each layer of the decoder, and the window of each type that has one.

    Raises ModelError when layers of one type have different windows.
    """
    text_config = config.get_text_config(decoder=True)
    read: Any = get_layer_types_and_kwargs  # its type depends on the version
    types, options = read(text_config)
    if isinstance(options, dict):  # 5.17: one for all layers
        options = [options] * len(types)
    windows: dict[str, Window] = {}
    for kind, option in zip(types, options, strict=True):
        if kind in ("sliding_attention", "chunked_attention"):
            # transformers names both so
            window = Window(option["sliding_window"], is_chunk=kind == "chunked_attention")
            if windows.setdefault(kind, window) != window:
                raise ModelError(
                    f"model_type={config.model_type!r}: its {kind} layers have different windows "
                    f"({windows[kind].size} and {window.size}), which is not supported"
                )
    return types, windows
