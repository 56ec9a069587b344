"""A causal LM by its stock modules: a row of padded tokens for each slot."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from guided_spec.models.lora.low_rank import adapters_of
from guided_spec.models.packed.blocks import Blocks, Prefix
from guided_spec.models.pictures.axes import SlotAxes
from guided_spec.models.pictures.spans import SlotSpans
from guided_spec.models.stock.kv_cache import SavedState
from guided_spec.models.stock.routed import ExpertLayers, ExpertRecorder
from guided_spec.models.stock.slot_trial import SlotTrial, errors_naming
from guided_spec.models.stock.slots import LogitsKind, SlotInputs, SlotOutput, StockSlots


class WithoutBlocks:
    """What a ``CausalLM`` says that keeps whole texts in its slots.

    There are no blocks, so every slot always has capacity for a whole text, and no text takes
    keys and values from another one.
    """

    shares_prefixes = False
    blocks: Blocks | None = None
    axes: SlotAxes | None = None
    spans: SlotSpans | None = None

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.model = model
        self.config: Any = model.config
        self.adapters = adapters_of(model)
        self.num_slots, self.max_length = num_slots, max_length
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.kv_dtype = self.dtype
        self.vocab_size: int = self.config.get_text_config(decoder=True).vocab_size

    def capture(self, hidden_layers: tuple[int, ...]) -> Iterator[None]:
        """Nothing: stock modules are not captured."""
        del hidden_layers
        yield from ()

    def forward_seconds(self, hidden_layers: tuple[int, ...]) -> dict[int, float]:
        """No graphs, so nothing was timed."""
        del hidden_layers
        return {}

    def start(self, slot: int, token_ids: Sequence[int], salt: Hashable = None) -> Prefix:
        """No prefix is kept."""
        del slot, token_ids, salt
        return Prefix(0, 0)

    def remember(self, slot: int, token_ids: Sequence[int], length: int) -> None:
        """Nothing: no text takes from another one."""

    def holds(self, slots: Sequence[int], lengths: Sequence[int]) -> bool:
        """True: a slot always holds a whole text."""
        del slots, lengths
        return True

    def grow(self, slot: int, length: int) -> bool:
        """True: a slot always holds a whole text."""
        del slot, length
        return True

    def has_blocks(self, length: int) -> bool:
        """True: there are no blocks to wait for."""
        del length
        return True

    def can_copy(self, length: int) -> bool:
        """True: an empty slot takes any copy."""
        del length
        return True


class SlotLM(WithoutBlocks):
    """A ``CausalLM`` whose slots are tensors of ``max_length`` positions each."""

    is_packed = False
    runs_as = "stock modules"

    @torch.inference_mode()
    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        super().__init__(model, num_slots, max_length)
        self._slots = stock_slots(model, num_slots, max_length)
        trial = SlotTrial(self._slots)
        trial.check_stock()
        trial.leave()
        self.expert_layers = ExpertLayers.of(model)
        self.axes, self.spans = self._slots.axes, self._slots.spans

    @property
    def has_linear_state(self) -> bool:
        """Whether a layer keeps a linear state, not keys and values."""
        return self._slots.cache.has_linear_state

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token."""
        return self._slots.cache.bytes_per_token()

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers in the keys and values of one token: their bytes in fp8."""
        return self._slots.cache.numbers_per_token()

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes of linear state of one slot, which does not grow with the text."""
        return self._slots.cache.state_bytes()

    @torch.inference_mode()
    def forward(
        self,
        inputs: SlotInputs,
        *,
        logits: LogitsKind = "all",
        hidden_layers: tuple[int, ...] = (),
        recorder: ExpertRecorder | None = None,
    ) -> SlotOutput:
        """One call of the model over padded rows; see ``CausalLM.forward``."""
        return self._slots.forward(inputs, logits, hidden_layers, recorder=recorder)

    @torch.inference_mode()
    def commit(self, keep: Sequence[int], counts: Sequence[int]) -> None:
        """Take linear states back to the tokens kept; keys and values are overwritten later."""
        del counts  # the cache knows them
        self._slots.cache.commit(keep)

    def release(self, slots: Sequence[int]) -> None:
        """Nothing: the next text overwrites the slot."""

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int], length: int) -> None:
        """Copy keys, values and linear states of ``source``."""
        self._slots.cache.copy_slot(source, destinations, length)

    @torch.inference_mode()
    def save_states(self, slots: Sequence[int]) -> Sequence[SavedState]:
        """A copy of the linear states of ``slots``, one ``SavedState`` a layer that has any."""
        return self._slots.cache.save_states(slots)

    @torch.inference_mode()
    def load_states(self, slots: Sequence[int], saved: Sequence[Any]) -> None:
        """Overwrite the linear states of ``slots`` with what ``save_states`` gave."""
        copied = [one for one in saved if isinstance(one, SavedState)]
        self._slots.cache.load_states(slots, copied)


def stock_slots(model: PreTrainedModel, num_slots: int, max_length: int) -> StockSlots:
    """The slots of a model. Raises ModelError where its layers cannot be kept so."""
    with errors_naming(model, "its layers cannot be kept in slots"):
        return StockSlots(model, num_slots, max_length)
