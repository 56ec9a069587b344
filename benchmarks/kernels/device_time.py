"""What a device takes to run something and to read its memory: the small benchmarks' clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from guided_spec.errors import ConfigError

REPEATS = 20


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


def host_seconds(run: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> float:
    """Median seconds of ``run`` by the host's clock; ``prepare`` comes before each, untimed."""
    return statistics.median(_wall(run, prepare) for _ in range(REPEATS))


def eager_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Median seconds of ``run``, launch by launch; the first run, which compiles, is left out."""
    run()
    if device.type != "cuda":
        return host_seconds(run)
    return statistics.median(event_seconds(run) for _ in range(REPEATS))


def graph_seconds(run: Callable[[], object], device: torch.device, calls: int = 1) -> float:
    """Median seconds of ``run`` as a CUDA graph; launch by launch where there are no graphs.

    It waits for nothing. calls: one behind the other in the graph, so that the first, which begins
    on an idle device, weighs little.
    """
    if device.type != "cuda":
        return eager_seconds(run, device)
    run()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return eager_seconds(graph.replay, device) / calls


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second that the device reads, from memory that no cache holds."""
    values = torch.ones(2**28 if device.type == "cuda" else 2**24, device=device)
    return values.nbytes / eager_seconds(values.sum, device)


def _wall(run: Callable[[], object], prepare: Callable[[], object]) -> float:
    prepare()
    began = time.perf_counter()
    run()
    return time.perf_counter() - began
