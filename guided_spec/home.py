"""The process that an object belongs to, and its end.

A fork copies an object, and none of its threads.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn, TypeVar

from guided_spec.errors import OtherProcessError

_Made = TypeVar("_Made")


class Home:
    """The process in which an object with threads or worker processes was made.

    name: of the object, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name, self._pid = name, os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether it is this process, and not one that it was forked to."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise OtherProcessError in another process: the caller would wait forever."""
        if not self.is_here:
            raise OtherProcessError(
                f"this {self._name} was made in process {self._pid}, and its threads are not in "
                f"process {os.getpid()}, a fork of it: make the {self._name} in the process that "
                'uses it, which is best started by multiprocessing\'s "spawn"'
            )

    def finalize(
        self, owner: object, function: Callable[..., object], *args: object
    ) -> weakref.finalize[Any, Any]:
        """``weakref.finalize``, which does nothing in a fork: what it would end is not its own."""
        return weakref.finalize(owner, self._end, function, *args)

    def refuse_copy(self) -> NoReturn:
        """Raise OtherProcessError: another process, or a copy, would have no threads."""
        raise OtherProcessError(
            f"this {self._name} cannot be pickled or copied: it has threads of its own; make "
            "one in each process, of the same arguments, and share it between threads"
        )

    def _end(self, function: Callable[..., object], *args: object) -> None:
        if self.is_here:
            function(*args)


class Homebound:
    """Base of what works in the process alone that made it. home: that process."""

    home: Home

    def __reduce__(self) -> NoReturn:
        self.home.refuse_copy()


def once_per_process(make: Callable[[], _Made]) -> Callable[[], _Made]:
    """What ``make`` returns, kept for later calls; a fork makes its own.

    For pools of threads and for locks, of which a fork has useless copies.
    """
    known = cache(make)
    if hasattr(os, "register_at_fork"):  # else there are no forks
        os.register_at_fork(after_in_child=known.cache_clear)
    return known


def leave(code: int) -> None:
    """End the process without taking all modules apart, which costs a second of CPU.

    Returns where Python has to end it: a thread still works, or nobody takes the output.
    """
    if all(one.daemon for one in threading.enumerate() if one is not threading.main_thread()):
        atexit._run_exitfuncs()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    gc.unfreeze()
