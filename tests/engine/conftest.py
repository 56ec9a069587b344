"""A proposer that tests can watch, hold and break, and a model to which all tokens are alike."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from transformers import PreTrainedModel

from guided_spec.core import DecodeBatch, ProposerContext
from guided_spec.masks.lookahead import Lookahead
from guided_spec.proposers import PROPOSERS
from guided_spec.proposers.drafting import host_draft
from guided_spec.types import Draft
from tests.learned_heads import HeadedTarget, write_head
from tests.tiny_llm import VOCAB_SIZE, tiny_model

PATIENCE = 60.0  # seconds; only a deadlock takes as long


class Spy:
    """Drafts nothing and writes down every step.

    steps: the slots of each step. released: the slots that were given back.
    permits: None lets every step pass; a semaphore holds each until it is released.
    on_step: called in every step; what it raises, the proposer raises.
    """

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.steps: list[tuple[int, ...]] = []
        self.released: list[int] = []
        self.permits: threading.Semaphore | None = None
        self.on_step: Callable[[DecodeBatch], None] | None = None

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        self.steps.append(batch.slots)
        if self.permits is not None:
            assert self.permits.acquire(timeout=PATIENCE)
        if self.on_step is not None:
            self.on_step(batch)
        return host_draft(batch, [[] for _ in lookahead.drafted])

    def release(self, slots: Sequence[int]) -> None:
        self.released.extend(slots)

    def open(self) -> None:
        """Let every step pass from now on."""
        permits, self.permits = self.permits, None
        if permits is not None:
            permits.release(1000)


@pytest.fixture
def spy(monkeypatch: pytest.MonkeyPatch) -> Spy:
    """The proposer that ``make_llm(model, "spy")`` uses."""
    spy = Spy()

    def factory(context: ProposerContext) -> Spy:
        del context
        return spy

    monkeypatch.setitem(PROPOSERS, "spy", factory)
    return spy


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> HeadedTarget:
    """A target and its EAGLE-3 head, in a folder."""
    return write_head(tmp_path_factory.mktemp("head") / "eagle3", "eagle3", VOCAB_SIZE)


@pytest.fixture(scope="module")
def uniform() -> PreTrainedModel:
    """All tokens are equally likely: equal noise gives equal letters."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    return model
