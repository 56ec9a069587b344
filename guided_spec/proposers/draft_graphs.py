"""Whole drafts of a head, each one CUDA graph, inside of which their tokens are drawn."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.core import ProposerContext
from guided_spec.masks.rows import TabledTexts
from guided_spec.models.packed.draft_forward import DraftForward
from guided_spec.models.packed.graph_pool import (
    ROW_SIZES,
    Inputs,
    bucket,
    pack_index,
    pad_rows,
    row_sizes,
)
from guided_spec.ops.mailbox import Mailbox, Report, fetch_rows, reply
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.draft_choice import choose_draft
from guided_spec.ops.sampling.noise import DraftNoise, Stream
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.ops.table_rows import CURSOR, SOURCE
from guided_spec.proposers.choice_graphs import GraphSampling, read_sampling, sampling_key
from guided_spec.proposers.device_masks import DeviceMasks, DraftBuffers, DraftPrefix
from guided_spec.proposers.draft_session import DraftRows
from guided_spec.types import SamplingParams

KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
)


class _Drawing(NamedTuple):
    """How the tokens of a draft are drawn, and where they are left.

    noise: of the tokens after the contexts; None where every request is greedy. rows: of the batch.
    """

    sampling: Sampling
    noise: DraftNoise | None
    buffers: DraftBuffers
    rows: int

    def key(self, size: int, count: int, *, has_prefix: bool) -> Hashable:
        """What the graph of a draft depends on."""
        return ("draft", *sampling_key(self.sampling, self.noise)), has_prefix, count, size


class DraftGraphs:
    """Makes the drafts of one head, from step to step.

    target_ids: int64 [D], which target token each draft token is; None: the target's own.
    context: of the head's proposer.

    A batch that drafts under no mask has the same graph as one that does, and nothing to wait for.
    """

    def __init__(
        self, head: DraftForward, target_ids: Tensor | None, context: ProposerContext
    ) -> None:
        self._head, self._target_ids, self._device = head, target_ids, context.device
        self._vocab_size = context.vocabulary.vocab_size
        self._words = num_mask_words(self._vocab_size)
        self._longest = context.config.num_draft_tokens
        self._rows = bucket(context.num_slots, ROW_SIZES)
        self.sizes = row_sizes(context.num_slots)
        self._mailbox = Mailbox(self._longest, self._rows, context.device)
        self._stream = Stream.of_drafts(context.config.verifier)
        self._buffers: dict[bool, DraftBuffers] = {}  # by whether tokens are sampled
        self._held = GraphSampling()
        self._lengths = set[int]()  # of the drafts that were captured beforehand

    def launch(
        self,
        rows: DraftRows,
        slots: Sequence[int],
        prefix: DraftPrefix | None,
        texts: TabledTexts | None,
    ) -> DeviceMasks:
        """Launch a draft of ``batch.num_draft_tokens`` for all requests, which stand in ``slots``.

        prefix: what the drafts hold already; None where those that continue hold nothing.
        texts: whose masks the device takes from tables; None where there are none.
        """
        batch, size = rows.batch, bucket(len(slots), ROW_SIZES)
        noise = rows.noise([0] * len(slots))
        buffers = self._buffers_for(is_sampled=noise is not None)
        ticket = self._mailbox.begin()
        masks = DeviceMasks(self._mailbox, rows, buffers, size, prefix, texts)
        begin = masks.begin if masks.needs_host else None
        # A block's first mask has the time of its forward: no thread has to be woken to launch it.
        overlapped = None if self._head.scores_at_once else begin
        drawing = _Drawing(batch.sampling, noise, buffers, len(slots))
        cursors = None if texts is None else texts.cursors
        inputs = {} if prefix is None else {"prefix": prefix.token_ids}
        inputs |= {} if cursors is None else {"cursors": cursors}
        self._run(drawing, slots, batch.num_draft_tokens, ticket, inputs, overlapped)
        if begin is not None and overlapped is None:
            begin()
        elif begin is not None:
            # The device works on while the next launches are made, on the forward after the token.
            masks.accept_up_to(1)
        return masks

    @torch.inference_mode()
    def capture(self) -> Iterator[None]:
        """Capture the graphs of drafts: greedy, sampled, and with filters, one at each ``next``.

        Where one would be too large, only its kernels are made ready.
        """
        count = self._longest
        self._lengths.add(count)
        for size in self.sizes:
            for params in KINDS:
                drawing = self._drawing_for(params, size)
                for has_prefix in (False, True):
                    key = drawing.key(size, count, has_prefix=has_prefix)
                    inputs = self._inputs(drawing, key, size, {})
                    inputs["index"] = _unused(size)
                    if has_prefix:
                        inputs["prefix"] = torch.full((size, count), -1)
                    kept = key if self._head.has_graph(size, count) else None
                    body = partial(self._draft, drawing, count)
                    self._head.graphs.prepare(kept, inputs, body)
                    yield

    def length(self, count: int) -> int:
        """Tokens that the graph for a draft of ``count`` tokens makes.

        One for each number of them would take seconds to capture, where a step of a head takes a
        quarter of a millisecond.
        """
        return min((one for one in self._lengths if one >= count), default=count)

    @torch.inference_mode()
    def _run(
        self,
        drawing: _Drawing,
        slots: Sequence[int],
        count: int,
        ticket: int,
        given: dict[str, Tensor],
        overlapped: Callable[[], None] | None,
    ) -> None:
        size, count = bucket(len(slots), ROW_SIZES), self.length(count)
        starts = self._head.begin_draft(slots, count)
        prefix = given.get("prefix")
        if prefix is not None:
            given["prefix"] = functional.pad(prefix, (0, count - prefix.shape[1]), value=-1)
        key = drawing.key(size, count, has_prefix=prefix is not None)
        inputs, body = self._inputs(drawing, key, size, given), partial(self._draft, drawing, count)
        graphs = self._head.graphs
        if key not in graphs:
            # A draft moves its slots on, and may wait for the host: no slots, and no ticket.
            graphs.prepare(key, {**inputs, "index": _unused(size)}, body)
        inputs["index"] = pack_index((slots, starts, [ticket] * len(slots)), size)
        graphs.run(key, inputs, body, overlapped=overlapped)
        self._head.end_draft(slots, count)

    def _inputs(
        self, drawing: _Drawing, graph: Hashable, size: int, given: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """What ``_draft`` reads for ``size`` rows, but for "index"; see ``GraphPool.run``."""
        sampling, noise, _, rows = drawing
        inputs = {"cursors": torch.zeros(0, CURSOR, dtype=torch.int64), **given}
        if noise is not None:
            inputs |= self._held.changed(graph, sampling, noise, rows)
            inputs["positions"] = noise.positions
        return {name: pad_rows(value, size) for name, value in inputs.items()}

    def _draft(self, drawing: _Drawing, count: int, inputs: Inputs) -> None:
        """The body of a graph."""
        prefix = inputs.get("prefix")

        def pick(depth: int, logits: Tensor) -> Tensor:
            drawn = self._draw(drawing, inputs, depth, logits)
            if prefix is None:
                return drawn
            return torch.where(prefix[:, depth] < 0, drawn, prefix[:, depth])

        self._head.draft(inputs, count, pick)

    def _draw(self, drawing: _Drawing, inputs: Inputs, depth: int, logits: Tensor) -> Tensor:
        """One token for each row of logits [R, D] under its mask, int64 [R] target ids."""
        buffers, rows, ticket = drawing.buffers, len(logits), inputs["index"][2, :1]
        cursors, sources = inputs["cursors"], buffers.sources[:, :rows]
        if depth == 0:
            sources[0].copy_(cursors[:, SOURCE])
        mask = torch.empty(rows, self._words, dtype=torch.int32, device=logits.device)
        fetch_rows(self._mailbox.orders[depth], ticket, mask, sources[depth])
        sampling, noise = read_sampling(inputs, depth, drawing.sampling, drawing.noise)
        drawn = choose_draft(logits, mask, self._target_ids, sampling, noise)
        ids = buffers.ids[depth, :rows]
        report = Report(ticket, self._mailbox.replies[depth], ids)
        reply(drawn.tokens, drawn.starved, report, cursors, sources[depth + 1])
        if buffers.probs is not None and drawn.probs is not None:
            buffers.probs[depth, :rows].copy_(drawn.probs)
        if buffers.rescued is not None and drawn.rescued is not None:
            buffers.rescued[depth, :rows].copy_(drawn.rescued)
        return ids

    def _drawing_for(self, params: SamplingParams, size: int) -> _Drawing:
        sampling = Sampling.stack([params] * size, [0] * size, self._device)
        noise = None
        if not sampling.all_greedy:
            zeros = torch.zeros(size, dtype=torch.int64, device=self._device)
            noise = DraftNoise(sampling.seeds, zeros, self._stream, self._vocab_size)
        return _Drawing(sampling, noise, self._buffers_for(is_sampled=noise is not None), size)

    def _buffers_for(self, *, is_sampled: bool) -> DraftBuffers:
        if is_sampled not in self._buffers:
            depths, rows = self._longest, self._rows
            # Tokens from the start, also where kernels are only being compiled.
            ids = torch.zeros(2, depths, rows, dtype=torch.int64, device=self._device)
            sources = ids.new_zeros(depths + 1, rows)
            width = self._vocab_size if self._target_ids is None else len(self._target_ids)
            probs = torch.empty(depths, rows, width, device=self._device) if is_sampled else None
            rescued = ids[1] if is_sampled and self._target_ids is not None else None
            self._buffers[is_sampled] = DraftBuffers(ids[0], sources, probs, rescued)
        return self._buffers[is_sampled]


def _unused(size: int) -> Tensor:
    """The index of ``size`` unused rows, without a ticket."""
    return pack_index([[], [], []], size)
