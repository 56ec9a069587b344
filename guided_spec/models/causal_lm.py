"""A stock causal LM over KV slots: rows of any lengths in one forward, per-row commit.

A packed decoder over KV slots: forwards of few tokens are CUDA graphs, those of many are not.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.config import Kernels
from guided_spec.errors import ModelError
from guided_spec.models.packed.decoder import PackedDecoder
from guided_spec.models.packed.graph_pool import GraphPool, Inputs, bucket, pack_places, pad_to
from guided_spec.models.stock.decoder import StockDecoder
from guided_spec.models.stock.kv_cache import SavedState
from guided_spec.models.stock.slot_trial import SlotTrial, errors_naming
from guided_spec.models.stock.slots import LogitsKind, SlotInputs, SlotOutput, StockSlots
from guided_spec.models.target import check_layers
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces

__all__ = [
    "WIDEST_GRAPH",
    "CausalLM",
    "PackedLM",
    "Rows",
    "SlotInputs",
    "SlotOutput",
    "kv_bytes_per_token",
    "largest_context",
    "state_bytes_per_slot",
]

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


PACKED_DEVICES = ("cuda",)  # where "auto" is packed

logger = logging.getLogger(__name__)


class CausalLM:
    """A transformers model and the slots its texts are kept in.

    model: a decoder of transformers with attention "sdpa" or "eager", of a family that keeps to its
        masks and positions (docs/models.md); it is not changed, and may be shared by several of
        these (each keeps its own slots), not by threads.
    num_slots: texts at a time. max_length: tokens of a text.
    kernels: "auto" runs a llama-like model on one CUDA device in packed form and as CUDA graphs
        (its projections become views of packed ones, its results change by rounding only);
        "packed" does so on any device, for tests; "stock" never does. Models without a packed form
        keep their stock one.

    Runs a few tokens through the model by itself and through the slots, see ``SlotTrial``, which
    also allocates the slots' memory. Raises ModelError, naming the model's type and the reason,
    when it cannot run over slots, or would write other texts there. Where only its packed form
    would, "packed" raises ModelError, and "auto" logs a warning and keeps the stock one.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: PreTrainedModel,
        *,
        num_slots: int,
        max_length: int,
        kernels: Kernels = "auto",
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
        with errors_naming(model, "its layers cannot be kept in slots"):
            self._stock = StockSlots(model, num_slots, max_length)
        self._cache = self._stock.cache
        trial = SlotTrial(self._stock)
        trial.check_stock()
        self._packed: PackedLM | None = None
        if kernels == "packed" or (kernels == "auto" and self.device.type in PACKED_DEVICES):
            self._packed = self._pack(trial, kernels)

    @property
    def is_packed(self) -> bool:
        """Whether forwards run in packed form; see ``kernels``."""
        return self._packed is not None

    @property
    def has_linear_state(self) -> bool:
        """Whether ``commit`` does work, and going back needs ``save_states``."""
        return self._cache.has_linear_state

    @torch.inference_mode()
    def forward(
        self,
        inputs: SlotInputs,
        *,
        logits: LogitsKind = "all",
        hidden_layers: tuple[int, ...] = (),
        num_scored: int | None = None,
    ) -> SlotOutput:
        """Feed the tokens, store their keys and values; never waits for the device.

        logits: of all tokens, of each row's last real one, or none. num_scored: of packed models
        only: the first so many rows get logits, for all of their tokens, and the rows behind them
        may be pieces of one text, one behind another in the same slot.
        hidden_layers: hidden states to return: index i is the input of layer i, n (the number of
            layers) the output of the last layer, and -1 that output after the final norm.

        ``commit`` has to follow before the next forward. Raises ModelError for a layer that the
        model does not have.
        """
        if self._packed is not None:
            check_layers(hidden_layers, len(self._cache.layer_types))
            rows = Rows(inputs.slots, inputs.starts, inputs.counts)
            found = self._packed.forward(
                inputs.token_ids, rows, logits, hidden_layers, num_scored=num_scored
            )
            return SlotOutput(*found)
        assert num_scored is None, "stock models take one row a slot"
        return self._stock.forward(inputs, logits, hidden_layers)

    @torch.inference_mode()
    def commit(self, keep: Sequence[int]) -> None:
        """Keep the first ``keep[b]`` of the tokens just fed to each row, 0 to ``counts[b]``.

        Keys and values need no work: the next ``starts`` say what counts.
        """
        self._cache.commit(keep)

    @torch.inference_mode()
    def copy_slot(self, source: int, destinations: Sequence[int], length: int) -> None:
        """Make ``destinations`` hold the first ``length`` tokens of ``source``.

        Linear states are copied as they are: with these, ``source`` must hold just ``length``.
        """
        self._cache.copy_slot(source, destinations, length)

    @torch.inference_mode()
    def save_states(self, slots: Sequence[int]) -> list[SavedState]:
        """A copy of the committed linear states of ``slots``; empty for attention-only models."""
        return self._cache.save_states(slots)

    @torch.inference_mode()
    def load_states(self, slots: Sequence[int], saved: list[SavedState]) -> None:
        """Put back what ``save_states`` gave, into as many slots."""
        self._cache.load_states(slots, saved)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token."""
        return self._cache.bytes_per_token()

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes of linear state of one slot, which does not grow with the text."""
        return self._cache.state_bytes()

    def _pack(self, trial: SlotTrial, kernels: Kernels) -> PackedLM | None:
        memory = self._cache.layer_memory()
        windows = [self._cache.windows.get(kind) for kind in self._cache.layer_types]
        if memory is None:
            return None
        try:
            with errors_naming(self.model, "a forward in packed form failed"):
                decoder: PackedDecoder | StockDecoder | None
                decoder = PackedDecoder.of(self.model, self.max_length, windows)
                decoder = decoder or StockDecoder.of(self.model, memory)
                if decoder is None:
                    return None
                packed = PackedLM(decoder, memory, self.device)
                trial.check_packed(packed.forward_once)
        except ModelError as error:
            if kernels == "packed":
                raise
            logger.warning("%s. It runs by its stock modules instead.", error)
            return None
        return packed


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Bytes of keys and values that one token takes in a slot; runs one token to measure it.

    Raises ModelError as ``CausalLM`` does.
    """
    return CausalLM(model, num_slots=1, max_length=1, kernels="stock").kv_bytes_per_token


def state_bytes_per_slot(model: PreTrainedModel) -> int:
    """Bytes of linear state that a slot takes besides; 0 for attention-only models.

    Raises ModelError as ``CausalLM`` does.
    """
    return CausalLM(model, num_slots=1, max_length=1, kernels="stock").state_bytes_per_slot


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
