"""How busy a GPU is, while something runs."""

from __future__ import annotations

import threading
from contextlib import suppress
from statistics import fmean
from types import TracebackType

import torch

_PAUSE = 0.1  # seconds between readings; the driver itself averages over 0.2 to 1 s
_UNKNOWN = (ImportError, RuntimeError, AssertionError)  # no NVML, no driver, no such device


class DeviceUse:
    """The share of wall time in which a GPU ran a kernel, between the ends of a ``with`` block.

    It is NVML's figure, which counts a kernel that waits as one that works. share: None off CUDA,
    or where NVML (the package ``nvidia-ml-py``) is not there.
    """

    def __init__(self, device: str) -> None:
        self.share: float | None = None
        self._device = device
        self._readings = list[int]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> DeviceUse:
        if self._device.startswith("cuda"):
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._readings:
            self.share = fmean(self._readings) / 100

    def _read(self) -> None:
        with suppress(*_UNKNOWN):
            while not self._ended.wait(_PAUSE):
                self._readings.append(torch.cuda.utilization(self._device))
