"""A causal LM in packed form: the tokens of all texts in one line, keys and values in blocks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.lora.slot_adapters import SlotAdapters
from guided_spec.models.packed.blocks import BLOCK, Blocks, Prefix
from guided_spec.models.packed.graph_pool import GraphPool
from guided_spec.models.packed.packed_lm import LineOutput, PackedLM, Rows
from guided_spec.models.packed_form import PackedForm
from guided_spec.models.pictures.axes import SlotAxes
from guided_spec.models.pictures.spans import SlotSpans
from guided_spec.models.stock.routed import ExpertLayers, ExpertRecorder
from guided_spec.models.stock.slots import LogitsKind, SlotInputs, SlotOutput
from guided_spec.models.target import check_layers
from guided_spec.ops.delta_rule import DeltaStates
from guided_spec.ops.host import to_device


class LineLM:
    """A ``CausalLM`` that also runs over one line of tokens, see ``forward_line``.

    form: found for this ``max_length``. blocks: of the slots. is_guest: whether another model owns
    ``blocks``: this one keeps its own keys and values by the same tables, and never frees any.
    longest_draft: tokens of a row that ``commit`` may take back. width: see ``PackedLM``.
    graphs: of its forwards; None runs without.
    """

    is_packed = True

    @torch.inference_mode()
    def __init__(  # noqa: PLR0913 - how a model is kept
        self,
        model: PreTrainedModel,
        form: PackedForm,
        blocks: Blocks,
        *,
        num_slots: int,
        max_length: int,
        is_guest: bool,
        longest_draft: int,
        width: int,
        graphs: GraphPool | None,
    ) -> None:
        self.model = model
        self.config: Any = model.config
        self.adapters: SlotAdapters | None = form.decoder.adapters
        if self.adapters is not None:  # the form was tried with some
            self.adapters.clear()
        self.num_slots, self.max_length = num_slots, max_length
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.vocab_size: int = self.config.get_text_config(decoder=True).vocab_size
        self.blocks: Blocks | None = blocks
        self._blocks = blocks
        self._is_guest = is_guest
        self._longest_draft = longest_draft
        memory = form.allocate(blocks, num_slots, longest_draft)
        self.spans = SlotSpans.of(model)
        self._packed = PackedLM(
            form.decoder, memory, blocks, width=width, graphs=graphs, spans=self.spans
        )

    @property
    def axes(self) -> SlotAxes | None:
        """See ``CausalLM``."""
        return self._blocks.axes

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the keys and values, or latents, that are kept."""
        return self._packed.key_values[0].keys.dtype

    @property
    def runs_as(self) -> str:
        """What computes, in words."""
        return self._packed.runs_as

    @property
    def expert_layers(self) -> ExpertLayers:
        """See ``CausalLM``."""
        return self._packed.expert_layers

    @property
    def has_linear_state(self) -> bool:
        """Whether a layer keeps a linear state, not keys and values."""
        return bool(self._packed.states)

    @property
    def shares_prefixes(self) -> bool:
        """Whether texts may share blocks: a linear state cannot be cut at a prefix."""
        return not self.has_linear_state

    @torch.inference_mode()
    def forward(
        self,
        inputs: SlotInputs,
        *,
        logits: LogitsKind = "all",
        hidden_layers: tuple[int, ...] = (),
        recorder: ExpertRecorder | None = None,
    ) -> SlotOutput:
        """The rows' own tokens in one line, spread over rows again; see ``CausalLM.forward``."""
        check_layers(hidden_layers, len(self._packed.memory))
        return self._packed.forward(inputs, logits, hidden_layers, recorder)

    @torch.inference_mode()
    def forward_line(
        self,
        token_ids: Tensor,
        rows: Rows,
        hidden_layers: tuple[int, ...] = (),
        overlapped: Callable[[], None] | None = None,
        recorder: ExpertRecorder | None = None,
    ) -> LineOutput:
        """``forward`` of tokens int64 [N], those of ``rows`` in turn.

        See ``PackedLM.forward_line``; ``logits`` makes logits of what it returns.
        """
        return self._packed.forward_line(token_ids, rows, hidden_layers, overlapped, recorder)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """The states of ``forward_line`` [..., H] to logits [..., V]."""
        return self._packed.logits(states)

    @torch.inference_mode()
    def capture(self, hidden_layers: tuple[int, ...]) -> Iterator[None]:
        """Capture the graphs of all sizes on CUDA, one at each ``next``."""
        if self.device.type == "cuda":
            yield from self._packed.capture(hidden_layers)

    @torch.inference_mode()
    def forward_seconds(self, hidden_layers: tuple[int, ...]) -> dict[int, float]:
        """Seconds of the captured forwards, by their number of tokens."""
        return self._packed.forward_seconds(hidden_layers)

    def commit(self, keep: Sequence[int], counts: Sequence[int]) -> None:
        """Check that the rows can go back; the ``starts`` of the next forward do the rest.

        Raises ModelError where linear states cannot go back, because a row had more than
        ``longest_draft`` tokens.
        """
        pairs = zip(keep, counts, strict=False)  # prompts next to these rows stay
        cut = max((count for kept, count in pairs if kept < count), default=0)
        if self.has_linear_state and cut > self._longest_draft:
            raise ModelError(
                f"keep={list(keep)}: a linear state goes back over rows of {self._longest_draft} "
                f"tokens, and one had {cut}; make the CausalLM with a larger longest_draft"
            )

    def start(self, slot: int, token_ids: Sequence[int], salt: Hashable = None) -> Prefix:
        """Give the slot the blocks that hold this beginning already; returns what they hold."""
        return self._blocks.start(slot, token_ids, salt)

    def remember(self, slot: int, token_ids: Sequence[int], length: int) -> None:
        """Let other texts take the whole blocks of these tokens."""
        self._blocks.remember(slot, token_ids, length)

    def holds(self, slots: Sequence[int], lengths: Sequence[int]) -> bool:
        """Whether the slots have blocks for texts of these lengths."""
        return self._blocks.holds(slots, np.array(lengths, dtype=np.int64))

    def grow(self, slot: int, length: int) -> bool:
        """Give the slot blocks for so many tokens; False where too few are free."""
        return self._blocks.grow(slot, length)

    def release(self, slots: Sequence[int]) -> None:
        """Free the blocks of these slots, unless another model owns them."""
        if not self._is_guest:
            self._blocks.release(slots)

    def has_blocks(self, length: int) -> bool:
        """Whether the free blocks would hold a text of so many tokens."""
        return self._blocks.num_free * BLOCK >= min(length, self.max_length)

    def can_copy(self, length: int) -> bool:
        """Whether enough blocks are free for what a copy cannot share."""
        return self._blocks.can_share(length)

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int], length: int) -> None:
        """Share whole blocks and copy the rest; the slots of a guest have blocks for it already."""
        give = self._blocks.copy_own if self._is_guest else self._blocks.share
        for slot in destinations:
            give(source, slot, length, self._packed.key_values)
        self.load_states(destinations, self.save_states([source] * len(destinations)))

    @torch.inference_mode()
    def save_states(self, slots: Sequence[int]) -> Sequence[DeltaStates]:
        """A copy of the linear states of ``slots``, one ``DeltaStates`` a layer that has any."""
        rows = to_device(slots, self.device)
        return [DeltaStates(*(part[rows] for part in one)) for one in self._packed.states]

    @torch.inference_mode()
    def load_states(self, slots: Sequence[int], saved: Sequence[Any]) -> None:
        """Overwrite the linear states of ``slots`` with what ``save_states`` gave."""
        rows = to_device(slots, self.device)
        copies = [one for one in saved if isinstance(one, DeltaStates)]
        for states, copy in zip(self._packed.states, copies, strict=True):
            for part, rest in zip(states, copy, strict=True):
                part[rows] = rest
