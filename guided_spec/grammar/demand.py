"""Counts the waiters for a grammar that is being compiled, and ends the work without any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from guided_spec.errors import GrammarWorkerError


class AbandonedError(GrammarWorkerError):
    """No waiter is left for a grammar. Not a fault of the grammar, and not remembered."""

    def __init__(self) -> None:
        super().__init__("nobody waits for the grammar any more; ask for it again")


class Demand:
    """A count of the waiters for one grammar; thread-safe.

    It is over for good when the last one leaves while work is running that can be ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._end: Callable[[], None] | None = None
        self._is_over = False

    @property
    def is_wanted(self) -> bool:
        """Whether there is any waiter."""
        return self._num_waiting > 0

    @property
    def is_over(self) -> bool:
        """Whether the work was ended because no waiter was left."""
        return self._is_over

    def join(self) -> bool:
        """Add a waiter; False if the work was ended before."""
        with self._lock:
            self._num_waiting += not self._is_over
            return not self._is_over

    def leave(self) -> None:
        """Remove a waiter."""
        with self._lock:
            self._num_waiting -= 1
            end = None if self._num_waiting else self._end
            self._is_over = self._is_over or end is not None
        if end is not None:
            end()

    @contextmanager
    def ended_by(self, end: Callable[[], None]) -> Iterator[None]:
        """Within the block, the last waiter to leave calls ``end``, from its own thread.

        Raises AbandonedError if there is no waiter, and instead of what the block raises once it
        was ended.
        """
        with self._lock:
            self._is_over = self._is_over or self._num_waiting == 0
            if not self._is_over:
                self._end = end
        if self._is_over:
            raise AbandonedError
        try:
            yield
        except BaseException as error:
            if self._is_over:
                raise AbandonedError from error
            raise
        finally:
            with self._lock:
                self._end = None
