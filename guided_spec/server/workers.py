"""Threads for what would hold the event loop: rendering, tokenizing, reading a large schema."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from functools import partial
from typing import TypeVar

SMALL_BYTES = 32 * 2**10
"""Of a body up to this length, everything is quick, but for pictures: those take turns."""

# Set for each request before its endpoint runs.
IS_SMALL: ContextVar[bool] = ContextVar("is_small", default=True)

_Result = TypeVar("_Result")


class Workers:
    """Requests that are not small take turns in one thread: small ones never wait for them."""

    def __init__(self) -> None:
        self._large = ThreadPoolExecutor(1, thread_name_prefix="guided-spec-large")

    async def run(self, function: Callable[[], _Result]) -> _Result:
        """What ``function`` returns, for the request that is being served."""
        if IS_SMALL.get():
            return await asyncio.to_thread(function)
        work = partial(copy_context().run, function)
        return await asyncio.get_running_loop().run_in_executor(self._large, work)

    async def run_out(self, function: Callable[[], _Result]) -> _Result:
        """``run``, of which a cancelled task waits for the end: until then it takes memory."""
        running = asyncio.ensure_future(self.run(function))
        try:
            return await asyncio.shield(running)
        finally:
            await asyncio.gather(running, return_exceptions=True)

    def close(self) -> None:
        """Nothing more is run; what runs is not waited for."""
        self._large.shutdown(wait=False, cancel_futures=True)
