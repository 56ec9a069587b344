"""A causal LM over KV slots: rows of any lengths in one forward, per-row commit."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Literal, Protocol

import torch
from transformers import PreTrainedModel

from guided_spec.config import Kernels
from guided_spec.errors import ModelError
from guided_spec.models.line_lm import LineLM
from guided_spec.models.lora.slot_adapters import SlotAdapters
from guided_spec.models.packed.blocks import Blocks, Prefix
from guided_spec.models.packed.graph_pool import CaptureWindow, GraphPool
from guided_spec.models.packed_form import LONGEST_DRAFT, PackedForm
from guided_spec.models.pictures.axes import SlotAxes
from guided_spec.models.pictures.spans import SlotSpans
from guided_spec.models.rope import growing_rope
from guided_spec.models.slot_lm import SlotLM
from guided_spec.models.stock.routed import ExpertLayers, ExpertRecorder
from guided_spec.models.stock.slot_trial import MissingRowError
from guided_spec.models.stock.slots import LogitsKind, SlotInputs, SlotOutput
from guided_spec.models.text_lm import TextLM

logger = logging.getLogger(__name__)


class CausalLM(Protocol):
    """A transformers model and the slots of its texts: a ``LineLM``, ``SlotLM`` or ``TextLM``.

    model: it is not changed, and may be shared by several of these (each keeps its own slots), not
        by threads. config: the model's. num_slots: texts at a time. max_length: tokens of a text.
    kv_dtype: of keys and values.
    blocks: where keys and values are kept in blocks; else None.
    is_packed: whether it is a ``LineLM``. runs_as: what computes, in words.
    has_linear_state: whether going back needs ``save_states``.
    shares_prefixes: whether texts with the same beginning may have blocks in common.
    axes: the positions of texts with pictures, where they have three axes; else None.
    expert_layers: those that choose experts which a forward can record.
    spans: where pictures are read in both directions, those of the texts; else None.
    adapters: of the model, and by which of them each slot's text is written; None without any.
    """

    model: PreTrainedModel
    config: Any
    num_slots: int
    max_length: int
    device: torch.device
    dtype: torch.dtype
    vocab_size: int
    blocks: Blocks | None
    adapters: SlotAdapters | None

    @property
    def kv_dtype(self) -> torch.dtype: ...

    @property
    def axes(self) -> SlotAxes | None: ...

    @property
    def expert_layers(self) -> ExpertLayers: ...

    @property
    def spans(self) -> SlotSpans | None: ...

    @property
    def is_packed(self) -> bool: ...

    @property
    def runs_as(self) -> str: ...

    @property
    def has_linear_state(self) -> bool: ...

    @property
    def shares_prefixes(self) -> bool: ...

    def forward(
        self,
        inputs: SlotInputs,
        *,
        logits: LogitsKind = "all",
        hidden_layers: tuple[int, ...] = (),
        recorder: ExpertRecorder | None = None,
    ) -> SlotOutput:
        """Feed the tokens, store their keys and values; never waits for the device.

        logits: of all tokens, of each row's last real one, or none.
        hidden_layers: hidden states to return: index i is the input of layer i, n (the number of
            layers) the output of the last layer, and -1 that output after the final norm.
        recorder: of ``expert_layers``; it has the experts afterwards, [B * T, ...], arbitrary at
            padding.

        Call ``commit`` before the next forward. Raises ModelError for a layer that the model does
        not have.
        """
        ...

    def commit(self, keep: Sequence[int], counts: Sequence[int]) -> None:
        """Keep the first ``keep[b]`` of the ``counts[b]`` tokens just fed to each row.

        Raises ModelError where a linear state cannot go back so far.
        """
        ...

    def capture(self, hidden_layers: tuple[int, ...]) -> Iterator[None]:
        """Capture the CUDA graphs of forwards, one at each ``next``.

        hidden_layers: that the forwards will be asked for.
        """
        ...

    def forward_seconds(self, hidden_layers: tuple[int, ...]) -> dict[int, float]:
        """What forwards take that ``capture`` captured, by their number of tokens, in seconds."""
        ...

    def start(self, slot: int, token_ids: Sequence[int], salt: Hashable = None) -> Prefix:
        """Begin a text in the slot, with what is kept of texts that began with the same tokens.

        token_ids: the beginning that may be taken from other texts. salt: only texts with the same
        salt are used.
        """
        ...

    def remember(self, slot: int, token_ids: Sequence[int], length: int) -> None:
        """The slot holds the first ``length`` of these for good: others may take whole blocks."""
        ...

    def holds(self, slots: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether ``grow`` has been done for all of these."""
        ...

    def grow(self, slot: int, length: int) -> bool:
        """Whether the slot has capacity for so many tokens, which it keeps until its release."""
        ...

    def release(self, slots: Sequence[int]) -> None:
        """The texts of these slots have ended."""
        ...

    def has_blocks(self, length: int) -> bool:
        """Whether the free blocks would hold a text of so many tokens, ``max_length`` at most."""
        ...

    def can_copy(self, length: int) -> bool:
        """Whether an empty slot has capacity for a copy of so many tokens of another one."""
        ...

    def copy_slot(self, source: int, destinations: Sequence[int], length: int) -> None:
        """Make ``destinations`` hold the first ``length`` tokens of ``source``.

        Linear states are copied as they are: with these, ``source`` must hold just ``length``.
        """
        ...

    def save_states(self, slots: Sequence[int]) -> Sequence[Any]:
        """The committed states of ``slots``, for ``load_states``; none of attention alone."""
        ...

    def load_states(self, slots: Sequence[int], saved: Sequence[Any]) -> None:
        """Put back what ``save_states`` gave, into as many slots."""
        ...


def make_causal_lm(  # noqa: PLR0913 - how a model is kept
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
) -> SlotLM | TextLM | LineLM:
    """Keep texts with a model, in packed form where it has one and ``kernels`` asks for it.

    model: a decoder of transformers with attention "sdpa" or "eager", of a family that keeps to its
        masks and positions (docs/models.md).
    form: its packed form for this ``max_length``, found before; None for none.
    num_blocks: of ``BLOCK`` tokens each that a packed form keeps at most; None for all slots full.
    shared_blocks: of another model that keeps the same texts and owns them; None makes own ones.
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
    _check_rope(model, max_length)
    found = PackedForm.of(model, kernels, max_length) if form == "find" else form
    if found is None:
        lm = stock_lm(model, num_slots, max_length)
        if isinstance(lm, TextLM):
            logger.warning("%s. It runs one text at a time instead.", lm.reason)
        return lm
    blocks = shared_blocks or Blocks(num_slots, max_length, model.device, num_blocks)
    if shared_blocks is None:
        blocks.axes = SlotAxes.of(model, num_slots, max_length, blocks.side)
    # Without graphs there is nothing to fill a forward up for, other than in tests.
    is_padded = model.device.type == "cuda" or kernels == "packed"
    return LineLM(
        model,
        found,
        blocks,
        num_slots=num_slots,
        max_length=max_length,
        is_guest=shared_blocks is not None,
        longest_draft=longest_draft,
        width=width,
        graphs=GraphPool(model.device, window) if is_padded else None,
    )


def stock_lm(model: PreTrainedModel, num_slots: int, max_length: int) -> SlotLM | TextLM:
    """Keep texts with a model's stock modules: over slots, or one text at a time.

    Raises ModelError, with the reasons against both, where it can do neither.
    """
    try:
        return SlotLM(model, num_slots, max_length)
    except ModelError as error:
        if isinstance(
            error.__cause__, MissingRowError
        ):  # positions that a short text does not reach
            raise
        try:
            return TextLM(model, num_slots, max_length, str(error))
        except ModelError as alone:
            raise ModelError(f"{error}; one text at a time: {alone}") from None


def largest_context(text_config: Any) -> int | None:
    """Tokens of a text that the model takes over slots at most; None if its config says nothing.

    Less than it was made for where its rotary embedding depends on the longest text of a batch: up
    to its original context it does not.
    """
    own: int | None = getattr(text_config, "max_position_embeddings", None)
    _, limit = growing_rope(text_config)
    return own if limit is None else limit


def _check_rope(model: PreTrainedModel, max_length: int) -> None:
    """Refuse rotary embeddings whose frequencies depend on the longest text of a batch."""
    model_type = model.config.model_type
    kind, limit = growing_rope(model.config.get_text_config(decoder=True))
    if limit is not None and max_length > limit:
        raise ModelError(
            f"model_type={model_type!r}, max_length={max_length}: its {kind} rotary embedding "
            f"depends on the longest text of the batch beyond {limit} tokens; use a max_length of "
            f"at most {limit}"
        )
