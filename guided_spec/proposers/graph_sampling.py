"""How a CUDA graph that draws a draft is told what to sample with."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

from torch import Tensor

from guided_spec.models.graph_pool import Inputs
from guided_spec.ops.noise import DraftNoise
from guided_spec.ops.warp import Sampling

__all__ = ["GraphSampling", "read_sampling", "sampling_key"]

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
    flags = (sampling.all_greedy, sampling.any_top_k, sampling.any_top_p, sampling.any_min_p)
    return (*flags, noise and noise[2:])


def read_sampling(
    inputs: Inputs, depth: int, sampling: Sampling, noise: DraftNoise | None
) -> tuple[Sampling, DraftNoise | None]:
    """Both, with a graph's own tensors, for the token ``depth`` places behind its "positions".

    Without noise nothing is sampled, and nothing read.
    """
    if noise is None:
        return sampling, None
    parameters: Any = {name: inputs[name] for name in PARAMETERS}
    positions = inputs["positions"] + depth
    own = noise._replace(seeds=inputs["seeds"], positions=positions)
    return replace(sampling, **parameters), own
