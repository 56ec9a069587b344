"""The forward of any dense stock decoder over KV slots, with its attention alone replaced.

For models that ``models.packed_decoder`` does not know. The stock modules run as they are, without
a cache and without masks, so that a CUDA graph can hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from guided_spec.errors import ModelError
from guided_spec.models.hidden_capture import capture_hidden, find_decoder
from guided_spec.models.packed_decoder import STATIC_ROPE, PackedOutput, has_hooks
from guided_spec.models.slot_attention import attending, using_slot_attention
from guided_spec.ops.slot_attention import KeyValues, SlotPlaces

__all__ = ["StockDecoder"]

PROBE = (1, 2, 3, 5)  # token ids


class StockDecoder:
    """See the module's docstring; made by ``of``. It has the methods of ``PackedDecoder``."""

    def __init__(self, model: PreTrainedModel) -> None:
        stock: Any = model
        self._config = model.config
        self._decoder = find_decoder(model)
        self._head: nn.Module = stock.get_output_embeddings()

    @classmethod
    @torch.inference_mode()
    def of(cls, model: PreTrainedModel, memory: Sequence[KeyValues]) -> StockDecoder | None:
        """For ``model``; None where it has no such form.

        That is by its kind, or because its attention or what is behind its output head does more.
        Whether the form then is right, ``SlotTrial`` has to find out.
        Writes to the first positions of slot 0.
        """
        if not _may_be_served(model):
            return None
        decoder, stock = cls(model), cast(Any, model)
        ids = torch.tensor([PROBE], device=model.device)
        expected: Tensor = stock(input_ids=ids, use_cache=False).logits
        states = decoder._decoder(input_ids=ids, use_cache=False).last_hidden_state
        # By itself, and exactly: half precision would hide what a model does behind its head.
        if not torch.equal(decoder.logits(states), expected):
            return None
        start = torch.zeros(1, dtype=torch.int64, device=model.device)
        try:
            decoder.forward(ids, SlotPlaces(start, start), memory)
        except ModelError:  # of the attention over slots, for what it does not support
            return None
        return decoder

    def forward(
        self,
        token_ids: Tensor,
        places: SlotPlaces,
        memory: Sequence[KeyValues],
        hidden_layers: Sequence[int] = (),
    ) -> PackedOutput:
        """See ``PackedDecoder.forward``."""
        steps = torch.arange(token_ids.shape[1], device=token_ids.device)
        last = memory[0].keys.shape[2] - 2
        positions = (places.starts.unsqueeze(1) + steps).clamp_max(last)
        with (
            using_slot_attention(self._config),
            attending(memory, places),
            capture_hidden(self._decoder, hidden_layers) as captured,
        ):
            output: Any = self._decoder(
                input_ids=token_ids, position_ids=positions, use_cache=False
            )
        hidden = torch.cat(captured, -1) if captured else None
        return PackedOutput(output.last_hidden_state, hidden)

    def logits(self, states: Tensor) -> Tensor:
        """See ``PackedDecoder.logits``."""
        scores: Tensor = self._head(states)
        return scores


def _may_be_served(model: PreTrainedModel) -> bool:
    """Whether the model is on one device, and nothing in it waits for that device."""
    stock: Any = model
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    kinds = [one for one in (rope, *rope.values()) if isinstance(one, dict)]
    if any(one.get("rope_type", "default") not in STATIC_ROPE for one in kinds):
        return False
    # Experts are chosen by the host, which a graph cannot wait for.
    if any("expert" in name or "router" in name for name, _ in model.named_modules()):
        return False
    if len({p.device for p in model.parameters()}) != 1 or has_hooks(model):
        return False
    return isinstance(stock.get_output_embeddings(), nn.Module)
