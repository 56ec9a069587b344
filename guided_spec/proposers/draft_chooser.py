"""The choice of a draft's tokens, as a draft loop makes it: by itself, or as a CUDA graph."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.models.graph_pool import GraphPool, Inputs, bucket
from guided_spec.models.packed_lm import pad_to
from guided_spec.ops.draft_choice import DraftNoise, choose_draft
from guided_spec.ops.warp import Sampling

__all__ = ["Chosen", "DraftChooser"]

PARAMETERS = ("temperature", "top_k", "top_p", "min_p")
# Logits of a graph at most: it keeps a copy of them, and of the probabilities where it samples.
# More of them keep the device busy for longer than the launches take.
LARGEST = 2**23


class Chosen(NamedTuple):
    """``DraftChoice``, as a draft loop uses it.

    report: int64 [3, B]: the tokens, -1 where there is none; 1 where a row starved; the tokens as
        ids that a model can read, 0 where there is none.
    probs, rescued: as of ``DraftChoice``.
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


class DraftChooser:
    """``choose_draft`` for one drafter, from step to step; on CUDA by graphs.

    The kernels of a choice take the device some microseconds and the host a hundred to launch, once
    for every token of a draft. A graph for each size of batch and set of filters is one launch;
    there is none for very large batches.

    target_ids: as of ``choose_draft``, the same at every call.
    graphs: None launches every choice by itself.
    """

    def __init__(self, target_ids: Tensor | None, graphs: GraphPool | None = None) -> None:
        self._target_ids = target_ids
        self._graphs = graphs
        self._given: dict[Any, tuple[Sampling, int]] = {}  # whose parameters each graph holds

    @classmethod
    def on(cls, device: torch.device, target_ids: Tensor | None) -> DraftChooser:
        """With graphs where the device is a CUDA device."""
        return cls(target_ids, GraphPool(device) if device.type == "cuda" else None)

    def choose(
        self, logits: Tensor, mask: Tensor | None, sampling: Sampling, noise: DraftNoise | None
    ) -> Chosen:
        """As ``choose_draft``."""
        batch = len(logits)
        size = bucket(batch)
        if self._graphs is None or size * logits.shape[1] > LARGEST:
            return _choose(logits, mask, self._target_ids, sampling, noise)
        key = (
            *(size, logits.shape[1], logits.dtype, mask is None, noise and noise[2:]),
            *(sampling.all_greedy, sampling.any_top_k, sampling.any_top_p, sampling.any_min_p),
        )
        # Rows behind the batch's own are drawn too, from whatever stands there.
        inputs = {"logits": logits} | ({} if mask is None else {"mask": mask})
        if noise is not None:
            inputs["positions"] = noise.positions
            given = self._given.get(key)
            if given is None or given[0] is not sampling or given[1] != batch:
                inputs |= {"seeds": noise.seeds}
                inputs |= {name: getattr(sampling, name) for name in PARAMETERS}
                self._given[key] = (sampling, batch)
        padded = {name: pad_to(value, (size, *value.shape[1:])) for name, value in inputs.items()}

        def body(tensors: Inputs) -> Chosen:
            drawn = (tensors["logits"], tensors.get("mask"), self._target_ids)
            if noise is None:
                return _choose(*drawn, sampling, None)
            keys = noise._replace(seeds=tensors["seeds"], positions=tensors["positions"])
            parameters: Any = {name: tensors[name] for name in PARAMETERS}
            return _choose(*drawn, replace(sampling, **parameters), keys)

        found: Chosen = self._graphs.run(key, padded, body)
        # The next choice overwrites what this one wrote.
        report, probs, rescued = found
        return Chosen(
            report[:, :batch].clone(),
            None if probs is None else probs[:batch].clone(),
            None if rescued is None or probs is None else rescued[:batch].clone(),
        )


def _choose(
    logits: Tensor,
    mask: Tensor | None,
    target_ids: Tensor | None,
    sampling: Sampling,
    noise: DraftNoise | None,
) -> Chosen:
    """``choose_draft``, launch by launch."""
    choice = choose_draft(logits, mask, target_ids, sampling, noise)
    tokens, starved = choice.tokens, choice.starved
    flags = torch.zeros_like(tokens) if starved is None else starved.to(tokens.dtype)
    report = torch.stack([tokens, flags, tokens.clamp_min(0)])
    return Chosen(report, choice.probs, choice.rescued)
