"""The choice of one draft token after another, each launched by itself or as a CUDA graph.

And the sampling parameters of a CUDA graph that draws a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.core import ProposerContext
from guided_spec.masks.rows import TableAdvance, TabledTexts
from guided_spec.models.packed.graph_pool import GraphPool, Inputs, bucket, pad_rows
from guided_spec.ops.kernels import has_triton
from guided_spec.ops.sampling.draft_choice import choose_draft
from guided_spec.ops.sampling.noise import DraftNoise
from guided_spec.ops.sampling.warm_up import Choices, launch_choices
from guided_spec.ops.sampling.warp import Sampling

PARAMETERS = ("temperature", "top_k", "top_p", "min_p")  # of ``Sampling``, that a graph reads


class GraphSampling:
    """Which parameters the graphs of one drafter hold: they are copied when they change."""

    def __init__(self) -> None:
        self._held: dict[Hashable, tuple[Sampling, int]] = {}

    def changed(
        self, graph: Hashable, sampling: Sampling, noise: DraftNoise, batch: int
    ) -> dict[str, Tensor]:
        """What to give a graph that draws for ``batch`` rows; from then on it holds that.

        graph: its key. The same object ``sampling`` means the same parameters.
        """
        held = self._held.get(graph)
        if held is not None and held[0] is sampling and held[1] == batch:
            return {}
        self._held[graph] = (sampling, batch)
        return {"seeds": noise.seeds, **{name: getattr(sampling, name) for name in PARAMETERS}}


def sampling_key(sampling: Sampling, noise: DraftNoise | None) -> tuple[Hashable, ...]:
    """What a graph depends on besides the tensors that it reads."""
    return (sampling.all_greedy, is_filtered(sampling), noise and noise[2:])


def is_filtered(sampling: Sampling) -> bool:
    """Whether any row has a filter. A graph then looks for all of them: so there are few graphs."""
    return sampling.any_top_k or sampling.any_top_p or sampling.any_min_p


def read_sampling(
    inputs: Inputs, depth: int, sampling: Sampling, noise: DraftNoise | None
) -> tuple[Sampling, DraftNoise | None]:
    """Both, with a graph's own tensors, for the token ``depth`` after its "positions".

    Without noise nothing is sampled, and nothing read.
    """
    if noise is None:
        return sampling, None
    parameters: Any = {name: inputs[name] for name in PARAMETERS}
    positions = inputs["positions"] + depth
    own = noise._replace(seeds=inputs["seeds"], positions=positions)
    flags: Any = dict.fromkeys(("any_top_k", "any_top_p", "any_min_p"), is_filtered(sampling))
    return replace(sampling, **parameters, **flags), own


# Logits of a graph at most. More of them keep the device busy for longer than the launches take,
# and a graph that samples keeps as many probabilities for itself.
LARGEST = 2**23
LARGEST_SAMPLED = 2**21


class Chosen(NamedTuple):
    """``DraftChoice``, as ``HostMasks`` uses it.

    report: int64 [3, B]: the tokens, -1 where there is none; 1 where a row starved; the tokens as
        ids that a model can read, 0 where there is none.
    probs, rescued: as of ``DraftChoice``.

    On CUDA the next choice at the same depth overwrites all of it.
    """

    report: Tensor
    probs: Tensor | None
    rescued: Tensor | None

    @property
    def tokens(self) -> Tensor:
        """int64 [B], -1 where there is none."""
        return self.report[0]

    @property
    def readable(self) -> Tensor:
        """int64 [B], 0 where there is none."""
        return self.report[2]


class ChoiceGraphs:
    """``choose_draft`` for one drafter, from step to step; on CUDA by graphs.

    The kernels of a choice take the device some microseconds and the host a hundred to launch, once
    for every token of a draft. A graph for each depth, size of batch and set of filters is one
    launch; there is none for very large batches.

    target_ids: as of ``choose_draft``, the same at every call.
    graphs: None launches every choice by itself. sources: the drafter's own graphs, whose logits
        are read at their addresses.
    """

    def __init__(
        self,
        target_ids: Tensor | None,
        graphs: GraphPool | None = None,
        sources: GraphPool | None = None,
    ) -> None:
        self._target_ids = target_ids
        self._graphs = graphs
        self._sources = sources
        self._held = GraphSampling()
        self._buffers: dict[tuple[int, int, bool], Chosen] = {}  # by depth and size
        self._positions: dict[int, Tensor] = {}  # of a draft's first tokens, by size of graph
        self._advances: dict[tuple[int, int], TableAdvance] = {}  # by length and size
        self._first: tuple[DraftNoise, int] | None = None  # whose positions these are

    @classmethod
    def on(
        cls, context: ProposerContext, target_ids: Tensor | None, sources: GraphPool | None = None
    ) -> ChoiceGraphs:
        """For a proposer of ``context``: with graphs on CUDA, captured while its window is open."""
        device = context.device
        is_cuda = device.type == "cuda"
        graphs = GraphPool(device, context.window, is_on_side_stream=True) if is_cuda else None
        return cls(target_ids, graphs, sources)

    def capture(self, context: ProposerContext, dtype: torch.dtype) -> None:
        """Have the kernels of all choices compiled; the graphs come with the steps.

        dtype: of the drafter's logits.
        """
        if context.device.type == "cuda" and has_triton():
            verifier, size = context.config.verifier, context.vocabulary.vocab_size
            launch_choices(Choices(self._target_ids, size, verifier, dtype, context.device))

    def begin_advance(self, texts: TabledTexts, length: int, device: torch.device) -> TableAdvance:
        """The states of texts in their tables for ``length`` tokens, passed to each ``choose``.

        The next call returns the same memory.
        """
        size = bucket(len(texts.cursors))
        if (length, size) not in self._advances:
            self._advances[length, size] = TableAdvance.of(length, size, device)
        tabled = self._advances[length, size]
        tabled.begin(texts.cursors)
        return tabled

    def choose(
        self,
        depth: int,
        logits: Tensor,
        mask: Tensor | None,
        sampling: Sampling,
        noise: DraftNoise | None,
        tabled: TableAdvance | None = None,
    ) -> Chosen:
        """Draw one token [B], ``depth`` tokens after ``noise.positions``; see ``choose_draft``.

        mask: a ``Lookahead``'s: on CUDA in the same memory at every call. noise: the same object
            for all tokens of a draft. tabled: the texts whose rows of the mask come from tables;
            these may be written into ``mask``, and the tokens advance it.
        """
        batch = len(logits)
        size = bucket(batch)
        largest = LARGEST if noise is None else LARGEST_SAMPLED
        if self._graphs is None or size * logits.shape[1] > largest:
            at = None if noise is None else noise._replace(positions=noise.positions + depth)
            return self._choose_at(depth, logits, mask, sampling, at, tabled)
        # Rows after the batch's own are drawn too, from whatever the memory holds.
        inputs, fixed = self._split(logits, mask, size)
        if noise is not None:
            fixed["positions"] = self._positions_of(noise, size)
        key = (
            *(depth, size, logits.shape[1], logits.dtype, mask is None),
            *sampling_key(sampling, noise),
            *(tensor.data_ptr() for tensor in fixed.values()),
            None if tabled is None else tabled.cursors.data_ptr(),
        )
        if noise is not None:
            inputs |= self._held.changed(key, sampling, noise, batch)
        padded = {name: pad_rows(value, size) for name, value in inputs.items()}

        buffers = self._buffers_for(depth, size, logits, is_sampled=noise is not None)
        self._graphs.run(key, padded, self._body(depth, sampling, noise, buffers, tabled), fixed)
        report, probs, rescued = buffers
        return Chosen(
            report[:, :batch],
            None if probs is None else probs[:batch],
            None if rescued is None else rescued[:batch],
        )

    def _buffers_for(self, depth: int, size: int, logits: Tensor, *, is_sampled: bool) -> Chosen:
        """Where the choices of a depth are left.

        Not in the graphs' own memory: they share it, so that the next depth's may write there.
        """
        key = (depth, size, is_sampled)
        if key not in self._buffers:
            ids = logits.new_empty(4, size, dtype=torch.int64)
            rescued = None if self._target_ids is None else ids[3]
            probs = None
            if is_sampled:
                probs = logits.new_empty(size, logits.shape[1], dtype=torch.float32)
            self._buffers[key] = Chosen(ids[:3], probs, rescued)
        return self._buffers[key]

    def _body(
        self,
        depth: int,
        sampling: Sampling,
        noise: DraftNoise | None,
        buffers: Chosen,
        tabled: TableAdvance | None,
    ) -> Callable[[Inputs], None]:
        """What a graph holds: the choice from the tensors passed to it, left in ``buffers``."""

        def body(tensors: Inputs) -> None:
            given = (tensors["logits"], tensors.get("mask"))
            drawing = read_sampling(tensors, depth, sampling, noise)
            found = self._choose_at(depth, *given, *drawing, tabled)
            for kept, value in zip(buffers, found, strict=True):
                if kept is not None and value is not None:
                    kept.copy_(value)

        return body

    def _choose_at(
        self,
        depth: int,
        logits: Tensor,
        mask: Tensor | None,
        sampling: Sampling,
        noise: DraftNoise | None,
        tabled: TableAdvance | None,
    ) -> Chosen:
        """``choose_draft``, launch by launch. noise: of this token."""
        if tabled is not None and mask is not None:
            tabled.mask(depth, mask)
        choice = choose_draft(logits, mask, self._target_ids, sampling, noise)
        tokens, starved = choice.tokens, choice.starved
        if tabled is not None:
            tabled.append(depth, tokens)
        flags = torch.zeros_like(tokens) if starved is None else starved.to(tokens.dtype)
        report = torch.stack([tokens, flags, tokens.clamp_min(0)])
        return Chosen(report, choice.probs, choice.rescued)

    def _positions_of(self, noise: DraftNoise, size: int) -> Tensor:
        """``noise.positions`` in the memory where all graphs of a size read them; copied once."""
        if self._first is None or self._first[0] is not noise or self._first[1] != size:
            kept = self._positions.setdefault(size, noise.positions.new_zeros(size))
            kept[: len(noise.positions)].copy_(noise.positions)
            self._first = (noise, size)
        return self._positions[size]

    def _split(
        self, logits: Tensor, mask: Tensor | None, size: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What has to be copied for a graph of ``size`` rows, and what it can read where it is."""
        copied, fixed = {"logits": logits}, dict[str, Tensor]()
        whole = None if self._sources is None else self._sources.whole(logits)
        if whole is not None and len(whole) >= size:
            copied, fixed = {}, {"logits": whole[:size]}
        if mask is not None:
            (fixed if mask.is_cuda and len(mask) == size else copied)["mask"] = mask
        return copied, fixed
