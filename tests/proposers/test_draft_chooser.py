"""The choice of a draft's tokens by a chooser, with graphs that are plain calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from guided_spec.models.graph_pool import GraphPool, Inputs
from guided_spec.proposers import draft_chooser
from guided_spec.proposers.draft_chooser import Chosen
from tests.draft_choices import MaskKind, check_chooser

CPU = torch.device("cpu")
TEMPERATURES = {"greedy": (0.0,) * 9, "mixed": (0.8, 1.0, 0.0, 0.3, 0.9, 0.0, 0.0, 0.7, 0.5)}


class Overwriting(GraphPool):
    """Writes every result where the first one lies, as a replayed graph does."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._results: dict[Hashable, Chosen] = {}

    def run(self, key: Hashable, inputs: Inputs, body: Callable[[Inputs], Any]) -> Any:
        found = super().run(key, inputs, body)
        kept = self._results.setdefault(key, found)
        for there, here in zip(kept, found, strict=True):
            if there is not None and there is not here:
                there.copy_(here)
        return kept


@pytest.mark.parametrize("largest", [draft_chooser.LARGEST, 0], ids=["graphs", "none"])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("kind", TEMPERATURES)
@pytest.mark.parametrize("draft_size", [40, None])
@pytest.mark.parametrize("mask", ["none", "each"])
def test_a_chooser(
    monkeypatch: pytest.MonkeyPatch,
    mask: MaskKind,
    draft_size: int | None,
    kind: str,
    top_k: int,
    largest: int,
) -> None:
    monkeypatch.setattr(draft_chooser, "LARGEST", largest)
    check_chooser((90, draft_size), TEMPERATURES[kind], mask, top_k, Overwriting(CPU))
