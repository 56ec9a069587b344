"""A model's decoder in packed form, found and tried before texts are kept with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.config import Kernels
from guided_spec.errors import ModelError
from guided_spec.models.packed.blocks import Blocks, KeptShape, WholeSlots, index_over
from guided_spec.models.packed.decoder import LayerStates, PackedDecoder, refusing_waits
from guided_spec.models.packed.packed_lm import PackedLM
from guided_spec.models.slot_lm import stock_slots
from guided_spec.models.stock.decoder import StockDecoder
from guided_spec.models.stock.slot_trial import SlotTrial, errors_naming
from guided_spec.models.stock.slots import StockSlots
from guided_spec.ops.attention.slot_attention import FP8, KeyValues
from guided_spec.ops.delta_rule import DeltaStates
from guided_spec.ops.kernels import has_triton

PROBE = (1, 2, 3, 5)  # token ids
TRIAL_SLOTS = 2
LONGEST_DRAFT = 16  # tokens of a row that may be taken back, unless more are asked for
TRIAL_LENGTH = 256  # positions of a slot in which a packed form is tried; more with windows

PACKED_DEVICES = ("cpu", "cuda")  # where "auto" is packed

logger = logging.getLogger(__name__)


def is_packed_on(device: torch.device, kernels: Kernels) -> bool:
    """Whether ``kernels`` asks for the packed form of what has one."""
    has_kernels = device.type != "cuda" or has_triton()
    is_served = device.type in PACKED_DEVICES and has_kernels
    return kernels == "packed" or (kernels == "auto" and is_served)


class LayerShape(NamedTuple):
    """What a layer keeps of a token; like: of its dtype and device."""

    kept: KeptShape
    like: Tensor

    @classmethod
    def of(cls, memory: KeyValues) -> LayerShape:
        """The shape of a layer with these keys and values."""
        _, heads, _, size = memory.keys.shape
        kept = KeptShape(heads, size, memory.values.shape[3])
        return cls(kept, memory.keys.new_empty(0))


class PackedForm(NamedTuple):
    """A model's decoder in packed form, which was tried and is right, and what its layers keep.

    layers: [L], None of those that keep a state a slot.
    """

    decoder: PackedDecoder | StockDecoder
    layers: tuple[LayerShape | None, ...]

    def allocate(self, blocks: Blocks, num_slots: int, longest_draft: int) -> list[LayerStates]:
        """[L]: memory in the blocks, and states of the slots; see ``DeltaStates``."""
        allocated = [None if one is None else blocks.allocate(*one) for one in self.layers]
        return _joined(allocated, self.decoder.states(num_slots, longest_draft))

    def in_fp8(self) -> PackedForm:
        """The same one, which keeps keys and values in fp8, or latents; states stay as they are."""
        layers = (one and one._replace(like=one.like.to(FP8)) for one in self.layers)
        return self._replace(layers=tuple(layers))

    def state_bytes(self, longest_draft: int) -> int:
        """Bytes of linear state of one slot; 0 where no layer keeps any."""
        return sum(part.nbytes for one in self.decoder.states(1, longest_draft) for part in one)

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel, kernels: Kernels, max_length: int) -> PackedForm | None:
        """The form in which ``kernels`` runs the model; None where that is its stock modules.

        Raises ModelError as ``make_causal_lm`` does.
        """
        if not is_packed_on(model.device, kernels):
            return None
        tried_slots = _tried(model, max_length, kernels)
        if tried_slots is None:
            return None
        slots, trial = tried_slots
        known = slots.cache.layer_memory()
        windows = [slots.cache.windows.get(kind) for kind in slots.cache.layer_types]
        if known is None:
            return None
        makers: list[Callable[[], PackedDecoder | StockDecoder | None]]
        makers = [partial(PackedDecoder.of, model, max_length, windows)]
        if all(known):
            makers.append(partial(StockDecoder.of, model, max_length))
        for make in makers:
            try:
                with errors_naming(model, "a forward in packed form failed"):
                    decoder = _right(make, known, slots, trial)
            except ModelError as error:
                if kernels == "packed":
                    raise
                logger.warning("%s. It runs by its stock modules instead.", error)
                continue
            if decoder is not None:
                shapes = (None if one is None else LayerShape.of(one) for one in known)
                return cls(decoder, tuple(shapes))
        return None


def _right(
    make: Callable[[], PackedDecoder | StockDecoder | None],
    known: Sequence[KeyValues | None],
    slots: StockSlots,
    trial: SlotTrial,
) -> PackedDecoder | StockDecoder | None:
    """What ``make`` gives, tried; None where it gives none, or one that waits for the device.

    known: what each layer keeps, as of the cache of ``slots``.

    Raises ModelError where it computes something else.
    """
    decoder = make()
    if decoder is None:
        return None
    memory = _joined(known, decoder.states(TRIAL_SLOTS, LONGEST_DRAFT))
    tables = WholeSlots(TRIAL_SLOTS, slots.cache.max_length, slots.model.device, slots.axes)
    tried = PackedLM(decoder, memory, tables, spans=slots.spans)
    if slots.model.device.type == "cuda":
        _compile_ahead(partial(trial.feed, tried.forward))
    if not _can_be_captured(decoder, memory, tables):
        return None
    trial.check_packed(tried.forward)
    return decoder


def _tried(
    model: PreTrainedModel, max_length: int, kernels: Kernels
) -> tuple[StockSlots, SlotTrial] | None:
    """Slots of the model's stock modules, as long as a packed form needs to be tried in.

    None where these cannot run over slots either, and ``kernels`` does not ask for it.
    """
    try:
        slots = stock_slots(model, TRIAL_SLOTS, max_length)
        longest = max([TRIAL_LENGTH, *(2 * one.size for one in slots.cache.windows.values())])
        if max_length > longest:
            slots = stock_slots(model, TRIAL_SLOTS, longest)
        trial = SlotTrial(slots)
        trial.check_stock()
    except ModelError:
        if kernels == "packed":
            raise
        return None
    return slots, trial


def _joined(memory: Sequence[KeyValues | None], states: Sequence[DeltaStates]) -> list[LayerStates]:
    """[L]: the memory of each layer, or its states where it has none."""
    left = iter(states)
    return [next(left) if kept is None else kept for kept in memory]


def _compile_ahead(feed: Callable[[], None]) -> None:
    """Compile the kernels of ``feed`` at once, which else come one after another.

    What it cannot do without them fails where it is done with them.
    """
    from guided_spec.ops.launch_triton import compiling_ahead  # imported here: it needs triton

    with suppress(ModelError, RuntimeError), compiling_ahead():
        feed()


def _can_be_captured(
    decoder: PackedDecoder | StockDecoder, memory: Sequence[LayerStates], slots: WholeSlots
) -> bool:
    """Whether slots do for its attention, and nothing in it waits for the device.

    memory: of the slots. Writes to the first positions of slot 0.
    """
    device = slots.tables.device
    ids = torch.tensor(PROBE, device=device)
    steps = torch.arange(len(PROBE), device=device)
    rows = torch.tensor([[0], [0], [len(PROBE)]], device=device)
    index = index_over(slots, torch.stack([0 * steps, steps]), rows)
    try:
        decoder.forward(ids, index, memory)
        if device.type == "cuda":  # the first one may have waited to set up libraries
            with refusing_waits():
                decoder.forward(ids, index, memory)
    except ModelError:  # of the attention over slots, for what it does not support
        return False
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return False
    return True
