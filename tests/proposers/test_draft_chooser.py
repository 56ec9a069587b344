"""The choice of a draft's tokens by a chooser; without CUDA its graphs are plain calls."""

from __future__ import annotations

import pytest

from guided_spec.proposers import draft_chooser
from tests.draft_choices import MaskKind, check_chooser

TEMPERATURES = {"greedy": (0.0,) * 9, "mixed": (0.8, 1.0, 0.0, 0.3, 0.9, 0.0, 0.0, 0.7, 0.5)}


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
    check_chooser((90, draft_size), TEMPERATURES[kind], mask, top_k, device="cpu")
