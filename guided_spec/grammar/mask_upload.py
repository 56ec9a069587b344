"""The mask rows of a step on a CUDA device, and how they get there."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["MaskUpload", "Uploaded"]


class Uploaded(NamedTuple):
    """Rows on the device, and the event behind which their host memory may change again."""

    rows: Tensor
    copied: torch.cuda.Event


class MaskUpload:
    """Memory for [requests, depths] rows on the device; it stays where it is for good.

    So a CUDA graph may read from it: the rows of as many requests and depths lie at the same
    address in every step. It is written again in the next step, behind whatever was launched on the
    current stream before ``begin``.
    """

    def __init__(self, requests: int, depths: int, words: int, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)
        shape = (requests * depths, words)
        self._rows = torch.empty(shape, dtype=torch.int32, device=device)
        self._next = torch.empty(requests, words, dtype=torch.int32, device=device)
        self._staged = torch.empty(requests, words, dtype=torch.int32, pin_memory=True)
        self._is_sent = torch.cuda.Event()  # the last copy from ``_staged``
        self._is_read = torch.cuda.Event()  # the last step's readers of ``_rows``

    def begin(self) -> None:
        """Start a step: what was launched so far still reads the last step's rows."""
        self._is_read.record(torch.cuda.current_stream(self._device))

    def verify_rows(self, rows: Tensor, requests: int) -> Uploaded:
        """Pinned int32 [depths * requests, W] to the device, as [requests, depths, W].

        The copy runs on a stream of its own, beside the forward; the current stream waits for it.
        """
        depths, words = len(rows) // requests, rows.shape[1]
        found = self._rows[: len(rows)].view(requests, depths, words)
        with torch.cuda.stream(self._side):
            self._side.wait_event(self._is_read)
            if requests == 1 or depths == 1:
                found.view_as(rows).copy_(rows, non_blocking=True)
                copied = self._side.record_event()
            else:
                # One contiguous copy, turned round over there: a host that gathers is slower.
                arrived = rows.to(self._device, non_blocking=True)
                copied = self._side.record_event()
                found.copy_(arrived.view(depths, requests, words).transpose(0, 1))
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        return Uploaded(found, copied)

    def stage(self, requests: int) -> Tensor:
        """Pinned int32 [requests, W] to gather rows in, for ``next_rows``."""
        self._is_sent.synchronize()
        return self._staged[:requests]

    def next_rows(self, rows: Tensor) -> Uploaded:
        """Pinned int32 [requests, W] to the device, on the current stream: it waits for them."""
        found = self._next[: len(rows)]
        found.copy_(rows, non_blocking=True)
        copied = torch.cuda.current_stream(self._device).record_event()
        if rows.data_ptr() == self._staged.data_ptr():
            self._is_sent = copied
        return Uploaded(found, copied)
