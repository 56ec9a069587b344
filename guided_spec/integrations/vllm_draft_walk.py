"""The policy ``topk_walk``: the drafter runs as it is, and its draft is made legal afterwards.

While it drafts, the tokens with the highest logits of each position are kept on the device. At the
end they are downloaded together, and the grammar is led along the best legal one of each position.
So the host looks at a draft once, whatever its length, and a CUDA graph may hold all positions.

A position behind a token that was exchanged was drafted behind another one. That costs acceptance;
what is accepted is legal and what the target would say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from guided_spec.grammar.constraint import Constraint
from guided_spec.grammar.lookahead import Lookahead
from guided_spec.grammar.mask_rows import MaskRows

__all__ = ["DraftWalk"]

CANDIDATES = 16  # tokens kept of each position


class DraftWalk:
    """The candidates of one drafter whose drafts are greedy.

    rows: [most requests of a batch, K + 1] of the target's vocabulary, on the drafter's device.
    position: gives the draft position being drawn, int64 [] on the device, for the number of those
        before it.
    """

    name = "topk_walk"

    def __init__(self, rows: MaskRows, position: Callable[[int], Tensor]) -> None:
        self._rows = rows
        self._position = position
        size = (rows.requests, rows.depths - 1, CANDIDATES)
        self._best = torch.zeros(size, dtype=torch.int64, device=rows.device)
        self._constraints: Sequence[Constraint | None] = ()
        self._num_drawn = 0

    def start(self, constraints: Sequence[Constraint | None], num_draft: int) -> None:
        """Begin the drafts of a batch [B] in which at least one request is constrained."""
        del num_draft
        self._constraints, self._num_drawn = constraints, 0

    def turn(self) -> None:
        """Nothing is needed from the host before the draft is there."""

    def see(self, logits: Tensor) -> Tensor:
        """Keep the best tokens of a position's logits [>= B, V]; returns these as they are.

        Reads what is on the device and nothing else, so that it may be captured in a CUDA graph.
        """
        best = logits.topk(min(CANDIDATES, logits.shape[-1])).indices
        at = self._position(self._num_drawn).view(1)
        self._best[: len(logits), :, : best.shape[1]].index_copy_(1, at, best.unsqueeze(1))
        return logits

    def drawn(self) -> None:
        """A token was drawn from the logits of this position."""
        self._num_drawn += 1

    def finish(self, draft: Tensor, num_draft: int) -> None:
        """Exchange illegal tokens of the draft [B, >= num_draft], in place, up to a dead end.

        Where none of a position's candidates is legal the drafter's own tokens stay; vLLM cuts the
        draft there.
        """
        own = draft[:, :num_draft]
        best = self._best[: len(draft), :num_draft].to(own.dtype)
        options = torch.cat([own.unsqueeze(2), best], 2).tolist()
        limits = [num_draft] * len(options)
        lookahead = Lookahead.fork(self._constraints, self._rows, limits)
        walked = lookahead.extend_best(options)
        changed = [
            [*tokens, *(position[0] for position in row[len(tokens) :])]
            for tokens, row in zip(walked, options, strict=True)
        ]
        own.copy_(torch.tensor(changed, dtype=own.dtype, device=own.device))

    def clear(self) -> None:
        """Nothing that a free batch would meet is left behind."""
        self._constraints = ()
