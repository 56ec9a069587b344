"""A timeline of what runs inside: a Chrome trace file, written by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from guided_spec.errors import ConfigError

__all__ = ["profiling"]


@contextmanager
def profiling(path: Path | None) -> Iterator[None]:
    """Write the trace of everything that runs inside to ``path``; nothing happens with None.

    All threads are in it, the engine's too, and the kernels of a CUDA device. The parts of a step
    are named (``guided_spec.ops.host``). Open the file in https://ui.perfetto.dev or in
    chrome://tracing. Everything inside is held in memory: profile seconds, not hours.

    Raises ConfigError where the file cannot be written, before anything runs.
    """
    if path is None:
        yield
        return
    _check(path)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    every_thread = _ExperimentalConfig(profile_all_threads=True)  # the engine runs in its own
    with profile(activities=activities, experimental_config=every_thread) as found:
        yield
    found.export_chrome_trace(str(path))


def _check(path: Path) -> None:
    try:
        path.open("w").close()
    except OSError as error:
        fix = f"must be a file that can be written ({error.strerror})"
        raise ConfigError("profile", str(path), fix) from error
