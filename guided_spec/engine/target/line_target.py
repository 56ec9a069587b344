"""A target in packed form: the tokens of all texts, and pieces of prompts, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, PromptPiece, TargetOutput
from guided_spec.engine.target.routes import Routes
from guided_spec.engine.target.rows import fed_rows, push_verified
from guided_spec.models.hidden_states import HiddenStates
from guided_spec.models.line_lm import LineLM
from guided_spec.models.packed.packed_lm import LineOutput, Rows
from guided_spec.models.stock.routed import RoutedRows
from guided_spec.ops.host import to_device


class _Line(NamedTuple):
    """What one forward reads: of each text what is left of its prompt, and then what is verified.

    rows: of the forward; first those that verify, then those of other prompts. prompts: in the
    order of their rows. own: int64 [M], where the tokens are that are verified; None: before all.
    """

    rows: Rows
    prompts: Sequence[PromptPiece] = ()
    own: NDArray[np.int64] | None = None

    @classmethod
    def of(cls, rows: Rows, prompts: Sequence[PromptPiece]) -> _Line:
        """rows: what is verified. prompts: each in its own slot, or before what is verified."""
        if not prompts:
            return cls(rows)
        others = {prompt.slot: prompt for prompt in prompts}
        before = [
            others.pop(slot, PromptPiece(slot, start, []))
            for slot, start, _ in zip(*rows, strict=True)
        ]
        pieces = [*before, *others.values()]
        read = [len(piece.token_ids) for piece in pieces]
        counts = [count + one for count, one in zip_longest(rows.counts, read, fillvalue=0)]
        joined = Rows([piece.slot for piece in pieces], [piece.start for piece in pieces], counts)
        prompts = [piece for piece in pieces if piece.token_ids]
        if not any(read[: len(before)]):
            return cls(joined, prompts)
        own = np.flatnonzero(joined.steps() >= joined.spread(np.array(read)))
        return cls(joined, prompts, own)

    def order(self) -> NDArray[np.int64]:
        """int64 [N]: index of each token once verified tokens come first, then prompt tokens."""
        assert self.own is not None
        is_read = np.ones(sum(self.rows.counts), dtype=np.bool_)
        is_read[self.own] = False
        return np.argsort(np.argsort(is_read, kind="stable"))

    def pieces(self) -> Iterator[tuple[PromptPiece, int]]:
        """Each prompt, and where it begins in the line."""
        begins = np.cumsum(self.rows.counts) - np.array(self.rows.counts)
        begin_of = dict(zip(self.rows.slots, begins.tolist(), strict=True))
        return ((prompt, begin_of[prompt.slot]) for prompt in self.prompts)


class _LineRead(NamedTuple):
    """A line's forward.

    routed: as of ``TargetOutput``. prompts: the hidden states of its prompts, if any are captured.
    """

    output: LineOutput
    routed: RoutedRows | None
    prompts: HiddenStates | None = None


class ForwardAhead(NamedTuple):
    """A forward over the tokens that a step has drawn, launched before the host knows them.

    Of R rows of one token each. target: verifies what is not among them. slots, starts: [R], the
    tokens' positions. contexts: [R] of the texts, as of ``DecodeBatch``: lists that grow. output:
    of [R, 1] tokens.
    """

    target: LineTarget
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    contexts: tuple[Sequence[int], ...]
    output: TargetOutput

    def verify(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput:
        """See ``Target.verify``: nothing is left to launch for a batch of these texts."""
        launched = self._output_of(batch, flight)
        return self.target.verify(batch, flight) if launched is None else launched

    def _output_of(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput | None:
        """What it gives for a batch, all of whose texts are among its rows; None where one is not,
        or where the batch has more to read: then it was launched for nothing."""
        if batch.prompts or flight.draft.token_ids.shape[1] > 0:
            return None
        row_of = {slot: at for at, slot in enumerate(self.slots)}
        rows = [row_of.get(slot, -1) for slot in batch.slots]
        for row, context in zip(rows, batch.contexts, strict=True):
            if row < 0 or self.contexts[row] is not context or self.starts[row] != len(context) - 1:
                return None
        if len(rows) == len(self.slots):
            return self.output
        logits, hidden = self.output.logits, self.output.hidden_states
        index = to_device(rows, logits.device)
        kept = None if hidden is None else hidden[index]
        routed = None if self.output.routed is None else self.output.routed.pick(rows)
        return TargetOutput(logits[index], kept, [1] * len(rows), routed=routed)


class LineTarget:
    """A ``Target`` whose forwards take the tokens of all rows in one line.

    layers: hidden states to capture, see ``Proposer.aux_hidden_layers``.
    """

    def __init__(self, model: LineLM, layers: tuple[int, ...] = ()) -> None:
        self._model, self._layers = model, layers
        self.states = HiddenStates()
        self.routes = Routes(model.expert_layers)

    @property
    def launches_at_once(self) -> bool:
        """Whether a forward of graphs leaves the host free: on CUDA."""
        return self._model.device.type == "cuda"

    def verify(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput:
        """One forward over each row's last committed token and draft: logits [B, K + 1, V].

        It reads ``batch.prompts`` too: a forward reads every weight, whether for one token or for a
        hundred.
        """
        token_ids, rows = fed_rows(batch, flight, self._model.max_length)
        line = _Line.of(rows, self._read_apart(rows, batch.prompts))
        output = self._verify_line(token_ids, rows, line, flight.serve_mailbox)
        pairs = zip(line.rows.counts, rows.counts, strict=False)
        return output._replace(num_before=[both - count for both, count in pairs])

    def commit(self, batch: DecodeBatch, num_accepted: Sequence[int], output: TargetOutput) -> None:
        """Keep what was accepted, and all that was read of prompts; see ``Target.commit``."""
        keep = [accepted + 1 for accepted in num_accepted]
        assert output.counts is not None, "every row of a line has its own"
        before = output.num_before or [0] * len(keep)
        fed = [[*map(sum, zip(many, before, strict=True))] for many in (keep, output.counts)]
        self._model.commit(*fed)
        self.routes.push(output.routed, fed[0])
        if output.hidden_states is not None:
            push_verified(self.states, batch, keep, output.hidden_states)

    def run_ahead(self, batch: DecodeBatch, token_ids: Tensor) -> ForwardAhead | None:
        """Launch the forward over ``token_ids`` int64 [B, 1] before the host has read them.

        Texts that are known to end with this token are left out. None where the others have no
        blocks for it.
        """
        texts = zip(batch.slots, batch.contexts, batch.limits, strict=True)
        rows = [at for at, (_, context, limit) in enumerate(texts) if self._goes_on(context, limit)]
        slots = tuple(batch.slots[at] for at in rows)
        contexts = tuple(batch.contexts[at] for at in rows)
        starts = tuple(map(len, contexts))
        if not rows or not self._model.holds(slots, [start + 1 for start in starts]):
            return None
        fed = token_ids.clamp_min(0)
        if len(rows) < len(batch):
            fed = fed[to_device(rows, batch.device)]
        line = _Line(Rows(slots, starts, [1] * len(rows)))
        output = self._verify_line(fed, line.rows, line, None)
        return ForwardAhead(self, slots, starts, contexts, output)

    def _goes_on(self, context: Sequence[int], limit: int) -> bool:
        return limit > 0 and len(context) < self._model.max_length

    def read(self, prompts: Sequence[PromptPiece]) -> None:
        """Read prompts by a forward of their own, one after another in its line."""
        line = _Line.of(Rows((), (), ()), prompts)
        none = torch.empty(0, dtype=torch.int64, device=self._model.device)
        self.routes.push(self._read_line(none, line).routed)

    def _read_apart(self, rows: Rows, prompts: Sequence[PromptPiece]) -> Sequence[PromptPiece]:
        """Read now what cannot be in one row with a draft; returns the other prompts.

        No linear state goes back into a row as long as a prompt.
        """
        if not self._model.has_linear_state:
            return prompts
        drafted = {slot for slot, count in zip(rows.slots, rows.counts, strict=True) if count > 1}
        apart = [prompt for prompt in prompts if prompt.slot in drafted]
        if apart:
            self.read(apart)
        return [prompt for prompt in prompts if prompt.slot not in drafted]

    def _verify_line(
        self, token_ids: Tensor, rows: Rows, line: _Line, serve_mailbox: Callable[[], None] | None
    ) -> TargetOutput:
        """int64 [B, T], of which ``rows`` says how many count, as tokens of ``line``.

        serve_mailbox: as of ``DraftInFlight``.
        """
        batch, width = token_ids.shape
        total, own, fed = sum(rows.counts), line.own, token_ids.flatten()
        is_ragged = total < batch * width  # else the line has the tokens in the order of the rows
        wanted = [rows.token_index(width), rows.padded(width).flatten()] if is_ragged else []
        wanted += [] if own is None else [own]
        indices = mixed = None
        if wanted:  # in one copy
            index = to_device(np.concatenate(wanted), self._model.device)
            cuts = [total, total + batch * width] if is_ragged else [0, 0]
            picked, indices, mixed = index.tensor_split(cuts)
            fed = fed[picked] if is_ragged else fed
        (states, hidden), routed, prompts = self._read_line(fed, line, serve_mailbox)
        if own is not None:
            states, hidden = states[mixed], None if hidden is None else hidden[mixed]
        else:
            states = states[:total]
        logits = self._model.logits(states)
        if is_ragged:
            logits = logits[indices]
        if hidden is not None:  # a copy: the next forward overwrites these
            hidden = hidden[indices] if is_ragged else hidden[:total].clone()
            hidden = hidden.view(batch, width, -1)
        found = (logits.view(batch, width, -1), hidden, rows.counts, prompts)
        return TargetOutput(*found, routed=routed)

    def _read_line(
        self, token_ids: Tensor, line: _Line, serve_mailbox: Callable[[], None] | None = None
    ) -> _LineRead:
        """Tokens int64 [M] on the device that are verified, and prompts, whose states are kept."""
        device, prompts = self._model.device, line.prompts
        if prompts:
            if serve_mailbox is not None:  # so many tokens may have to wait for their copy
                serve_mailbox()
                serve_mailbox = None
            read = to_device([one for prompt in prompts for one in prompt.token_ids], device)
            token_ids = torch.cat([token_ids, read])
        if line.own is not None:
            token_ids = token_ids[to_device(line.order(), device)]
        recorder = self.routes.recorder(line.rows.slots)
        fed = (token_ids, line.rows, self._layers, serve_mailbox, recorder)
        output = self._model.forward_line(*fed)
        routed = RoutedRows.of(recorder, line.rows)
        if output.hidden_states is None or not prompts:
            return _LineRead(output, routed)
        # A copy: the next forward overwrites these, and a proposer reads them after it.
        hidden, found = output.hidden_states.clone(), HiddenStates()
        for piece, first in line.pieces():
            states = hidden[first : first + len(piece.token_ids)]
            for one in (found, self.states):
                one.push(piece.slot, piece.start, piece.tokens, states)
        return _LineRead(output, routed, found)
