"""Coupled verification: a draft token stays iff the target draws it itself.

The target's draw at each position uses noise of that position alone, so the text does not depend on
what was drafted: with a seed it is the text of plain sampling, token for token. A drafter that
samples with the same noise draws the same token whenever its distribution is close enough
(Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative
decoding", arXiv:2408.07978).
"""

from __future__ import annotations

import torch
from torch import Tensor

from guided_spec.types import Accepted, Draft, Noise

__all__ = ["coupled_sample"]


def coupled_sample(target_probs: Tensor, draft: Draft, noise: Noise) -> Accepted:
    """Accept the draft tokens that equal the target's own draws, and emit the first that differs.

    target_probs: [B, K + 1, V] float32, row i given the draft tokens before i; a row of zeros means
        that no token is legal there.
    draft: K tokens a row; its ``probs`` are not used.
    noise: ``sample`` [B, >= K + 1, V], that of position i in row i.

    Where the row to draw from is all zeros the drawn token is -1. All on one device, no sync.
    """
    num_draft = draft.token_ids.shape[1]
    best = (target_probs / noise.sample[:, : num_draft + 1]).max(-1)
    drawn = torch.where(best.values > 0, best.indices, -1)
    depth = torch.arange(num_draft + 1, device=drawn.device)
    agrees = (drawn[:, :-1] == draft.token_ids) & (depth[:-1] < draft.num_tokens.unsqueeze(1))
    num_accepted = agrees.long().cumprod(1).sum(1)
    return Accepted(torch.where(depth <= num_accepted.unsqueeze(1), drawn, -1), num_accepted)
