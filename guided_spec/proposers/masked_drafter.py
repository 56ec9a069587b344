"""A draft under masks as one CUDA graph, which waits for each mask while it runs.

The host fills a mask when it has seen the token before it, and launches nothing in between: see
``guided_spec.ops.mailbox``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch, ProposerContext
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import TabledTexts
from guided_spec.models.packed.graph_pool import ROW_SIZES, Inputs, bucket, pad_rows
from guided_spec.models.packed.whole_drafts import WholeDrafts
from guided_spec.ops.host import pad_ids, to_device
from guided_spec.ops.mailbox import Mailbox, Reply, Report, fetch_rows, reply
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.draft_choice import choose_draft
from guided_spec.ops.sampling.noise import DraftNoise, Stream
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.ops.table_rows import CURSOR, SOURCE
from guided_spec.proposers.draft_chooser import GraphSampling, read_sampling, sampling_key
from guided_spec.types import SamplingParams

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
)


class DraftPrefix(NamedTuple):
    """What the drafts hold before a head continues.

    token_ids: int64 [B, K] on the host, -1 after each row's end. counts: int64 [B] on the head's
    device.
    """

    token_ids: Tensor
    counts: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], width: int, device: torch.device) -> DraftPrefix:
        """rows: [B] tokens, fewer than ``width`` each."""
        return cls(pad_ids(rows, width, -1), to_device([len(row) for row in rows], device))

    def after(self, drawn: Tensor) -> Tensor:
        """[K, B, ...]: ``drawn`` shifted to what comes after each row's tokens; then arbitrary."""
        steps = torch.arange(len(drawn), device=drawn.device).unsqueeze(1)
        indices = (self.counts + steps).clamp_max(len(drawn) - 1)
        return drawn[indices, torch.arange(len(self.counts), device=drawn.device)]


class DraftBuffers(NamedTuple):
    """Where graphs leave what they drew, in the first rows; the next draft overwrites it.

    ids: int64 [K, R], 0 where there is none. sources: int64 [K + 1, R], where the rows of tables
    lie, see ``Lookahead.leave``. probs: float32 [K, R, D], None where all are greedy. rescued:
    int64 [K, R], see ``DraftChoice``; None without a reduced vocabulary, and where all are greedy.
    """

    ids: Tensor
    sources: Tensor
    probs: Tensor | None
    rescued: Tensor | None


class MaskedTurn(NamedTuple):
    """A head's part of a step.

    ends: [B] tokens that each draft holds after it at most. prefix: None where no draft holds any
    before it. A request that drafts nothing has no prefix. texts: whose rows the device takes
    from tables; None where there are none.

    No turn ends before: the graph is launched.
    """

    lookahead: Lookahead
    ends: Sequence[int]
    prefix: DraftPrefix | None
    texts: TabledTexts | None = None

    @property
    def needs_host(self) -> bool:
        """Whether any request's mask is filled by the host."""
        return self.texts is None or not self.texts.is_alone

    def first(self) -> int:
        """The first position at which any request draws."""
        if self.prefix is None:
            return 0
        with self.at_work() as lookahead:
            rows = zip(lookahead.drafted, lookahead.is_open, strict=True)
            return min((len(drafted) for drafted, is_open in rows if is_open), default=0)

    @contextmanager
    def at_work(self) -> Iterator[Lookahead]:
        """Inside, the requests are open where they are this turn's."""
        with self.lookahead.pausing(None), self.lookahead.until(self.ends):
            yield self.lookahead


class MaskedDraft:
    """A draft that the device makes, waiting for the masks that ``accept_drawn`` fills.

    buffers: where it comes to lie. depths: of how many tokens. size: rows of its graph.
    """

    def __init__(
        self, mailbox: Mailbox, turn: MaskedTurn, buffers: DraftBuffers, depths: int, size: int
    ) -> None:
        self.buffers = buffers
        self._mailbox, self._turn, self._size = mailbox, turn, size
        self._depth = turn.first()  # the next position to accept
        self._depths = depths

    @property
    def is_advanced(self) -> bool:
        """Whether the device waits for nothing any more."""
        return self._depth >= self._depths

    @property
    def needs_host(self) -> bool:
        """Whether the device waits for the host before the draft is made."""
        return self._turn.needs_host and not self.is_advanced

    def release(self) -> None:
        """The device waits for no mask."""
        self._mailbox.release()

    def begin(self) -> None:
        """Fill the first mask. Positions before it are of prefix tokens only."""
        with self._turn.at_work() as lookahead:
            for depth in range(self._depth + 1):
                self._post(lookahead, depth)

    def accept_drawn(self, count: int | None = None) -> None:
        """Accept the next tokens as they come, ``count`` or all, and fill the mask after each.

        Does nothing once all are accepted.
        """
        end = self._depths if count is None else min(self._depths, self._depth + count)
        try:
            with self._turn.at_work() as lookahead:
                if not self._turn.needs_host:
                    self._accept_all(lookahead)
                while self._depth < end:
                    self._accept_one(lookahead)
        except BaseException:
            self._end()
            raise

    def _accept_all(self, lookahead: Lookahead) -> None:
        drawn = [self._wait(depth) for depth in range(self._depth, self._depths)]
        self._depth = self._depths
        if drawn:
            lookahead.accept_drawn(*zip(*drawn, strict=True))

    def _accept_one(self, lookahead: Lookahead) -> None:
        drawn = self._wait(self._depth)
        # A draft that holds more is still being read there.
        lookahead.accept_ids(drawn.token_ids, drawn.starved, self._depth)
        self._depth += 1
        if self._depth >= self._depths or not lookahead.can_draft(1):  # no request drafts any more
            self._end()
        else:
            self._post(lookahead, self._depth)

    def _wait(self, depth: int) -> Reply:
        return self._mailbox.wait(depth, len(self._turn.ends), self._check)

    def _post(self, lookahead: Lookahead, depth: int) -> None:
        self._mailbox.post(depth, lookahead.next_rows(self._size, depth))

    def _end(self) -> None:
        self._depth = self._depths
        self.release()

    def _check(self) -> None:
        if self.buffers.ids.is_cuda:
            torch.cuda.current_stream(self.buffers.ids.device).synchronize()


class MaskedDrafter:
    """Makes drafts under masks of one head, from step to step.

    target_ids: int64 [D], which target token each draft token is; None: the target's own.
    context: of the head's proposer.
    mailbox: of their masks and tokens. words: of a mask row. held: what its graphs sample with.
    scores_at_once: as of the head, see ``DraftForward``.
    """

    def __init__(
        self, head: WholeDrafts, target_ids: Tensor | None, context: ProposerContext
    ) -> None:
        self._head, self.target_ids, self._device = head, target_ids, context.device
        self._vocab_size = context.vocabulary.vocab_size
        self.words = num_mask_words(self._vocab_size)
        self._count = context.config.num_draft_tokens
        self._rows = bucket(context.num_slots, ROW_SIZES)
        self.mailbox = Mailbox(self._count, self._rows, self.words, context.device)
        self._stream = Stream.of_drafts(context.config.verifier)
        self._buffers: dict[bool, DraftBuffers] = {}  # by whether tokens are sampled
        self.scores_at_once = head.scores_at_once
        self.held = GraphSampling()

    def begin(
        self,
        slots: Sequence[int],
        batch: DecodeBatch,
        turn: MaskedTurn,
        sampling: Sampling,
        noise: DraftNoise | None,
    ) -> MaskedDraft:
        """Launch a draft of ``batch.num_draft_tokens`` for all requests, which stand in ``slots``.

        sampling: of the draft. noise: of the tokens after the contexts; None where every request is
        greedy.
        """
        size, count = bucket(len(slots), ROW_SIZES), batch.num_draft_tokens
        token_ids = None if turn.prefix is None else turn.prefix.token_ids
        ticket = self.mailbox.begin()
        buffers = self._buffers_for(is_sampled=noise is not None)
        draft = MaskedDraft(self.mailbox, turn, buffers, count, size)
        texts, sources = turn.texts, buffers.sources[: count + 1]
        if turn.needs_host and texts is not None:
            turn.lookahead.leave(texts, sources)
        elif not turn.needs_host:
            draft.release()
        cursors = None if texts is None else texts.cursors
        picker = _Picker(self, ticket, len(slots), buffers, sampling, noise, cursors)
        begin = draft.begin if turn.needs_host else None
        # A block's first mask has the time of its forward: no thread has to be woken to launch it.
        overlapped = None if self.scores_at_once else begin
        self._head.draft_by(picker, slots, count, token_ids, overlapped)
        if begin is not None and overlapped is None:
            begin()
        if texts is not None and not turn.needs_host:
            turn.lookahead.leave(texts, sources)  # nobody asked before the launch
        return draft

    def capture(self) -> Iterator[None]:
        """Capture the graphs of drafts: greedy, sampled, and with filters."""
        for size in self._head.row_sizes:
            for params in KINDS:
                sampling = Sampling.stack([params] * size, [0] * size, self._device)
                noise = None
                if not sampling.all_greedy:
                    zeros = torch.zeros(size, dtype=torch.int64, device=self._device)
                    noise = DraftNoise(sampling.seeds, zeros, self._stream, self._vocab_size)
                buffers = self._buffers_for(is_sampled=noise is not None)
                picker = _Picker(self, 0, size, buffers, sampling, noise)
                for num_prefix in (0, self._count):
                    self._head.capture_by(picker, self._count, num_prefix, size)
                    yield

    def _buffers_for(self, *, is_sampled: bool) -> DraftBuffers:
        if is_sampled not in self._buffers:
            depths, rows = self._count, self._rows
            # Tokens from the start, also where kernels are only being compiled.
            ids = torch.zeros(2, depths, rows, dtype=torch.int64, device=self._device)
            sources = ids.new_zeros(depths + 1, rows)
            width = self._vocab_size if self.target_ids is None else len(self.target_ids)
            probs = torch.empty(depths, rows, width, device=self._device) if is_sampled else None
            rescued = ids[1] if is_sampled and self.target_ids is not None else None
            self._buffers[is_sampled] = DraftBuffers(ids[0], sources, probs, rescued)
        return self._buffers[is_sampled]


@dataclass(eq=False, slots=True)
class _Picker:
    """Picks draft tokens under masks inside of a graph; a ``whole_drafts.Picker``.

    rows: those that are used. cursors: int64 [rows, 6] on the host, see ``TabledTexts``; None where
    no text has a table.
    """

    drafter: MaskedDrafter
    ticket: int
    rows: int
    buffers: DraftBuffers
    sampling: Sampling
    noise: DraftNoise | None
    cursors: Tensor | None = None

    @property
    def key(self) -> Hashable:
        return ("masked", *sampling_key(self.sampling, self.noise))

    def inputs(self, graph: Hashable, size: int) -> Inputs:
        inputs = dict[str, Tensor]()
        if self.noise is not None:
            inputs = self.drafter.held.changed(graph, self.sampling, self.noise, self.rows)
            inputs["positions"] = self.noise.positions
        none = torch.zeros(0, CURSOR, dtype=torch.int64)
        inputs["cursors"] = none if self.cursors is None else self.cursors
        return {name: pad_rows(value, size) for name, value in inputs.items()}

    def pick(self, ticket: Tensor, inputs: Inputs, depth: int, logits: Tensor) -> Tensor:
        drafter, buffers, rows, cursors = self.drafter, self.buffers, len(logits), inputs["cursors"]
        sources, ids = buffers.sources[:, :rows], buffers.ids[depth, :rows]
        if depth == 0:
            sources[0].copy_(cursors[:, SOURCE])
        mask = torch.empty(rows, drafter.words, dtype=torch.int32, device=logits.device)
        fetch_rows(drafter.mailbox.orders[depth], ticket, mask, sources[depth])
        drawing = read_sampling(inputs, depth, self.sampling, self.noise)
        drawn = choose_draft(logits, mask, drafter.target_ids, *drawing)
        report = Report(ticket, drafter.mailbox.replies[depth], ids)
        reply(drawn.tokens, drawn.starved, report, cursors, sources[depth + 1])
        if buffers.probs is not None and drawn.probs is not None:
            buffers.probs[depth, :rows].copy_(drawn.probs)
        if buffers.rescued is not None and drawn.rescued is not None:
            buffers.rescued[depth, :rows].copy_(drawn.rescued)
        return ids

    def found(self, picked: list[Tensor]) -> None:
        del picked  # they are in the buffers
