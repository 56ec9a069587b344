"""The thread an engine runs in, so that any number of callers can share it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from guided_spec.engine.engine import Engine
from guided_spec.engine.request import Request
from guided_spec.errors import GuidedSpecError

__all__ = ["EngineWorker"]


class EngineWorker:
    """Steps an engine while it has work and sleeps while it has none."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._incoming: deque[Request] = deque()
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="guided-spec-engine", daemon=True)
        self._thread.start()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests; they report through their own callbacks. Raises after ``close``."""
        with self._wake:
            if self._is_closed:
                raise GuidedSpecError("this LLM is closed; make a new one")
            self._incoming.extend(requests)
            self._wake.notify()

    def close(self) -> None:
        """Cancel what runs and end the thread. May be called more than once."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while self._take_incoming():
            try:
                self._engine.step()
            except Exception as error:  # a bug of ours: nobody may wait for ever
                self._engine.fail(self._engine, error)
        self._engine.cancel_all()

    def _take_incoming(self) -> bool:
        """Wait for work; False when the worker is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_closed or self._incoming or self._engine.has_work)
            while self._incoming:
                self._engine.add(self._incoming.popleft())
            return not self._is_closed
