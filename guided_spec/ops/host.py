"""Tensors on their way to the host, while the device goes on.

Integers of Python lists as tensors.

Names for the parts of a step in a profiler's timeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from torch import Tensor
from torch.autograd import profiler

__all__ = [
    "Download",
    "host_integers",
    "named_range",
]


class Download:
    """Begins to copy a tensor to the host; what is launched afterwards is not waited for."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            # Without pinned memory the copy would wait for the device.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host = host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """The tensor on the host, once it is there."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


def host_integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """int64 on the CPU, in the shape of ``values``; rows have to be of one length.

    A step makes some of all its requests while the device waits. Numpy reads a list in a sixth of
    the time that torch takes.
    """
    return torch.from_numpy(np.array(values, dtype=np.int64))


_NOTHING = nullcontext()


def named_range(name: str) -> AbstractContextManager[object]:
    """What runs inside is called ``guided: <name>`` in the trace of a torch profiler.

    Without a running profiler nothing is recorded: the price is one look at a flag.
    """
    # torch.profiler.record_function itself takes microseconds, profiler or not.
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"guided: {name}")
    return _NOTHING
