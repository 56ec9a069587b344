"""What a loss holds in memory at once: a chunk of scores, never those of a whole batch."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from guided_spec.ops.bitmask import pack_bitmask
from guided_spec.training.algorithm import TargetStates, TrainingBatch
from guided_spec.training.objective import DraftScorer, DraftStates, Objective, measure
from guided_spec.training.target_rows import TargetRows

B, T, H, V, STEPS = 2, 96, 4, 1024, 2


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside and still held; ``peak`` at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **kwargs or {})
        inputs = {
            self._storage(x) for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)
        }
        for tensor in tree_flatten(output)[0]:
            if isinstance(tensor, Tensor) and self._storage(tensor) not in inputs | self._known:
                self._count(tensor.untyped_storage())
        return output

    @staticmethod
    def _storage(tensor: Tensor) -> int:
        number: int = tensor.untyped_storage()._cdata
        return number

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.held -= size


class LastLayer:
    """A target's norm and output head."""

    def __init__(self, dice: torch.Generator) -> None:
        self._weight = torch.randn(V, H, generator=dice)

    def normed(self, last: Tensor) -> Tensor:
        return last

    def logits(self, normed: Tensor) -> Tensor:
        return normed @ self._weight.T


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [4, 12])
def test_scores_of_a_chunk_are_all_that_is_held(
    monkeypatch: pytest.MonkeyPatch, *, masked: bool, rows: int
) -> None:
    """Forward and backward; a chunk of ``rows`` rows is what its limit in bytes says."""
    limit = rows * 4 * (3 * V + 8 * STEPS * V)
    monkeypatch.setattr("guided_spec.training.objective.CHUNK_BYTES", limit)
    dice = torch.Generator().manual_seed(5)
    head = nn.Linear(H, V, bias=False)
    legal = torch.rand(3 if masked else 1, V, generator=dice) < 0.5
    legal[0] = True
    batch = TrainingBatch(
        token_ids=torch.randint(V, (B, T), generator=dice),
        loss_mask=torch.ones(B, T, dtype=torch.bool),
        lengths=torch.full((B,), T),
        bitmask=pack_bitmask(legal),
        mask_rows=torch.randint(len(legal), (B, T), generator=dice),
        indices=torch.arange(B),
    )
    states = TargetStates(torch.zeros(B, T, 0, H), torch.randn(B, T, H, generator=dice))
    last: Any = LastLayer(dice)
    targets = TargetRows.build(batch, states, last, None)
    hidden = torch.randn(STEPS, B, T, H, generator=dice, requires_grad=True)
    drafts = [
        DraftStates(positions, hidden[depth][positions.mask])
        for depth, positions in ((depth, targets.positions(depth)) for depth in range(STEPS))
    ]
    objective = Objective.parse(steps=STEPS, decay=1.0, loss="kl", masked=masked)
    scorer = DraftScorer(head, tuple(head.parameters()))
    with PeakMemory() as memory:
        measure(drafts, scorer, batch, targets, objective).loss.backward()
    weights = 4 * head.weight.nbytes  # gradients: of a chunk, summed, scaled, and the parameter's
    narrow = 16 * hidden.nbytes
    assert limit / 4 < memory.peak < limit + weights + narrow
    whole = 4 * B * T * V * (1 + STEPS)  # the scores alone, were they made at once
    assert limit + weights + narrow < whole
