"""A causal LM over KV slots: rows of any lengths in one forward, per-row commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.config import Kernels
from guided_spec.errors import ModelError
from guided_spec.models.packed.blocks import BLOCK, Blocks, Prefix, WholeSlots
from guided_spec.models.packed.decoder import LayerStates, PackedDecoder, refusing_waits
from guided_spec.models.packed.graph_pool import CaptureWindow, GraphPool
from guided_spec.models.packed.packed_lm import LineOutput, PackedLM, Rows
from guided_spec.models.stock.decoder import StockDecoder
from guided_spec.models.stock.kv_cache import SavedState
from guided_spec.models.stock.slot_trial import SlotTrial, errors_naming
from guided_spec.models.stock.slots import LogitsKind, SlotInputs, SlotOutput, StockSlots
from guided_spec.models.target import check_layers
from guided_spec.ops.attention.slot_attention import KeyValues, SlotIndex
from guided_spec.ops.delta_rule import DeltaStates
from guided_spec.ops.host import to_device
from guided_spec.ops.kernels import has_triton

PROBE = (1, 2, 3, 5)  # token ids
TRIAL_SLOTS = 2
LONGEST_DRAFT = 16  # tokens of a row that may be taken back, unless more are asked for
TRIAL_LENGTH = 256  # positions of a slot in which a packed form is tried; more with windows

PACKED_DEVICES = ("cpu", "cuda")  # where "auto" is packed

SavedStates = Sequence[SavedState | DeltaStates]  # of each layer with a linear state

logger = logging.getLogger(__name__)


def is_packed_on(device: torch.device, kernels: Kernels) -> bool:
    """Whether ``kernels`` asks for the packed form of what has one."""
    has_kernels = device.type != "cuda" or has_triton()
    is_served = device.type in PACKED_DEVICES and has_kernels
    return kernels == "packed" or (kernels == "auto" and is_served)


class LayerShape(NamedTuple):
    """What a layer keeps of a token: heads of a size each; like: of its dtype and device."""

    heads: int
    size: int
    like: Tensor

    @classmethod
    def of(cls, memory: KeyValues) -> LayerShape:
        """Of a layer that keeps these."""
        _, heads, _, size = memory.keys.shape
        return cls(heads, size, memory.keys.new_empty(0))


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

    def state_bytes(self, longest_draft: int) -> int:
        """Bytes of linear state of one slot; 0 where no layer keeps any."""
        return sum(part.nbytes for one in self.decoder.states(1, longest_draft) for part in one)

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel, kernels: Kernels, max_length: int) -> PackedForm | None:
        """The form in which ``kernels`` runs the model; None where that is its stock modules.

        Raises ModelError as ``CausalLM`` does.
        """
        if not is_packed_on(model.device, kernels):
            return None
        slots = _stock_slots(model, TRIAL_SLOTS, max_length)
        longest = max([TRIAL_LENGTH, *(2 * window for window in slots.cache.windows.values())])
        if max_length > longest:
            slots = _stock_slots(model, TRIAL_SLOTS, longest)
        trial = SlotTrial(slots)
        trial.check_stock()
        known = slots.cache.layer_memory()
        windows = [slots.cache.windows.get(kind) for kind in slots.cache.layer_types]
        if known is None:
            return None
        try:
            with errors_naming(model, "a forward in packed form failed"):
                decoder: PackedDecoder | StockDecoder | None
                decoder = PackedDecoder.of(model, max_length, windows)
                if decoder is None and all(known):
                    decoder = StockDecoder.of(model, max_length)
                if decoder is None:
                    return None
                memory = _joined(known, decoder.states(TRIAL_SLOTS, LONGEST_DRAFT))
                tables = WholeSlots(TRIAL_SLOTS, slots.cache.max_length, model.device)
                tried = PackedLM(decoder, memory, tables)
                if model.device.type == "cuda":
                    _compile_ahead(partial(trial.feed, tried.forward))
                if not _can_be_captured(decoder, memory, tables):
                    return None
                trial.check_packed(tried.forward)
        except ModelError as error:
            if kernels == "packed":
                raise
            logger.warning("%s. It runs by its stock modules instead.", error)
            return None
        return cls(decoder, tuple(None if one is None else LayerShape.of(one) for one in known))


class CausalLM:
    """A transformers model and the slots its texts are kept in.

    model: a decoder of transformers with attention "sdpa" or "eager", of a family that keeps to its
        masks and positions (docs/models.md); it is not changed, and may be shared by several of
        these (each keeps its own slots), not by threads.
    num_slots: texts at a time. max_length: tokens of a text.
    form: its packed form for this ``max_length``, found before; None for none.
    num_blocks: of ``BLOCK`` tokens each that a packed form keeps at most; None for all slots full.
    shared_blocks: the tables by which another model keeps the same texts: a packed form keeps its
        own keys and values by them, and that model's owner decides which slot has which blocks.
    window: in which CUDA graphs are captured; None never closes.
    width: about how many tokens a row of most forwards has; only kernels are tuned by it.
    longest_draft: tokens of a row that ``commit`` may keep in part, where a packed form has a
        linear state.
    kernels: "auto" runs a llama-like model on one device in packed form, and as CUDA graphs where
        there are any (its projections become views of packed ones, its results change by rounding
        only); "packed" fills forwards up as graphs need it on any device, for tests; "stock" does
        neither. Models without a packed form keep their stock one.

    Runs a few tokens through the model by itself and through the slots, see ``SlotTrial``, which
    also allocates the slots' memory. Raises ModelError, naming the model's type and the reason,
    when it cannot run over slots, or would write other texts there. Where only its packed form
    would, "packed" raises ModelError, and "auto" logs a warning and keeps the stock one.
    """

    @torch.inference_mode()
    def __init__(  # noqa: PLR0913 - how a model is kept
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_length: int,
        kernels: Kernels = "auto",
        form: PackedForm | Literal["find"] | None = "find",
        num_blocks: int | None = None,
        shared_blocks: Blocks | None = None,
        width: int = 1,
        longest_draft: int = LONGEST_DRAFT,
        window: CaptureWindow | None = None,
    ) -> None:
        self.model = model
        self.config: Any = model.config
        self.num_slots = num_slots
        self.max_length = max_length
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        text_config = self.config.get_text_config(decoder=True)
        self.vocab_size: int = text_config.vocab_size
        _check_rope(self.config.model_type, text_config, max_length)
        self.blocks: Blocks | None = None
        self._packed: PackedLM | None = None
        self._slots: StockSlots | None = None
        self._is_guest = shared_blocks is not None  # whose tables are not its own
        self._longest_draft = longest_draft
        self._counts: Sequence[int] = ()  # tokens of the rows just fed
        found = PackedForm.of(model, kernels, max_length) if form == "find" else form
        if found is None:
            self._slots = _stock_slots(model, num_slots, max_length)
            SlotTrial(self._slots).check_stock()
            return
        self.blocks = shared_blocks or Blocks(num_slots, max_length, self.device, num_blocks)
        memory = found.allocate(self.blocks, num_slots, longest_draft)
        # Without graphs there is nothing to fill a forward up for, other than in tests.
        is_padded = self.device.type == "cuda" or kernels == "packed"
        graphs = GraphPool(self.device, window) if is_padded else None
        self._packed = PackedLM(found.decoder, memory, self.blocks, width=width, graphs=graphs)

    @property
    def is_packed(self) -> bool:
        """Whether forwards run in packed form; see ``kernels``."""
        return self._packed is not None

    @property
    def runs_as(self) -> str:
        """What computes, in words."""
        return "stock modules" if self._packed is None else self._packed.runs_as

    @property
    def has_linear_state(self) -> bool:
        """Whether ``commit`` does work, and going back needs ``save_states``."""
        if self._packed is not None:
            return bool(self._packed.states)
        return self._slots is not None and self._slots.cache.has_linear_state

    @property
    def shares_prefixes(self) -> bool:
        """Whether texts that share a prefix may share blocks: a linear state has no prefix."""
        return self.blocks is not None and not self.has_linear_state

    @torch.inference_mode()
    def forward(
        self,
        inputs: SlotInputs,
        *,
        logits: LogitsKind = "all",
        hidden_layers: tuple[int, ...] = (),
    ) -> SlotOutput:
        """Feed the tokens, store their keys and values; never waits for the device.

        logits: of all tokens, of each row's last real one, or none.
        hidden_layers: hidden states to return: index i is the input of layer i, n (the number of
            layers) the output of the last layer, and -1 that output after the final norm.

        Call ``commit`` before the next forward. Raises ModelError for a layer that the model does
        not have.
        """
        if self._packed is not None:
            check_layers(hidden_layers, len(self._packed.memory))
            self._counts = inputs.counts
            return self._packed.forward(inputs, logits, hidden_layers)
        return self._stock.forward(inputs, logits, hidden_layers)

    @torch.inference_mode()
    def forward_line(
        self,
        token_ids: Tensor,
        rows: Rows,
        hidden_layers: tuple[int, ...] = (),
        overlapped: Callable[[], None] | None = None,
    ) -> LineOutput:
        """``forward`` of tokens int64 [N] in one line; of a packed model.

        See ``PackedLM.forward_line``; ``logits`` makes logits of what it returns.
        """
        assert self._packed is not None, "stock models take one row a slot"
        self._counts = rows.counts
        return self._packed.forward_line(token_ids, rows, hidden_layers, overlapped)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """The states of ``forward_line`` [..., H] to logits [..., V]."""
        assert self._packed is not None
        return self._packed.logits(states)

    @torch.inference_mode()
    def capture(self, hidden_layers: tuple[int, ...]) -> Iterator[None]:
        """Capture the CUDA graphs of forwards, one at each ``next``.

        hidden_layers: that the forwards will be asked for.
        """
        if self._packed is not None and self.device.type == "cuda":
            yield from self._packed.capture(hidden_layers)

    @torch.inference_mode()
    def forward_seconds(self, hidden_layers: tuple[int, ...]) -> dict[int, float]:
        """What forwards take that ``capture`` captured, by their tokens, in seconds."""
        return {} if self._packed is None else self._packed.forward_seconds(hidden_layers)

    @torch.inference_mode()
    def commit(self, keep: Sequence[int]) -> None:
        """Keep the first ``keep[b]`` of the tokens just fed to each row, 0 to ``counts[b]``.

        A packed form does no work: the next ``starts`` say what counts. Raises ModelError where its
        linear states cannot go back, because a row had more than ``longest_draft`` tokens.
        """
        if self._slots is not None:
            self._slots.cache.commit(keep)
            return
        pairs = zip(keep, self._counts, strict=False)  # prompts after the rows stay
        cut = max((count for kept, count in pairs if kept < count), default=0)
        if self.has_linear_state and cut > self._longest_draft:
            raise ModelError(
                f"keep={list(keep)}: a linear state goes back over rows of {self._longest_draft} "
                f"tokens, and one had {cut}; make the CausalLM with a larger longest_draft"
            )

    def start(self, slot: int, token_ids: Sequence[int], salt: Hashable = None) -> Prefix:
        """Begin a text in the slot with what is kept of texts that began so.

        token_ids: how the text begins, as far as it may be taken from others. salt: texts take from
        those with the same one.
        """
        return Prefix(0, 0) if self.blocks is None else self.blocks.start(slot, token_ids, salt)

    def remember(self, slot: int, token_ids: Sequence[int], length: int) -> None:
        """The slot holds the first ``length`` of these for good: others may take whole blocks."""
        if self.blocks is not None:
            self.blocks.remember(slot, token_ids, length)

    def holds(self, slots: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether ``grow`` has been done for all of these."""
        return self.blocks is None or self.blocks.holds(slots, np.array(lengths, dtype=np.int64))

    def grow(self, slot: int, length: int) -> bool:
        """Whether the slot can hold so many tokens; it then keeps the blocks until its release."""
        return self.blocks is None or self.blocks.grow(slot, length)

    def release(self, slots: Sequence[int]) -> None:
        """The texts of these slots have ended."""
        if self.blocks is not None and not self._is_guest:
            self.blocks.release(slots)

    def has_blocks(self, length: int) -> bool:
        """Whether the free blocks would hold a text of so many tokens.

        As far as a slot holds them: what is beyond ``max_length`` needs none.
        """
        needed = min(length, self.max_length)
        return self.blocks is None or self.blocks.num_free * BLOCK >= needed

    def can_copy(self, length: int) -> bool:
        """Whether an empty slot can hold a copy of so many tokens of another one."""
        return self.blocks is None or self.blocks.can_share(length)

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int], length: int) -> None:
        """Make ``destinations`` hold the first ``length`` tokens of ``source``.

        Linear states are copied as they are: with these, ``source`` must hold just ``length``.
        With ``shared_blocks``, the slots must have blocks for so many tokens already.
        """
        if self._slots is not None:
            self._slots.cache.copy_slot(source, destinations, length)
            return
        assert self.blocks is not None
        assert self._packed is not None
        give = self.blocks.copy_own if self._is_guest else self.blocks.share
        for slot in destinations:
            give(source, slot, length, self._packed.key_values)
        self.load_states(destinations, self.save_states([source] * len(destinations)))

    @torch.inference_mode()
    def save_states(self, slots: Sequence[int]) -> SavedStates:
        """A copy of the committed linear states of ``slots``; empty for attention-only models."""
        if self._slots is not None:
            return self._slots.cache.save_states(slots)
        assert self._packed is not None
        rows = to_device(slots, self.device)
        return [DeltaStates(*(part[rows] for part in one)) for one in self._packed.states]

    @torch.inference_mode()
    def load_states(self, slots: Sequence[int], saved: SavedStates) -> None:
        """Put back what ``save_states`` gave, into as many slots."""
        if self._slots is not None:
            copied = [one for one in saved if isinstance(one, SavedState)]
            self._slots.cache.load_states(slots, copied)
            return
        assert self._packed is not None
        rows = to_device(slots, self.device)
        copies = [one for one in saved if isinstance(one, DeltaStates)]
        for states, copy in zip(self._packed.states, copies, strict=True):
            for part, rest in zip(states, copy, strict=True):
                part[rows] = rest

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token; of a stock model."""
        return self._stock.cache.bytes_per_token()

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes of linear state of one slot, which does not grow with the text; of a stock one."""
        return self._stock.cache.state_bytes()

    @property
    def _stock(self) -> StockSlots:
        assert self._slots is not None
        return self._slots


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
    index = SlotIndex(torch.stack([0 * steps, steps]), rows, slots.tables[:1], slots.max_length)
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


def _stock_slots(model: PreTrainedModel, num_slots: int, max_length: int) -> StockSlots:
    with errors_naming(model, "its layers cannot be kept in slots"):
        return StockSlots(model, num_slots, max_length)


def largest_context(text_config: Any) -> int | None:
    """Tokens of a text that the model takes over slots at most; None if its config says nothing.

    Less than it was made for where its rotary embedding depends on the longest text of a batch: up
    to its original context it does not.
    """
    own: int | None = getattr(text_config, "max_position_embeddings", None)
    _, limit = _growing_rope(text_config)
    return own if limit is None else limit


def _check_rope(model_type: str, text_config: Any, max_length: int) -> None:
    """Refuse rotary embeddings whose frequencies depend on the longest text of a batch."""
    kind, limit = _growing_rope(text_config)
    if limit is not None and max_length > limit:
        raise ModelError(
            f"model_type={model_type!r}, max_length={max_length}: its {kind} rotary embedding "
            f"depends on the longest text of the batch beyond {limit} tokens; use a max_length of "
            f"at most {limit}"
        )


def _growing_rope(text_config: Any) -> tuple[str, int | None]:
    """The kind of such an embedding and up to where it is none; None for other kinds."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "")
    if kind not in ("dynamic", "longrope"):
        return kind, None
    original = parameters.get("original_max_position_embeddings")
    return kind, original or text_config.max_position_embeddings
