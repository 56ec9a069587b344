"""A CUDA stream for work overlapped with the target's forwards: drafts, above all."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from guided_spec.ops.host import Download

# Of CUDA's, the smaller go first: a draft is many small kernels, each of which would wait for a
# large one of a forward.
URGENT = -1


class SideStream:
    """Work overlapped with that of the current stream; see the module's docstring.

    device: where it has no streams, all work is in one order, and nothing has to be done.

    Memory belongs to the stream on which it is allocated: call ``borrow`` before freeing a tensor
    that the other stream still reads.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._device = device
        self._stream: Any = torch.cuda.Stream(device, priority=URGENT) if is_cuda else None

    @classmethod
    def none(cls) -> SideStream:
        """A side stream that is the current stream itself."""
        return cls(torch.device("cpu"))

    def use(self) -> AbstractContextManager[object]:
        """Inside, what is launched is launched here."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """Work launched next on the current stream waits for all that was launched here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def after_current(self) -> None:
        """Work launched here next waits for all that was launched on the current stream."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def after_download(self, download: Download) -> None:
        """Work launched here next waits for all that was launched before the download."""
        if self._stream is not None and download.copied is not None:
            self._stream.wait_event(download.copied)

    def borrow(self, *tensors: Tensor | None) -> None:
        """Keep the tensors' memory until all that was launched here is done, even if freed."""
        for tensor in tensors if self._stream is not None else ():
            if tensor is not None:
                tensor.record_stream(self._stream)
