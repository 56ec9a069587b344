"""The choice of a draft's tokens, replayed as a CUDA graph where it looks the same every time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from guided_spec.models.graph_pool import GraphPool, Inputs
from guided_spec.ops.draft_choice import DraftNoise, choose_draft
from guided_spec.ops.warp import Sampling

__all__ = ["Chosen", "DraftChooser"]

WORTH_A_GRAPH = 3  # times that a choice was made: a batch that shrinks passes through many sizes
PARAMETERS = ("temperature", "top_k", "top_p", "min_p")
MOST_GRAPHS = 64  # each keeps its results; a sampled one those of all its probabilities


_Arguments: TypeAlias = tuple[
    Tensor, Tensor | None, Tensor | None, Sampling, DraftNoise | None
]  # of choose_draft


class Chosen(NamedTuple):
    """``DraftChoice``, as a draft loop uses it.

    tokens, probs, rescued: as of ``DraftChoice``.
    fed: int64 [B] the tokens as ids that a model can read: 0 where there is none.
    report: int64 [2, B] for the host: the tokens, and 1 where a row starved.
    """

    tokens: Tensor
    fed: Tensor
    probs: Tensor | None
    rescued: Tensor | None
    report: Tensor


class DraftChooser:
    """``choose_draft`` for one drafter, from step to step.

    The kernels of a choice take the device some microseconds and the host a hundred to launch, once
    for every token of a draft. Logits and masks of the same batch lie at the same addresses in
    every step, so the launches can be captured.

    device: of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A pool for each position: graphs of one pool may write over each other's results.
        self._pools: dict[int, GraphPool] = {}
        self._seen: Counter[Hashable] = Counter()
        self._given: dict[Hashable, Sampling] = {}  # whose parameters each graph holds

    def choose(
        self,
        logits: Tensor,
        mask: Tensor | None,
        target_ids: Tensor | None,
        sampling: Sampling,
        noise: DraftNoise | None,
        depth: int = 0,
    ) -> Chosen:
        """As ``choose_draft``; ``target_ids`` have to be the same memory at every call.

        depth: the position in the draft. The choice at this one in the next draft may overwrite
            what is returned, those at others do not.
        """
        arguments = (logits, mask, target_ids, sampling, noise)
        if self._device.type != "cuda":
            return _choose(*arguments)
        key = (depth, *_key(logits, mask, sampling, noise))
        self._seen[key] += 1
        if self._seen[key] < WORTH_A_GRAPH:
            return _choose(*arguments)
        if key not in self._given and len(self._given) == MOST_GRAPHS:
            self._pools.clear()
            self._seen.clear()
            self._given.clear()
        if depth not in self._pools:
            self._pools[depth] = GraphPool(self._device)
        return self._replay(self._pools[depth], key, arguments)

    def _replay(self, pool: GraphPool, key: Hashable, arguments: _Arguments) -> Chosen:
        logits, mask, target_ids, sampling, noise = arguments
        inputs: dict[str, Tensor] = {}
        if noise is not None:
            inputs["positions"] = noise.positions
            if self._given.get(key) is not sampling:
                inputs |= {"seeds": noise.seeds}
                inputs |= {name: getattr(sampling, name) for name in PARAMETERS}
        self._given[key] = sampling

        def body(tensors: Inputs) -> Chosen:
            if noise is None:
                return _choose(logits, mask, target_ids, sampling, None)
            keys = noise._replace(seeds=tensors["seeds"], positions=tensors["positions"])
            parameters: Any = {name: tensors[name] for name in PARAMETERS}
            own = replace(sampling, **parameters)
            return _choose(logits, mask, target_ids, own, keys)

        found: Chosen = pool.run(key, inputs, body)
        return found


def _choose(
    logits: Tensor,
    mask: Tensor | None,
    target_ids: Tensor | None,
    sampling: Sampling,
    noise: DraftNoise | None,
) -> Chosen:
    choice = choose_draft(logits, mask, target_ids, sampling, noise)
    tokens, starved = choice.tokens, choice.starved
    flags = torch.zeros_like(tokens) if starved is None else starved.to(tokens.dtype)
    report = torch.stack([tokens, flags])
    return Chosen(tokens, tokens.clamp_min(0), choice.probs, choice.rescued, report)


def _key(
    logits: Tensor, mask: Tensor | None, sampling: Sampling, noise: DraftNoise | None
) -> tuple[Hashable, ...]:
    """All that the captured launches depend on: where they read, how much, and which they are."""
    at = None if mask is None else (mask.data_ptr(), mask.shape, mask.stride())
    stream = None if noise is None else noise.stream
    place = (logits.data_ptr(), logits.shape, logits.stride(), logits.dtype)
    filters = (sampling.any_top_k, sampling.any_top_p, sampling.any_min_p)
    return (*place, at, stream, sampling.all_greedy, *filters)
