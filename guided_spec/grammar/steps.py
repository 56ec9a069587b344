"""A count of steps, which bounds the Python that one grammar may cost in this process.

Lowering, joining, negation and proofs of disjointness can take time and memory that double with
each level of a schema. They count what they do, and a limit ends them at the same point each time,
however busy the machine is. A step is about half a microsecond of Python, or some hundred bytes
that are written. Without a limit nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_TEXT_OF_A_STEP = 64  # characters that are copied or written in one step


class StepsSpentError(Exception):
    """The limit of steps is reached. Never leaves the package.

    most: the limit.
    """

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.most = most


class StepCount:
    """The steps that were taken, of ``most``."""

    __slots__ = ("left", "most")

    def __init__(self, most: int) -> None:
        self.most = self.left = most

    @property
    def spent(self) -> int:
        """The steps taken, more than ``most`` once the limit is reached."""
        return self.most - self.left


_COUNT: ContextVar[StepCount | None] = ContextVar("step_count", default=None)


@contextmanager
def limit_steps(most: int) -> Iterator[StepCount]:
    """Within the block, ``spend`` raises StepsSpentError beyond ``most`` steps."""
    count = StepCount(most)
    token = _COUNT.set(count)
    try:
        yield count
    finally:
        _COUNT.reset(token)


def is_limited() -> bool:
    """Whether steps are counted."""
    return _COUNT.get() is not None


def spend(steps: int) -> None:
    """Count steps, before they are taken. Raises StepsSpentError beyond the limit."""
    count = _COUNT.get()
    if count is not None:
        count.left -= steps
        if count.left < 0:
            raise StepsSpentError(count.most)


def spend_on_value(value: Any, each: int = 1) -> None:
    """Count ``each`` step for every part of a JSON value, a shared one each time it occurs.

    Takes no more time than the steps that are left. Raises StepsSpentError beyond the limit.
    """
    count = _COUNT.get()
    if count is None:
        return
    left = count.left
    stack = [value]
    while stack:
        node = stack.pop()
        left -= each
        kind = type(node)
        if kind is str:
            left -= len(node) // _TEXT_OF_A_STEP
        elif kind is dict:
            left -= each * len(node)
            stack.extend(node.values() if left >= 0 else ())
        elif kind is list or kind is tuple:
            left -= len(node) // _TEXT_OF_A_STEP
            stack.extend(node if left >= 0 else ())
        if left < 0:
            break
    count.left = left
    if left < 0:
        raise StepsSpentError(count.most)


def spend_on_text(text: str) -> None:
    """Count the steps of writing or reading a text once, character by character in C."""
    spend(1 + len(text) // _TEXT_OF_A_STEP)
