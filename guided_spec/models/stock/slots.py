"""The forwards of a stock model over KV slots: its own modules, with our cache and our masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from guided_spec.models.attention import MaskBuilder, shape_free_kernels
from guided_spec.models.lora.low_rank import adapters_of
from guided_spec.models.lora.slot_adapters import reading_adapters
from guided_spec.models.pictures.axes import SlotAxes
from guided_spec.models.pictures.spans import SlotSpans
from guided_spec.models.stock.kv_cache import SlotCache, StepPlan
from guided_spec.models.stock.routed import ExpertRecorder, recording_experts
from guided_spec.models.stock.state_rules import record_rules, recording
from guided_spec.models.target import capture_hidden, find_decoder
from guided_spec.models.transformers_version import cache_keyword

LogitsKind = Literal["all", "last", "none"]


class SlotInputs(NamedTuple):
    """What one forward feeds.

    token_ids: [B, T] int64, on the model's device or on the CPU; right-padded with any valid ids.
    slots: [B] distinct slots, best in ascending order: neighbours are read without a copy.
    starts: [B] tokens already in each slot; token t goes to position starts[b] + t. A row that
        starts at 0 forgets what its slot held.
    counts: [B] real tokens of each row, 0 to T; the rest is padding and changes nothing.
    """

    token_ids: Tensor
    slots: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]


class SlotOutput(NamedTuple):
    """What one forward gave; inference tensors on the model's device, arbitrary at padding.

    logits: [B, T, V] in the model's dtype; [B, 1, V] for "last"; None for "none".
    hidden_states: [B, T, len(layers) * H], in the order of the layers; None if there were none.
    """

    logits: Tensor | None
    hidden_states: Tensor | None


class StockSlots:
    """A stock model and the cache of slots it runs over.

    Raises ModelError for layers that cannot be kept in slots, and for an attention implementation
    that takes no 4-D mask. Whether the model keeps to masks and positions is another question: see
    ``models.slot_trial``.
    """

    def __init__(self, model: PreTrainedModel, num_slots: int, max_length: int) -> None:
        self.model = model
        self.cache = SlotCache(model.config, num_slots=num_slots, max_length=max_length)
        self._masks = MaskBuilder(model.config, self.cache.layer_types, self.cache.windows)
        self._call: Any = model
        self.axes = SlotAxes.of(model, num_slots, max_length)
        self.spans, self.adapters = SlotSpans.of(model), adapters_of(model)
        self._decoder = find_decoder(model)
        self._head: Any = self._call.get_output_embeddings()
        # Single tokens may take a way that is not recorded.
        self._least = 1
        if {"linear_attention", "hybrid"} & {*self.cache.layer_types} and record_rules(model):
            self._least = 2

    def forward(
        self,
        inputs: SlotInputs,
        logits: LogitsKind = "all",
        hidden_layers: tuple[int, ...] = (),
        *,
        view: int | None = None,
        has_masks: bool = True,
        recorder: ExpertRecorder | None = None,
    ) -> SlotOutput:
        """One call of the stock modules over padded rows; see ``CausalLM.forward``.

        view: positions that the layers read of every slot; None is as many as are needed.
        has_masks: False leaves the masks to the model, which makes them for rows that end the view.
        """
        device, width = self.model.device, inputs.token_ids.shape[1]
        token_ids = inputs.token_ids.to(device, non_blocking=True)
        if width < self._least:
            token_ids = functional.pad(token_ids, (0, self._least - width))
        where, length = (inputs.slots, inputs.starts, inputs.counts), self.cache.max_length
        plan = StepPlan(*where, num_tokens=token_ids.shape[1], max_length=length, view=view)
        self.cache.begin(plan)
        positions = plan.positions(device)
        arguments = {
            "input_ids": token_ids,
            "position_ids": positions,
            "attention_mask": None,
            **cache_keyword(self.model, self.cache),
            "use_cache": True,
        }
        if self.axes is not None:
            arguments |= self.axes.arguments(inputs.slots, inputs.starts, token_ids, positions)
        if has_masks:
            arguments["attention_mask"] = self.masks(inputs, positions, plan.view)
        running = self._running(inputs.slots, token_ids.shape[1], recorder)
        with running, capture_hidden(self._decoder, hidden_layers) as captured:
            scores = self._run(arguments, inputs.counts, logits)
        states = _concatenate(captured, device)
        if recorder is not None:
            recorder.cut(len(token_ids), width)
        return SlotOutput(*(None if one is None else one[:, :width] for one in (scores, states)))

    @contextmanager
    def _running(
        self, slots: Sequence[int], each: int, recorder: ExpertRecorder | None
    ) -> Iterator[None]:
        """What a call of the model runs in. each: tokens of a row."""
        with (
            shape_free_kernels(),
            recording() if self.cache.has_linear_state else nullcontext(),
            recording_experts(recorder),
            reading_adapters(self.adapters, slots, each),
        ):
            yield

    def masks(self, inputs: SlotInputs, positions: Tensor, view: int) -> Any:
        """As the model takes them, for rows at ``positions`` [B, T] over the first ``view``."""
        ahead = None
        if self.spans is not None:
            ahead = self.spans.fed(*inputs[1:], width=positions.shape[1])
        return self._masks.build(positions, view, self.model.dtype, ahead)

    def _run(
        self, arguments: dict[str, Any], counts: Sequence[int], logits: LogitsKind
    ) -> Tensor | None:
        if logits == "none":
            self._decoder(**arguments)
            return None
        if logits == "all" or arguments["input_ids"].shape[1] == 1:
            scores: Tensor = self._call(**arguments).logits
            return scores
        last = torch.tensor([max(count, 1) - 1 for count in counts])
        with _last_rows_only(self._head, last) as is_cut:
            scores = self._call(**arguments).logits
        if is_cut():
            return scores
        return _take_rows(scores, last)


def _concatenate(captured: list[Tensor], device: torch.device) -> Tensor | None:
    if len(captured) < 2:
        return captured[0].to(device) if captured else None
    return torch.cat([states.to(device) for states in captured], -1)


def _take_rows(states: Tensor, rows: Tensor) -> Tensor:
    """[B, 1, X]: row ``rows[b]`` of each of [B, T, X]; ``rows`` [B] on the CPU."""
    index = rows.to(states.device, non_blocking=True).view(-1, 1, 1)
    return states.gather(1, index.expand(-1, 1, states.shape[2]))


@contextmanager
def _last_rows_only(head: Any, rows: Tensor) -> Iterator[Callable[[], bool]]:
    """While it is open, ``head`` sees one hidden state a row; yields whether that happened.

    Cutting in front of the head, not around it, keeps what models do to the logits after it.
    """
    cuts: list[bool] = []

    def cut(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        cuts.append(True)
        return (_take_rows(arguments[0], rows), *arguments[1:])

    is_module = isinstance(head, nn.Module)
    with head.register_forward_pre_hook(cut) if is_module else nullcontext():
        yield lambda: bool(cuts)
