"""Signals that ask a run to stop, agreed on by all of its processes."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import distributed

__all__ = ["StopRequest", "ignore_stop_signals"]

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Takes SIGTERM and SIGINT while it is entered; the loop asks ``agreed`` between steps.

    The handlers that were there come back when it is left. Outside of the main thread there are
    none to set, and nothing is taken. A second SIGINT raises KeyboardInterrupt, but for a run of
    several processes: torchrun hands on the one that its terminal sent to all of them already.
    """

    def __init__(self, accelerator: Any) -> None:
        self._is_alone = accelerator.num_processes == 1
        # Between hosts: the devices go on meanwhile, and need no answer.
        self._group = None if self._is_alone else distributed.new_group(backend="gloo")
        self._received = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._group is not None and error is None:
            distributed.destroy_process_group(self._group)

    def agreed(self) -> signal.Signals | None:
        """The signal that any process has received; every process has to call it, as often."""
        number = self._received
        if self._group is not None:
            found = torch.tensor([number])
            distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._group)
            number = int(found)
        return signal.Signals(number) if number else None

    def _take(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._received and number == signal.SIGINT and self._is_alone:
            raise KeyboardInterrupt
        self._received = number


def ignore_stop_signals(worker: int) -> None:
    """For ``DataLoader(worker_init_fn=...)``: the trainer ends its workers, once it has saved.

    A signal often goes to all processes of a job, and a worker that dies takes the trainer along.
    """
    del worker
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
