"""The target of an engine: what verifies drafts and reads prompts, over slots or in one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, PromptPiece, TargetModel, TargetOutput
from guided_spec.engine.target.line_target import LineTarget
from guided_spec.engine.target.routes import Routes
from guided_spec.engine.target.slot_target import SlotTarget
from guided_spec.models.causal_lm import CausalLM
from guided_spec.models.hidden_states import HiddenStates
from guided_spec.models.line_lm import LineLM
from guided_spec.models.slot_lm import SlotLM
from guided_spec.models.text_lm import TextLM


class Target(Protocol):
    """Verifies drafts and reads prompts.

    states: the hidden states that a proposer asked for, of what was read and committed.
    routes: which texts ask for their experts; it gives these what was read and committed.
    """

    states: HiddenStates
    routes: Routes

    @property
    def launches_at_once(self) -> bool:
        """Whether ``verify`` only launches a CUDA graph; then ``run_ahead`` does not block."""
        ...

    def verify(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput:
        """One forward over the last committed token and the draft of every request."""
        ...

    def commit(self, batch: DecodeBatch, num_accepted: Sequence[int], output: TargetOutput) -> None:
        """Keep the state of the last token and the accepted draft of every request.

        output: of its forward.
        """
        ...

    def run_ahead(self, batch: DecodeBatch, token_ids: Tensor) -> TargetModel | None:
        """Launch the next forward over the only token that each text has got, where that pays.

        token_ids: int64 [B, 1] on the device, -1 for none. Returns what verifies the next step with
        that forward; None where none is launched.
        """
        ...

    def read(self, prompts: Sequence[PromptPiece]) -> None:
        """Read prompts by a forward of their own."""
        ...


def make_target(model: CausalLM, layers: tuple[int, ...] = ()) -> Target:
    """The target for a model's form.

    layers: hidden states to capture, see ``Proposer.aux_hidden_layers``.
    """
    if isinstance(model, LineLM):
        return LineTarget(model, layers)
    assert isinstance(model, SlotLM | TextLM)
    return SlotTarget(model, layers)
