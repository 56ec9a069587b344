"""A draft head over a slot cache: forwards by hand, as an engine would make them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from guided_spec.models.attention import MaskBuilder
from guided_spec.models.heads.draft_head import DraftHead
from guided_spec.models.stock.kv_cache import SlotCache, StepPlan

MAX_LENGTH = 64


class HeadSteps:
    """Runs a head for rows of texts in ``slots``."""

    def __init__(self, head: DraftHead, slots: Sequence[int]) -> None:
        self.run: Any = head
        self.slots = list(slots)
        self.cache = SlotCache(head.config, num_slots=max(slots) + 1, max_length=MAX_LENGTH)
        self.masks = MaskBuilder(head.config, self.cache.layer_types, self.cache.windows)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        starts: Sequence[int],
        counts: Sequence[int],
        *,
        module: int = 0,
    ) -> Tensor:
        """Recycled hidden states [B, T, H] of ``counts`` tokens [B, T] from ``starts`` on."""
        plan = StepPlan(
            self.slots, starts, counts, num_tokens=token_ids.shape[1], max_length=MAX_LENGTH
        )
        self.cache.begin(plan)
        positions = plan.positions(hidden.device)
        output: Tensor = self.run(
            token_ids,
            hidden,
            module=module,
            position_ids=positions,
            attention_mask=self.masks.build(positions, plan.view, hidden.dtype),
            cache=self.cache,
        )
        return output


@torch.no_grad()
def draft_logits(
    head: DraftHead, target: PreTrainedModel, texts: Sequence[Sequence[int]], steps: int
) -> Tensor:
    """Logits [B, steps, D] of consecutive greedy drafts behind texts of any lengths, at once.

    All but the last token of a text have target features, of the last layer after the norm.
    """
    model: Any = target
    rows = HeadSteps(head, slots=[2, *range(len(texts) - 1)])
    counts = [len(text) - 1 for text in texts]
    ids = torch.zeros(len(texts), max(counts), dtype=torch.int64)
    states = torch.randn(*ids.shape, head.hidden_size)  # what padding holds does not matter
    for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
        ids[row, :count] = torch.tensor(text[1:])
        states[row, :count] = model.model(torch.tensor([text[:-1]])).last_hidden_state[0]
    last = torch.tensor(counts) - 1
    hidden = rows.forward(ids, head.features(states), [0] * len(texts), counts)
    hidden = hidden[range(len(texts)), last].unsqueeze(1)
    scores = [head.logits(hidden)]
    for step in range(1, steps):
        starts = [count + step - 1 for count in counts]
        ids = scores[-1].argmax(-1)
        hidden = rows.forward(ids, hidden, starts, [1] * len(texts))
        scores.append(head.logits(hidden))
    return torch.cat(scores, 1)
