"""A packed decoder over KV slots: forwards of few tokens are CUDA graphs, those of many are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from guided_spec.models.packed.decoder import PackedDecoder
from guided_spec.models.packed.graph_pool import GraphPool, Inputs, bucket, pack_places, pad_to
from guided_spec.models.stock.decoder import StockDecoder
from guided_spec.models.stock.slots import LogitsKind, SlotInputs, SlotOutput
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces

__all__ = ["WIDEST_GRAPH", "PackedLM", "Rows"]

WIDEST_GRAPH = 64  # tokens a row; wider forwards are prompts
LARGEST_PROMPTS = 640  # tokens of all rows of prompts; more take longer than their launches


class Rows(NamedTuple):
    """Where the rows of one forward go, [B] on the host each: see ``SlotInputs``.

    Several rows may be pieces of one slot's text: a layer stores all keys before any is read.
    """

    slots: Sequence[int]
    starts: Sequence[int]
    counts: Sequence[int]


class PackedLM:
    """See the module's docstring.

    decoder: packed where the model is llama-like, else the stock one.
    memory: the layers' slots, which must stay where they are.
    """

    def __init__(
        self,
        decoder: PackedDecoder | StockDecoder,
        memory: Sequence[KeyValues],
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._memory = tuple(memory)
        self._device = device
        self._graphs = GraphPool(device)

    def forward(
        self,
        token_ids: Tensor,
        rows: Rows,
        logits: LogitsKind,
        layers: tuple[int, ...] = (),
        *,
        num_scored: int | None = None,
    ) -> SlotOutput:
        """Feed tokens int64 [B, T], on the device or the host; nothing waits for the device.

        logits, layers: as of ``CausalLM.forward``. num_scored: only the first so many rows get
        logits, all of theirs; None leaves it to ``logits``. Padding behind ``rows.counts`` is fed
        too: it lands where nothing valid is, and is overwritten before it can be seen. A row
        without any tokens is left out.
        """
        batch, width = token_ids.shape
        is_prompt = logits == "none" or width > WIDEST_GRAPH
        is_large = is_prompt and batch * width > LARGEST_PROMPTS
        size, length = (batch, width) if is_large else (bucket(batch), bucket(width))
        kind = logits if num_scored is None else "states"
        inputs = _inputs(token_ids, rows, (size, length))

        def body(tensors: Inputs) -> SlotOutput:
            return self._compute(tensors, kind, layers)

        if is_large:
            found = body(self._upload(inputs))
        else:
            found = self._graphs.run((size, length, kind, layers), inputs, body)
        scores, hidden = found
        if num_scored is not None and scores is not None:
            # Outside of the graph, which would keep logits for each size of batch: one product.
            scores = self._decoder.logits(scores[:num_scored])
        if is_large:
            return SlotOutput(scores, hidden)
        return SlotOutput(
            None if scores is None else scores[:batch, :width],
            # Hidden states are kept until their proposer reads them; logits are used at once.
            None if hidden is None else hidden[:batch, :width].clone(),
        )

    def forward_once(self, inputs: SlotInputs, logits: LogitsKind) -> SlotOutput:
        """``forward`` without a graph, for a shape that does not come again."""
        token_ids, *places = inputs
        tensors = _inputs(token_ids, Rows(*places), tuple(token_ids.shape))
        return SlotOutput(*self._compute(self._upload(tensors), logits, ()))

    def _upload(self, inputs: Inputs) -> Inputs:
        return {k: v.to(self._device, non_blocking=True) for k, v in inputs.items()}

    def _compute(
        self, inputs: Inputs, kind: LogitsKind | Literal["states"], layers: tuple[int, ...]
    ) -> SlotOutput:
        """With the states themselves in place of logits, if these are asked for."""
        slots, starts, last = inputs["places"].unbind(0)
        output = self._decoder.forward(
            inputs["token_ids"], SlotPlaces(slots, starts), self._memory, layers
        )
        states = output.states
        if kind == "none":
            return SlotOutput(None, output.hidden_states)
        if kind == "states":
            return SlotOutput(states, output.hidden_states)
        if kind == "last":
            states = states.gather(1, last.view(-1, 1, 1).expand(-1, 1, states.shape[2]))
        return SlotOutput(self._decoder.logits(states), output.hidden_states)


def _inputs(token_ids: Tensor, rows: Rows, size: tuple[int, ...]) -> Inputs:
    """What a forward of [B, T] tokens takes, on the host where these are; padded to ``size``."""
    slots = [s if count > 0 else -1 for s, count in zip(rows.slots, rows.counts, strict=True)]
    last = [max(count, 1) - 1 for count in rows.counts]
    places = pack_places((slots, rows.starts, last), size[0])
    return {"token_ids": pad_to(token_ids, size), "places": places}
