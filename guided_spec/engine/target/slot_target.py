"""A target by its stock modules: a padded row of tokens for each text."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, PromptPiece, TargetOutput
from guided_spec.engine.target.routes import Routes
from guided_spec.engine.target.rows import fed_rows, push_verified
from guided_spec.models.hidden_states import HiddenStates
from guided_spec.models.slot_lm import SlotLM
from guided_spec.models.stock.routed import RoutedRows
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.models.text_lm import TextLM
from guided_spec.ops.host import pad_ids


class SlotTarget:
    """A ``Target`` whose rows are padded to one length, over slots.

    layers: hidden states to capture, see ``Proposer.aux_hidden_layers``.
    """

    launches_at_once = False

    def __init__(self, model: SlotLM | TextLM, layers: tuple[int, ...] = ()) -> None:
        self._model, self._layers = model, layers
        self.states = HiddenStates()
        self.routes = Routes(model.expert_layers)

    def verify(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput:
        """One forward over rows as long as the longest draft; see ``Target.verify``."""
        assert not batch.prompts, "a stock model takes one row a slot"
        token_ids, rows = fed_rows(batch, flight, self._model.max_length)
        inputs, recorder = SlotInputs(token_ids, *rows), self.routes.recorder(rows.slots)
        found = self._model.forward(
            inputs, logits="all", hidden_layers=self._layers, recorder=recorder
        )
        assert found.logits is not None
        routed = RoutedRows.of(recorder, rows, token_ids.shape[1])
        return TargetOutput(found.logits, found.hidden_states, routed=routed)

    def commit(self, batch: DecodeBatch, num_accepted: Sequence[int], output: TargetOutput) -> None:
        """Keep what was accepted of each row; see ``Target.commit``."""
        keep = [accepted + 1 for accepted in num_accepted]
        self._model.commit(keep, [output.logits.shape[1]] * len(keep))
        self.routes.push(output.routed, keep)
        if output.hidden_states is not None:
            push_verified(self.states, batch, keep, output.hidden_states)

    def run_ahead(self, batch: DecodeBatch, token_ids: Tensor) -> None:
        """None: a forward of stock modules keeps the host busy."""

    def read(self, prompts: Sequence[PromptPiece]) -> None:
        """Read prompts by a forward of their own, padded to the longest one."""
        slots, starts, token_ids, texts = zip(*prompts, strict=True)
        counts = [len(row) for row in token_ids]
        inputs = SlotInputs(pad_ids(token_ids, max(counts)), slots, starts, counts)
        recorder = self.routes.recorder(slots)
        output = self._model.forward(
            inputs, logits="none", hidden_layers=self._layers, recorder=recorder
        )
        self._model.commit(counts, counts)
        self.routes.push(RoutedRows.of(recorder, (slots, starts, counts), max(counts)))
        if output.hidden_states is not None:
            self.states.push_rows(slots, starts, texts, counts, output.hidden_states)
