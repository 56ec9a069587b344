"""What a device takes to run something, and to read its memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from guided_spec.errors import ConfigError

__all__ = ["event_seconds", "graph_seconds", "read_bandwidth", "require_graphs"]

REPEATS = 15


def require_graphs(device: str) -> torch.device:
    """The device. Raises ConfigError where it has no CUDA graphs."""
    place = torch.device(device)
    if place.type != "cuda":
        raise ConfigError("device", device, "must be a CUDA device: others have no graphs")
    return place


def event_seconds(run: Callable[[], object]) -> float:
    """Of one run, from an idle CUDA device to an idle one."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def graph_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of ``run`` as a graph on a CUDA device; it waits for nothing."""
    run()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    spans = [event_seconds(graph.replay) for _ in range(1 + REPEATS)]
    return statistics.median(spans[1:])


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that the device reads, from memory that no cache holds."""
    values = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    values.sum()
    if device.type == "cuda":
        return values.nbytes / min(event_seconds(values.sum) for _ in range(REPEATS))
    began = time.perf_counter()
    values.sum()
    return values.nbytes / (time.perf_counter() - began)
