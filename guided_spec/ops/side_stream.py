"""A stream of a CUDA device for what runs beside the target's forwards: drafts, above all."""

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
    """Work in an order of its own, beside that of the current stream; see the module's docstring.

    device: where there are no streams, all of it is in one order, and nothing has to be done.

    Memory belongs to the stream on which it is allocated: who lets go of a tensor that the other
    one still reads calls ``lend`` before.
    """

    def __init__(self, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self._device = device
        self._stream: Any = torch.cuda.Stream(device, priority=URGENT) if is_cuda else None

    @classmethod
    def none(cls) -> SideStream:
        """The current stream itself."""
        return cls(torch.device("cpu"))

    def use(self) -> AbstractContextManager[object]:
        """Inside, what is launched is launched here."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def join(self) -> None:
        """What the current stream is given next waits for all that was launched here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def follow(self) -> None:
        """What is launched here next waits for all that the current stream was given."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def follow_download(self, download: Download) -> None:
        """What is launched here next waits for all that the download was launched behind."""
        if self._stream is not None and download.copied is not None:
            self._stream.wait_event(download.copied)

    def lend(self, *tensors: Tensor | None) -> None:
        """Whoever frees them, their memory stays as it is until what was launched here is done."""
        for tensor in tensors if self._stream is not None else ():
            if tensor is not None:
                tensor.record_stream(self._stream)
