"""The target: a causal LM over KV slots, as the step and the prefill see it.

Hidden states of each slot that no proposer has taken yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch, TargetOutput
from guided_spec.models.causal_lm import CausalLM, SlotInputs, SlotOutput
from guided_spec.models.packed.graph_pool import pad_ids
from guided_spec.ops.host import host_integers
from guided_spec.ops.mailbox import before_waiting
from guided_spec.types import Draft

__all__ = [
    "KeptStates",
    "PromptPiece",
    "SlotTarget",
    "TakenStates",
]


class _Piece(NamedTuple):
    """The first ``length`` places of one row of a forward's hidden states, [B, n, H]."""

    hidden: Tensor
    row: int
    length: int


class TakenStates(Sequence[Tensor | None]):
    """The states of some slots, [B] tensors [n, H] or None; each is cut out when it is asked for.

    A proposer that read them ahead asks for none, and cutting takes the host as long as a launch.
    """

    def __init__(self, pieces: list[list[_Piece]]) -> None:
        self._pieces = pieces

    def __len__(self) -> int:
        return len(self._pieces)

    @overload
    def __getitem__(self, at: int) -> Tensor | None: ...
    @overload
    def __getitem__(self, at: slice) -> TakenStates: ...
    def __getitem__(self, at: int | slice) -> Tensor | None | TakenStates:
        if isinstance(at, slice):
            return TakenStates(self._pieces[at])
        parts = [hidden[row, :length] for hidden, row, length in self._pieces[at]]
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class KeptStates:
    """Keeps the hidden states of forwards, by slot, until they are taken."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[_Piece]] = {}

    def add(self, slots: Sequence[int], counts: Sequence[int], hidden: Tensor) -> None:
        """The first ``counts[i]`` places of ``hidden[i]``, of [B, n, H], belong to ``slots[i]``."""
        for row, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            self._pieces.setdefault(slot, []).append(_Piece(hidden, row, count))

    def copy(self, source: int, slot: int) -> None:
        """Give ``slot`` what is kept of ``source``."""
        if source in self._pieces:
            self._pieces[slot] = list(self._pieces[source])

    def take(self, slots: Sequence[int]) -> TakenStates:
        """What is kept of each slot, and forget it."""
        return TakenStates([self._pieces.pop(slot, []) for slot in slots])


class PromptPiece(NamedTuple):
    """Prompt tokens for ``slot``, which go behind the ``start`` that it holds already."""

    slot: int
    start: int
    token_ids: list[int]


class SlotTarget:
    """Verifies drafts and reads prompts; keeps the hidden states a proposer asked for.

    layers: hidden states to capture, see ``Proposer.aux_hidden_layers``.
    """

    def __init__(self, model: CausalLM, layers: tuple[int, ...] = ()) -> None:
        self._model = model
        self._layers = layers
        self._states = KeptStates()
        self._verified: Tensor | None = None
        self._along: Sequence[PromptPiece] = ()

    @property
    def launches_at_once(self) -> bool:
        """See ``GraphTarget``."""
        return self._model.is_packed and self._model.device.type == "cuda"

    def prefill(self, slots: Sequence[int], starts: Sequence[int], tokens: list[list[int]]) -> None:
        """Read prompt tokens into the slots, ``tokens[i]`` behind the ``starts[i]`` cached ones."""
        counts = [len(row) for row in tokens]
        inputs = SlotInputs(pad_ids(tokens, max(counts)), slots, starts, counts)
        output = self._model.forward(inputs, logits="none", hidden_layers=self._layers)
        self._model.commit(counts)
        if output.hidden_states is not None:
            self._states.add(slots, counts, output.hidden_states)

    def share_prefill(self, source: int, slot: int, length: int) -> None:
        """Give ``slot`` the first ``length`` tokens of ``source``.

        A model with a linear state must hold just these in ``source``.
        """
        self._model.copy_slot(source, [slot], length)
        self._states.copy(source, slot)

    def verify(self, batch: DecodeBatch, draft: Draft) -> TargetOutput:
        """One forward over the last committed token and the draft of every request."""
        last = host_integers([context[-1] for context in batch.contexts]).unsqueeze(1)
        # Not by ``device=``, which waits for the copy, and so for all that runs.
        token_ids = torch.cat([last.to(batch.device, non_blocking=True), draft.token_ids], 1)
        starts = [len(context) - 1 for context in batch.contexts]
        width = token_ids.shape[1]
        # Padding past a shorter draft is fed like a token: it lands where nothing valid is, and is
        # overwritten before it can be seen. That spares a download of the drafts' lengths.
        counts = [min(width, self._model.max_length - start) for start in starts]
        inputs = SlotInputs(token_ids, batch.slots, starts, counts)
        if self._along:
            output = self._verify_along(inputs)
        else:
            output = self._model.forward(inputs, logits="all", hidden_layers=self._layers)
        assert output.logits is not None
        self._verified = output.hidden_states
        return TargetOutput(output.logits, output.hidden_states)

    def read_along(self, prompts: Sequence[PromptPiece]) -> None:
        """Let the next ``verify`` read prompts too; of a packed model.

        A forward reads every weight, whether for one token or for a hundred. Replaces what was
        asked for before.
        """
        self._along = prompts

    def _verify_along(self, inputs: SlotInputs) -> SlotOutput:
        """``inputs`` in one forward with the prompts, cut into rows as long as theirs."""
        prompts, self._along = self._along, ()
        before_waiting()  # so many tokens may have to wait for their copy
        batch, width = inputs.token_ids.shape
        rows = [
            PromptPiece(slot, start + at, token_ids[at : at + width])
            for slot, start, token_ids in prompts
            for at in range(0, len(token_ids), width)
        ]
        padded = pad_ids([row.token_ids for row in rows], width)
        together = SlotInputs(
            torch.cat([inputs.token_ids, padded.to(self._model.device, non_blocking=True)]),
            [*inputs.slots, *(row.slot for row in rows)],
            [*inputs.starts, *(row.start for row in rows)],
            [*inputs.counts, *(len(row.token_ids) for row in rows)],
        )
        output = self._model.forward(together, hidden_layers=self._layers, num_scored=batch)
        states = output.hidden_states
        if states is None:
            return output
        first = batch
        for slot, _, token_ids in prompts:
            end = first + -(-len(token_ids) // width)
            self._states.add([slot], [len(token_ids)], states[first:end].flatten(0, 1)[None])
            first = end
        return SlotOutput(output.logits, states[:batch])

    def commit(self, batch: DecodeBatch, num_accepted: Sequence[int]) -> None:
        """Keep the state of the last token and the accepted draft of every request."""
        keep = [accepted + 1 for accepted in num_accepted]
        self._model.commit(keep)
        if self._verified is not None:
            self._states.add(batch.slots, keep, self._verified)
        self._verified = None

    def take_features(self, slots: Sequence[int]) -> TakenStates:
        """What became known of each slot's hidden states since the last call, and forget it."""
        return self._states.take(slots)

    def release(self, slots: Sequence[int]) -> None:
        """Forget the hidden states of ended requests."""
        self._states.take(slots)
