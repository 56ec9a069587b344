"""The device's time for what a CUDA graph holds."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from guided_spec.errors import ConfigError

__all__ = ["graph_seconds", "require_graphs"]

REPEATS = 15


def require_graphs(device: str) -> torch.device:
    """The device. Raises ConfigError where it has no CUDA graphs."""
    place = torch.device(device)
    if place.type != "cuda":
        raise ConfigError("device", device, "must be a CUDA device: others have no graphs")
    return place


def graph_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of ``run`` on a CUDA device; it waits for nothing."""
    run()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    spans = []
    for _ in range(1 + REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spans.append(float(start.elapsed_time(end)) * 1e-3)
    return statistics.median(spans[1:])
