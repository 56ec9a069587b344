"""The target, a causal LM over KV slots, and what its forwards read: steps, prompts, given texts.

Also the hidden states that no proposer has taken yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import NamedTuple, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import log_softmax

from guided_spec.core import DecodeBatch, DraftInFlight, PromptPiece, TargetOutput
from guided_spec.engine.request import Request
from guided_spec.errors import NoTokenLeftError
from guided_spec.grammar.choice_tree import ChoiceTree, TokenRow
from guided_spec.models.causal_lm import CausalLM
from guided_spec.models.packed.graph_pool import filled
from guided_spec.models.packed.packed_lm import LineOutput, Rows
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.ops.host import pad_ids, to_device


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

    def take(self, slots: Sequence[int], later: Container[int] = ()) -> TakenStates:
        """What is kept of each slot, and forget it; nothing of those that are asked for later."""
        return TakenStates([[] if at in later else self._pieces.pop(at, []) for at in slots])


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
        """int64 [N]: which each token is, of those that are verified and, behind, of prompts."""
        assert self.own is not None
        is_read = np.ones(sum(self.rows.counts), dtype=np.bool_)
        is_read[self.own] = False
        return np.argsort(np.argsort(is_read, kind="stable"))

    def pieces(self) -> Iterator[tuple[PromptPiece, int]]:
        """Each prompt, and where it begins in the line."""
        begins = np.cumsum(self.rows.counts) - np.array(self.rows.counts)
        places = dict(zip(self.rows.slots, begins.tolist(), strict=True))
        return ((prompt, places[prompt.slot]) for prompt in self.prompts)


class _LineRead(NamedTuple):
    """A line's forward. prompts: the hidden states of its prompts, by slot, if any are captured."""

    output: LineOutput
    prompts: dict[int, Tensor]


class ForwardAhead(NamedTuple):
    """A forward over the tokens that a step has drawn, launched before the host knows them.

    Of R rows of one token each. slots, starts: [R], where the tokens stand. contexts: [R] of the
    texts, as of ``DecodeBatch``: lists that grow. output: of [R, 1] tokens.
    """

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    contexts: tuple[Sequence[int], ...]
    output: TargetOutput

    def of(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput | None:
        """What it gives for a batch, all of whose texts are among its rows; None where one is not,
        or where the batch has more to read: then it was launched for nothing."""
        if batch.prompts or flight.draft.token_ids.shape[1] > 0:
            return None
        places = {slot: at for at, slot in enumerate(self.slots)}
        rows = [places.get(slot, -1) for slot in batch.slots]
        for row, context in zip(rows, batch.contexts, strict=True):
            if row < 0 or self.contexts[row] is not context or self.starts[row] != len(context) - 1:
                return None
        if len(rows) == len(self.slots):
            return self.output
        logits, hidden = self.output.logits, self.output.hidden_states
        index = to_device(rows, logits.device)
        return TargetOutput(logits[index], None if hidden is None else hidden[index])


class SlotTarget:
    """Verifies drafts and reads prompts; keeps the hidden states a proposer asked for.

    layers: hidden states to capture, see ``Proposer.aux_hidden_layers``.
    """

    def __init__(self, model: CausalLM, layers: tuple[int, ...] = ()) -> None:
        self._model = model
        self._layers = layers
        self._states = KeptStates()
        self._ahead: ForwardAhead | None = None

    @property
    def launches_at_once(self) -> bool:
        """See ``speculative_step``; so ``run_ahead`` leaves the host free too."""
        return self._model.is_packed and self._model.device.type == "cuda"

    def share_prefill(self, source: int, slot: int, length: int) -> None:
        """Give ``slot`` the first ``length`` tokens of ``source``.

        A model with a linear state must hold just these in ``source``.
        """
        self._model.copy_slot(source, [slot], length)
        self._states.copy(source, slot)

    def verify(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput:
        """One forward over the last committed token and the draft of every request.

        A packed model reads ``batch.prompts`` too: a forward reads every weight, whether for one
        token or for a hundred. Where ``run_ahead`` was called for the same texts, it is launched.
        """
        ahead, self._ahead = self._ahead, None
        launched = None if ahead is None else ahead.of(batch, flight)
        if launched is not None:
            return launched
        # What is behind the end of a shorter draft is fed like a token: it lands where nothing
        # valid is, and is overwritten before it can be seen. That spares a download of its length.
        last = to_device([[context[-1]] for context in batch.contexts], batch.device)
        token_ids = torch.cat([last, flight.draft.token_ids], 1)
        starts = [len(context) - 1 for context in batch.contexts]
        longest = self._model.max_length
        pairs = zip(flight.most, starts, strict=True)
        counts = [min(1 + count, longest - start) for count, start in pairs]
        rows = Rows(batch.slots, starts, counts)
        if self._model.is_packed:
            line = _Line.of(rows, self._read_apart(rows, batch.prompts))
            output = self._verify_line(token_ids, rows, line, flight.serve_mailbox)
            pairs = zip(line.rows.counts, rows.counts, strict=False)
            return output._replace(num_before=[both - count for both, count in pairs])
        assert not batch.prompts, "a stock model takes one row a slot"
        inputs = SlotInputs(token_ids, rows.slots, rows.starts, rows.counts)
        found = self._model.forward(inputs, logits="all", hidden_layers=self._layers)
        assert found.logits is not None
        return TargetOutput(found.logits, found.hidden_states)

    def run_ahead(self, batch: DecodeBatch, token_ids: Tensor) -> None:
        """Launch the next forward of a packed model: over the only token that each text has got.

        token_ids: int64 [B, 1] on the device, -1 for none. Texts that end with it, as far as that
        is known, are left out. Does nothing where the others have no blocks for it.
        """
        texts = zip(batch.slots, batch.contexts, batch.limits, strict=True)
        rows = [at for at, (_, context, limit) in enumerate(texts) if self._goes_on(context, limit)]
        slots = tuple(batch.slots[at] for at in rows)
        contexts = tuple(batch.contexts[at] for at in rows)
        starts = tuple(map(len, contexts))
        if not rows or not self._model.holds(slots, [start + 1 for start in starts]):
            return
        fed = token_ids.clamp_min(0)
        if len(rows) < len(batch):
            fed = fed[to_device(rows, batch.device)]
        line = _Line(Rows(slots, starts, [1] * len(rows)))
        output = self._verify_line(fed, line.rows, line, None)
        self._ahead = ForwardAhead(slots, starts, contexts, output)

    def _goes_on(self, context: Sequence[int], limit: int) -> bool:
        return limit > 0 and len(context) < self._model.max_length

    @property
    def is_ahead(self) -> bool:
        """Whether the forward that verifies next is launched."""
        return self._ahead is not None

    def drop_ahead(self) -> None:
        """Forget a forward that is launched: its texts go elsewhere."""
        self._ahead = None

    def read(self, prompts: Sequence[PromptPiece]) -> None:
        """Read prompts by a forward of their own; a stock model pads them to the longest one."""
        if self._model.is_packed:
            line = _Line.of(Rows((), (), ()), prompts)
            self._read_line(torch.empty(0, dtype=torch.int64, device=self._model.device), line)
            return
        slots, starts, tokens, _ = zip(*prompts, strict=True)
        counts = [len(row) for row in tokens]
        inputs = SlotInputs(pad_ids(tokens, max(counts)), slots, starts, counts)
        output = self._model.forward(inputs, logits="none", hidden_layers=self._layers)
        self._model.commit(counts)
        if output.hidden_states is not None:
            self._states.add(slots, counts, output.hidden_states)

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
        is_ragged = total < batch * width  # else the tokens stand in the line as in their rows
        wanted = [rows.token_index(width), rows.padded(width).flatten()] if is_ragged else []
        wanted += [] if own is None else [own]
        places = mixed = None
        if wanted:  # in one copy
            index = to_device(np.concatenate(wanted), self._model.device)
            cuts = [total, total + batch * width] if is_ragged else [0, 0]
            picked, places, mixed = index.tensor_split(cuts)
            fed = fed[picked] if is_ragged else fed
        (states, hidden), prompts = self._read_line(fed, line, serve_mailbox)
        if own is not None:
            states, hidden = states[mixed], None if hidden is None else hidden[mixed]
        else:
            states = states[:total]
        logits = self._model.logits(states)
        if is_ragged:
            logits = logits[places]
        if hidden is not None:  # a copy: the next forward overwrites these
            hidden = hidden[places] if is_ragged else hidden[:total].clone()
            hidden = hidden.view(batch, width, -1)
        return TargetOutput(logits.view(batch, width, -1), hidden, rows.counts, prompts)

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
        output = self._model.forward_line(token_ids, line.rows, self._layers, serve_mailbox)
        found = dict[int, Tensor]()
        if output.hidden_states is not None and prompts:
            # A copy: the next forward overwrites these, and a proposer reads them behind it.
            hidden = output.hidden_states.clone()
            for piece, first in line.pieces():
                states = hidden[first : first + len(piece.token_ids)]
                found[piece.slot] = states
                self._states.add([piece.slot], [len(states)], states.unsqueeze(0))
        return _LineRead(output, found)

    def commit(self, batch: DecodeBatch, num_accepted: Sequence[int], output: TargetOutput) -> None:
        """Keep the state of the last token and the accepted draft of every request.

        output: of its forward.
        """
        keep = [accepted + 1 for accepted in num_accepted]
        before = output.num_before or [0] * len(keep)
        self._model.commit([one + read for one, read in zip(keep, before, strict=True)])
        if output.hidden_states is not None:
            self._states.add(batch.slots, keep, output.hidden_states)

    def take_features(self, slots: Sequence[int], coming: Container[int] = ()) -> TakenStates:
        """What became known of each slot's hidden states since the last call, and forget it.

        coming: slots whose prompts are not read yet: theirs are kept until they are.
        """
        return self._states.take(slots, coming)

    def release(self, slots: Sequence[int]) -> None:
        """Forget the hidden states of ended requests."""
        self._states.take(slots)


def score_rows(model: CausalLM, requests: Sequence[Request]) -> None:
    """One forward over the next row of each request. Their slots keep their prompts alone.

    A request ends behind its last row, or where the model gives no branch any probability.
    """
    tasks = [_next(request) for request in requests]
    fed = [[one.request.text.tokens[-1], *one.row.token_ids] for one in tasks]
    counts = [len(token_ids) for token_ids in fed]
    starts = [request.text.prompt_length - 1 for request in requests]
    slots = [request.text.slot for request in requests]
    before = model.save_states(slots)
    output = model.forward(SlotInputs(pad_ids(fed, max(counts)), slots, starts, counts))
    model.commit(counts)
    model.load_states(slots, before)
    assert output.logits is not None
    asked = [(at, one.tree.nodes[node]) for at, one in enumerate(tasks) for node in one.row.nodes]
    listed = [[branch.token_id for branch in node.branches] for _, node in asked]
    ids = pad_ids(listed, max(map(len, listed)), -1)
    places = to_device([(at, len(node.path)) for at, node in asked], model.device)
    logits = output.logits[places[:, :1], places[:, 1:], ids.to(model.device).clamp(min=0)]
    logits = logits.cpu().double().masked_fill(ids < 0, -math.inf)
    found = iter(log_softmax(logits, -1).tolist())
    for one in tasks:
        branches = {node: len(one.tree.nodes[node].branches) for node in one.row.nodes}
        one.take({node: next(found)[:count] for node, count in branches.items()})


def scored_length(request: Request) -> int:
    """Positions that the request's slot holds while its next row is scored."""
    return request.text.prompt_length + len(_next(request).row.token_ids)


class _Task(NamedTuple):
    """The row that a request reads next. is_last: no other follows."""

    request: Request
    tree: ChoiceTree
    row: TokenRow
    is_last: bool

    def take(self, scores: dict[int, list[float]]) -> None:
        """The scores of the row."""
        if any(map(math.isnan, sum(scores.values(), []))):
            error = NoTokenLeftError("the model gives no legal token any probability")
            self.request.fail(error)
        self.request.scores.append(scores)
        if self.is_last:
            self.request.finish("stop")


def _next(request: Request) -> _Task:
    assert request.job.scoring is not None
    tree, rows = request.job.scoring
    at = len(request.scores)
    return _Task(request, tree, rows[at], at == len(rows) - 1)


# Padded tokens that one forward may hold. A forward reads all weights, so that a few hundred tokens
# take hardly longer than a few: that many are wasted before another forward is cheaper.
WORTH_A_FORWARD = 256


class PromptGroup(NamedTuple):
    """Rows of one forward. members: indices into the lengths, ascending. width: tokens a row."""

    members: list[int]
    width: int


def group_prompts(lengths: Sequence[int], budget: int) -> list[PromptGroup]:
    """Deal the prompts that are read next to forwards of rows about as long as each other.

    lengths: tokens that each prompt has left, at least 1. budget: tokens of all forwards together,
        padding included.

    The first prompts come first; those that the budget has no room for are in no group. A prompt
    longer than the budget is cut to it, and then alone.
    """
    chosen: list[int] = []
    width = 0
    for at, length in enumerate(lengths):
        wider = max(width, min(length, budget))
        if chosen and wider * (len(chosen) + 1) > budget:
            break
        chosen.append(at)
        width = wider
    groups: list[PromptGroup] = []
    padding = 0
    for at in sorted(chosen, key=lambda at: lengths[at]):
        length = min(lengths[at], budget)
        if groups:
            last = groups[-1]
            padding += (length - last.width) * len(last.members)
            if padding <= WORTH_A_FORWARD:
                groups[-1] = PromptGroup([*last.members, at], length)
                continue
        groups.append(PromptGroup([at], length))
        padding = 0
    return [PromptGroup(sorted(group.members), group.width) for group in groups]


# Prompt tokens that a verify forward may always read besides: so few cost a GPU little, and
# less than a forward of their own, which reads the weights again. No text waits long for them.
ALONG = 512
# Steps that what waits to be read is spread over, where that is more and few texts wait for it. A
# few prompts of thousands of tokens must not make steps longer, whole books that wait must. Pieces
# stay as large to the last: smaller ones take longer for each of their tokens.
STEPS_TO_READ = 64
# Texts that wait for their prompts, from which on these are read in fewer steps. Short prompts of
# many texts take no longer than a few drafts, and a forward writes more with all of them in it.
MANY = 8


def tokens_along(
    unread: Sequence[int],
    backlog: int,
    num_decoding: int,
    num_own: int,
    most: int,
    sizes: Sequence[int],
) -> int:
    """Prompt tokens, of ``most``, that the next verify forward reads besides.

    unread: of each text that waits for its prompt, in the order in which they are read. backlog:
    the most that these came to since none waited.
    num_decoding: texts that wait for the forward. num_own: tokens of theirs. sizes: of the graphs.

    The more tokens wait, the more texts, and the more texts for each that decodes, the longer
    may that one wait for a forward: all end sooner so. It is cut so that it fills a graph: one
    token more would take as long as the next graph does.
    """
    share = (len(unread) + num_decoding) / num_decoding * max(1, len(unread) / MANY)
    wanted = min(max(ALONG, int(backlog * share) // STEPS_TO_READ), most)
    # Behind the end of a prompt stands one token more, whose logits are asked for.
    others = num_own + sum(end <= wanted for end in accumulate(unread))
    room = filled(wanted + others, sizes) - others
    return room if 2 * room >= wanted else wanted
