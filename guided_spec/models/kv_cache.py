"""A KV cache of fixed slots for stock transformers models.

Each slot holds one text. A forward writes every row's new keys and values at that row's own
positions into that row's own slot, so rows of one batch may have any lengths, and rolling back
rejected tokens is a matter of integers: what lies behind a row's length is masked, and overwritten
before it can be seen.

Everything this package relies on of transformers' cache internals is here and in
``guided_spec.models.linear_state``; tested with transformers 5.17 to 5.23.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from guided_spec.errors import ModelError
from guided_spec.models.linear_state import SavedState, SlotLinearLayer
from guided_spec.models.step_plan import StepPlan
from guided_spec.ops.slot_attention import KeyValues

__all__ = ["SlotCache", "copy_positions"]

_ALIGNMENT = 64  # bytes, as of torch's own memory

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
        self._plan: StepPlan | None = None
        super().__init__(layers=[self._build_layer(kind, config) for kind in self.layer_types])
        self._linear = [layer for layer in self.layers if isinstance(layer, SlotLinearLayer)]
        self._slotted = [layer for layer in self.layers if isinstance(layer, SlotLayer)]

    @property
    def plan(self) -> StepPlan:
        """What the forward in flight feeds."""
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
        """Move the linear states to behind the first ``keep[b]`` tokens of each row just fed."""
        if self._linear:
            plan = self.plan
            kept = None if all(n == plan.num_tokens for n in keep) else torch.tensor(keep)
            for layer in self._linear:
                layer.commit(kept)

    def copy_slot(self, source: int, destinations: Sequence[int], length: int) -> None:
        """Copy the first ``length`` positions and the linear states of one slot to others."""
        for layer in self._slotted:
            copy_positions(layer.buffers(), source, destinations, length)
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

    def layer_memory(self) -> list[KeyValues] | None:
        """Keys and values of each layer; None when some layer keeps anything else.

        Once the first forward has allocated them they stay where they are.
        """
        memory = []
        for layer in self.layers:
            if type(layer) is not SlotLayer or layer.keys is None or layer.values is None:
                return None
            memory.append(KeyValues(layer.keys, layer.values))
        return memory

    def bytes_per_token(self) -> int:
        """Bytes of keys and values of one token; 0 before the first forward."""
        buffers = [buffer for layer in self._slotted for buffer in layer.buffers()]
        return sum(b.nbytes // (b.shape[0] * b.shape[-2]) for b in buffers)

    def state_bytes(self) -> int:
        """Bytes of linear state of one slot; 0 before the first forward."""
        return sum(layer.nbytes for layer in self._linear) // self.num_slots

    def _build_layer(self, kind: str, config: Any) -> Any:
        if kind in ("full_attention", "sliding_attention"):
            return SlotLayer(self)
        if kind in INDEXED_TYPES:
            return SlotIndexedLayer(self)
        if kind == "linear_attention":
            return SlotLinearLayer(self.num_slots)
        if kind == "dummy":
            # Imported here: older versions leave such layers out of the list instead.
            from transformers import cache_utils

            dummy: Any = cache_utils
            return dummy.DummyLayer()
        raise ModelError(
            f"model_type={config.model_type!r}: layers of type {kind!r} cannot be kept in slots; "
            "use a model of full, sliding, indexed (DSA) or gated-delta attention layers"
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
        return _zeros(states, (slots, states.shape[1], length + 1, states.shape[3]))


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
        """See ``SlotLayer.buffers``."""
        indexer = [] if self.indexer_keys is None else [self.indexer_keys]
        return super().buffers() + indexer


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """On the CPU memory that the system hands out as it is written to, which torch's own is not."""
    if type(like) is not Tensor or like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(like.dtype).view(shape)


def copy_positions(
    buffers: Iterable[Tensor], source: int, destinations: Sequence[int], length: int
) -> None:
    """Copy the first ``length`` positions of one slot to others; buffers as of ``SlotLayer``."""
    for buffer in buffers:
        prefix = buffer[source].narrow(-2, 0, length)
        for slot in destinations:
            buffer[slot].narrow(-2, 0, length).copy_(prefix)


def read_layers(config: Any) -> tuple[list[str], dict[str, int]]:
    """The type of each layer of the decoder, and the window of each type that slides.

    Raises ModelError when layers of one type have different windows.
    """
    text_config = config.get_text_config(decoder=True)
    read: Any = get_layer_types_and_kwargs  # its type depends on the version
    types, options = read(text_config)
    if isinstance(options, dict):  # 5.17: one for all layers
        options = [options] * len(types)
    windows: dict[str, int] = {}
    for kind, option in zip(types, options, strict=True):
        if kind == "sliding_attention":
            window = option["sliding_window"]
            if windows.setdefault(kind, window) != window:
                raise ModelError(
                    f"model_type={config.model_type!r}: its sliding layers have different windows "
                    f"({windows[kind]} and {window}), which is not supported"
                )
    return types, windows
