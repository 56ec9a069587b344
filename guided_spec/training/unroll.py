"""A draft head run over whole documents as it will run when it drafts: training-time test.

EAGLE-3 (arXiv:2503.01840, section 3.2). At depth s the head at place p is given token p + 1 + s of
the document and its own output of the depth before, and attends to what drafting would find in the
cache: keys made from the target's states up to p, and its own keys of place p at depths 1 to s.
With several modules (DeepSeek-V3's report, section 2.2) module s runs at depth s, over keys of its
own; the last one is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from guided_spec.models.draft_head import DraftHead

__all__ = ["unroll", "unroll_mask"]


def unroll(head: DraftHead, token_ids: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
    """The head's hidden states [B, T, H] at the depths 0 to ``steps - 1``, with gradient.

    token_ids: int64 [B, T], padded on the right. states: [B, T, len(aux_hidden_layers) * H_target],
    what the head's ``features`` takes. The state of place p is the one that scores token
    p + 2 + depth; it is arbitrary where the document has no such token.
    """
    run: Any = head
    length = token_ids.shape[1]
    places = torch.arange(length, device=token_ids.device).unsqueeze(0)
    hidden = head.features(states)
    cache = DynamicCache()
    for depth in range(steps):
        module = min(depth, head.num_modules - 1)
        repeats = depth - module
        hidden = run(
            _shift(token_ids, 1 + depth),
            hidden,
            module=module,
            position_ids=places + repeats,
            attention_mask=_masks(head.config, length, repeats, hidden),
            past_key_values=cache,
        )
        yield hidden


def unroll_mask(
    length: int, repeats: int, *, window: int | None = None, device: Any = None
) -> Tensor:
    """Bool [T, (1 + repeats) * T]: which keys the queries of one depth see.

    The first T keys are those of the target's states, each further T those of one depth of drafting
    (the last: their own). Query p stands at position p + repeats, from which a sliding ``window``
    counts.
    """
    place = torch.arange(length, device=device)
    seen = place[None, :] <= place[:, None]
    if window is not None:
        seen = seen & (place[None, :] > place[:, None] + repeats - window)
    own = torch.eye(length, dtype=torch.bool, device=device)
    further = [
        own if window is None or repeats - depth < window else torch.zeros_like(own)
        for depth in range(1, repeats + 1)
    ]
    return torch.cat([seen, *further], 1)


def _masks(config: Any, length: int, repeats: int, hidden: Tensor) -> Any:
    """The mask as the head's layers take it: 4-D, or by layer type where some have a window."""
    kinds = set(getattr(config, "layer_types", None) or ()) or {"full_attention"}
    masks = {}
    for kind in sorted(kinds):
        window = config.sliding_window if kind == "sliding_attention" else None
        seen = unroll_mask(length, repeats, window=window, device=hidden.device)[None, None]
        if config._attn_implementation == "eager":
            dtype = hidden.dtype
            seen = torch.zeros(seen.shape, dtype=dtype, device=hidden.device).masked_fill_(
                ~seen, torch.finfo(dtype).min
            )
        masks[kind] = seen
    return next(iter(masks.values())) if len(masks) == 1 else masks


def _shift(token_ids: Tensor, places: int) -> Tensor:
    """Tokens ``places`` further on; 0 where the row has ended."""
    shifted = torch.zeros_like(token_ids)
    if places < token_ids.shape[1]:
        shifted[:, :-places] = token_ids[:, places:]
    return shifted
