"""Tensors on their way to the host, while the device goes on."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Download"]


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
