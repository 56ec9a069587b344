"""Copies between host and device while the device runs, and names for a profiler."""

from __future__ import annotations

import gc
import math
import select
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import profiler

_ALIGNMENT = 64  # bytes, as of torch's own memory


class Download:
    """Begins to copy a tensor to the host; what is launched afterwards is not waited for.

    copied: the copy, and what was launched before it; None where there is nothing to wait for.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self.copied: torch.cuda.Event | None = None
        if tensor.is_cuda:
            # Without pinned memory the copy would wait for the device.
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host = host.copy_(tensor, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(torch.cuda.current_stream(tensor.device))

    def wait(self) -> Tensor:
        """The tensor on the host, once it is there."""
        if self.copied is not None:
            self.copied.synchronize()
        return self._host


def yield_cpu() -> None:
    """Let other threads of this process run: half a microsecond where none is ready.

    ``time.sleep(0)`` waits for a timer since Python 3.11, which takes 75. ``os.sched_yield`` keeps
    the interpreter to itself.
    """
    if sys.platform == "win32":  # its ``select`` takes no empty lists
        time.sleep(0)
    else:
        select.select((), (), (), 0)


def host_integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """int64 on the CPU, in the shape of ``values``; rows have to be of one length.

    A step makes some of all its requests while the device waits. Numpy reads a list in a sixth of
    the time that torch takes.
    """
    return torch.from_numpy(np.array(values, dtype=np.int64))


def to_device(
    values: Sequence[Any] | NDArray[Any], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """``values`` on a device, int64 or float32, in their shape; rows have to be of one length.

    On the CPU an array of that dtype is not copied.

    Does not wait for what the device still has to do, as ``torch.tensor(values, device=device)``
    would.
    """
    kind = np.int64 if dtype == torch.int64 else np.float32
    return torch.from_numpy(np.ascontiguousarray(values, dtype=kind)).to(device, non_blocking=True)


def pad_ids(rows: Sequence[Sequence[int]], width: int, filler: int = 0) -> Tensor:
    """int64 [B, width] on the host, ``filler`` after each row."""
    padded = [[*row, *[filler] * (width - len(row))] for row in rows]
    return host_integers(padded).view(len(padded), width)


_NOTHING = nullcontext()


def named_range(name: str) -> AbstractContextManager[object]:
    """What runs inside is called ``guided: <name>`` in the trace of a torch profiler.

    Without a running profiler nothing is recorded: the price is one look at a flag.
    """
    # torch.profiler.record_function itself takes microseconds, profiler or not.
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"guided: {name}")
    return _NOTHING


def free_memory(device: torch.device) -> None:
    """Give back what closed engines held on the device, if that is a CUDA device."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def zeros_on_demand(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of the dtype and device of ``like``.

    On the CPU memory that the system hands out as it is written to, which torch's own is not.
    """
    if type(like) is not Tensor or like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.element_size()
    memory = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[start : start + size]).view(like.dtype).view(shape)
