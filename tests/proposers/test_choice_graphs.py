"""The choice of a draft's tokens by a chooser, with graphs that are plain calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor

from guided_spec.models.packed.graph_pool import NOTHING, CaptureWindow, GraphPool, Inputs
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.proposers import choice_graphs
from guided_spec.proposers.choice_graphs import ChoiceGraphs
from guided_spec.proposers.draft_model import DraftModel
from guided_spec.types import SamplingParams
from tests.draft_choices import MaskKind, check_chooser, check_walking
from tests.models.tiny import build
from tests.toys import VOCAB_SIZE, toy_context

CPU = torch.device("cpu")
TEMPERATURES = {"greedy": (0.0,) * 9, "mixed": (0.8, 1.0, 0.0, 0.3, 0.9, 0.0, 0.0, 0.7, 0.5)}


@pytest.mark.parametrize("largest", [2**20, 0], ids=["graphs", "none"])
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
    monkeypatch.setattr(choice_graphs, "LARGEST", largest)
    monkeypatch.setattr(choice_graphs, "LARGEST_SAMPLED", largest)
    check_chooser((90, draft_size), TEMPERATURES[kind], mask, top_k, GraphPool(CPU))


class Holding(GraphPool):
    """Says of every tensor that it is the first rows of a longer one, as a graph's output is."""

    def __init__(self, whole: Tensor) -> None:
        super().__init__(CPU)
        self._whole = whole

    def whole(self, tensor: Tensor) -> Tensor | None:
        return self._whole if tensor.data_ptr() == self._whole.data_ptr() else None


class Watched(GraphPool):
    """Remembers which inputs were copied, and which were read where they were."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.seen: list[tuple[set[str], set[str]]] = []

    def run(
        self,
        key: Hashable,
        inputs: Inputs,
        body: Callable[[Inputs], Any],
        fixed: Inputs = NOTHING,
        overlapped: Callable[[], None] | None = None,
    ) -> Any:
        self.seen.append((set(inputs), set(fixed)))
        return super().run(key, inputs, body, fixed, overlapped)


class Repeating(GraphPool):
    """Runs what it will hold before its first run, as a capture does."""

    def prepare(
        self,
        key: Hashable | None,
        inputs: Inputs,
        body: Callable[[Inputs], Any],
        fixed: Inputs = NOTHING,
        kinds: Callable[[Inputs], Any] | None = None,
    ) -> bool:
        has_graph = super().prepare(key, inputs, body, fixed, kinds)
        body({**inputs, **fixed})
        return has_graph


@pytest.mark.parametrize("largest", [2**20, 0], ids=["graphs", "none"])
@pytest.mark.parametrize("rows", [4, 9])  # as many as a graph has, and fewer
def test_texts_walk_along_tables(monkeypatch: pytest.MonkeyPatch, rows: int, largest: int) -> None:
    monkeypatch.setattr(choice_graphs, "LARGEST", largest)
    check_walking(Repeating(CPU), rows)


def test_a_drafters_own_logits_are_read_where_they_lie() -> None:
    torch.manual_seed(0)
    whole = torch.randn(10, 40)
    graphs, sampling = Watched(), Sampling.stack([SamplingParams(temperature=0)] * 9, range(9), CPU)
    chooser = ChoiceGraphs(None, graphs, Holding(whole))
    for _ in range(3):
        found = chooser.choose(0, whole[:9], None, sampling, None)
        assert torch.equal(found.tokens, whole[:9].argmax(1))
        whole.copy_(torch.randn(10, 40))
    other = torch.randn(9, 40)  # adjusted logits are somewhere else
    assert torch.equal(chooser.choose(0, other, None, sampling, None).tokens, other.argmax(1))
    assert graphs.seen == [(set(), {"logits"})] * 3 + [({"logits"}, set())]


def test_a_draft_model_captures_in_the_engines_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a step behind the warm-up would capture the choices that it makes."""
    window, given = CaptureWindow(), list[CaptureWindow | None]()

    def pool(
        device: torch.device,
        window: CaptureWindow | None = None,
        *,
        is_on_side_stream: bool = False,
    ) -> GraphPool:
        assert device.type == "cuda"
        assert is_on_side_stream  # where drafts are made
        given.append(window)
        return GraphPool(CPU, window)

    monkeypatch.setattr(choice_graphs, "GraphPool", pool)
    draft = build("llama", vocab_size=VOCAB_SIZE)
    DraftModel(toy_context(device=torch.device("cuda"), draft=draft, window=window))
    assert len(given) == 1
    assert given[0] is window
