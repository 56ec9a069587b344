"""A stock causal LM over KV slots: rows of any lengths in one forward, per-row commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.config import Kernels
from guided_spec.errors import ModelError
from guided_spec.models.attention_kernels import shape_free_kernels
from guided_spec.models.attention_mask import MaskBuilder
from guided_spec.models.hidden_capture import capture_hidden, check_layers
from guided_spec.models.kv_cache import SlotCache
from guided_spec.models.linear_state import SavedState, record_delta_rules, recording
from guided_spec.models.packed_decoder import PackedDecoder
from guided_spec.models.packed_lm import LogitsKind, PackedLM, Rows
from guided_spec.models.step_plan import StepPlan
from guided_spec.models.stock_decoder import StockDecoder

__all__ = ["CausalLM", "SlotInputs", "SlotOutput", "kv_bytes_per_token", "state_bytes_per_slot"]


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


class CausalLM:
    """A transformers model and the slots its texts are kept in.

    model: any decoder of transformers with attention "sdpa" or "eager"; it is not changed, and
        may be shared by several of these (each keeps its own slots), not by threads.
    num_slots: texts at a time. max_length: tokens of a text.
    kernels: "auto" runs a llama-like model on one CUDA device in packed form and as CUDA graphs
        (its projections become views of packed ones, its results change by rounding only);
        "packed" does so on any device, for tests; "stock" never does.

    Runs one token through the model, into no slot, which allocates the slots' memory. Raises
    ModelError when the model cannot run over slots, naming its type and the reason.
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
        self._cache = SlotCache(self.config, num_slots=num_slots, max_length=max_length)
        self._masks = MaskBuilder(self.config, self._cache.layer_types, self._cache.windows)
        self._call: Any = model
        self._decoder: nn.Module = self._call.get_decoder()
        self._head: Any = self._call.get_output_embeddings()
        if self.has_linear_state:
            record_delta_rules(model)
        self._packed: PackedLM | None = None
        self._probe()
        if kernels == "packed" or (kernels == "auto" and self.device.type == "cuda"):
            self._packed = self._pack()

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
        token_ids = inputs.token_ids.to(self.device, non_blocking=True)
        plan = StepPlan(
            inputs.slots,
            inputs.starts,
            inputs.counts,
            num_tokens=token_ids.shape[1],
            max_length=self.max_length,
        )
        self._cache.begin(plan)
        positions = plan.positions(self.device)
        arguments = {
            "input_ids": token_ids,
            "position_ids": positions,
            "attention_mask": self._masks.build(positions, plan.view, self.dtype),
            "past_key_values": self._cache,
            "use_cache": True,
        }
        with ExitStack() as stack:
            stack.enter_context(shape_free_kernels())
            if self.has_linear_state:
                stack.enter_context(recording())
            captured = stack.enter_context(capture_hidden(self._decoder, hidden_layers))
            scores = self._run(arguments, inputs.counts, logits)
            return SlotOutput(scores, _concatenate(captured, self.device))

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

    def _pack(self) -> PackedLM | None:
        memory = self._cache.layer_memory()
        windows = [self._cache.windows.get(kind) for kind in self._cache.layer_types]
        if memory is None:
            return None
        decoder: PackedDecoder | StockDecoder | None
        decoder = PackedDecoder.of(self.model, self.max_length, windows)
        if decoder is None:
            decoder = StockDecoder.of(self.model, memory)
        return None if decoder is None else PackedLM(decoder, memory, self.device)

    def _probe(self) -> None:
        inputs = SlotInputs(torch.zeros(1, 1, dtype=torch.int64), [0], [0], [0])
        try:
            self.forward(inputs)
            self.commit([0])
        except (ModelError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            kind = self.config.model_type
            raise ModelError(
                f"model_type={kind!r}: a forward over KV slots failed: {error}"
            ) from error


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

    Cutting in front of the head, not around it, keeps what models do to the logits behind it.
    """
    cuts: list[bool] = []

    def cut(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        cuts.append(True)
        return (_take_rows(arguments[0], rows), *arguments[1:])

    is_module = isinstance(head, nn.Module)
    with head.register_forward_pre_hook(cut) if is_module else nullcontext():
        yield lambda: bool(cuts)


def _check_rope(model_type: str, text_config: Any, max_length: int) -> None:
    """Refuse rotary embeddings whose frequencies depend on the longest text of a batch."""
    parameters = getattr(text_config, "rope_parameters", None) or {}
    if "rope_type" in parameters and parameters["rope_type"] in ("dynamic", "longrope"):
        limit = parameters.get("original_max_position_embeddings")
        limit = limit or text_config.max_position_embeddings
        if max_length > limit:
            raise ModelError(
                f"model_type={model_type!r}, max_length={max_length}: its "
                f"{parameters['rope_type']} rotary embedding depends on the longest text of the "
                f"batch beyond {limit} tokens; use a max_length of at most {limit}"
            )
