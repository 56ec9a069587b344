"""Which requests are let in, and how many samples of one request run next to others."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import NamedTuple

from guided_spec.engine.outputs import Chunk
from guided_spec.server.faults import ApiError

_SHARE_OF_LAST = 0.2  # in the mean of how long samples take
_LONGEST_WAIT = 60
_RESERVED = 8  # one of so many slots is kept for the first sample of a request


class Admission:
    """Refuses requests beyond the capacity; waiting requests count too.

    num_slots: samples that run at once. max_queue: samples that may wait besides.
    """

    def __init__(self, num_slots: int, max_queue: int) -> None:
        self._num_slots = num_slots
        self._capacity = num_slots + max_queue
        self._taken = 0
        self._mean_seconds = 0.0

    @property
    def num_taken(self) -> int:
        """Samples of requests that have not ended."""
        return self._taken

    @contextmanager
    def hold(self, num_samples: int) -> Iterator[None]:
        """Hold capacity for a request. Raises ApiError, 429, where there is none.

        A request of more samples than the whole capacity is served while nothing else is.
        """
        if self._taken and self._taken + num_samples > self._capacity:
            seconds = self.seconds_to_wait()
            message = f"{self._taken} samples run or wait already; ask again in {seconds} s"
            headers = {"Retry-After": str(seconds)}
            raise ApiError(429, message, code="queue_full", headers=headers)
        self._taken += num_samples
        try:
            yield
        finally:
            self._taken -= num_samples

    @contextmanager
    def enter(self, num_samples: int) -> Iterator[None]:
        """``hold`` for a request that generates: how long it takes tells others when to return."""
        with self.hold(num_samples):
            began = time.perf_counter()
            try:
                yield
            finally:
                taken = time.perf_counter() - began
                self._mean_seconds += _SHARE_OF_LAST * (taken - self._mean_seconds)

    def seconds_to_wait(self) -> int:
        """Seconds until capacity may be free, estimated from the last requests; at least 1."""
        rounds = self._taken / self._num_slots
        return max(1, min(_LONGEST_WAIT, math.ceil(rounds * self._mean_seconds)))


class Sample(NamedTuple):
    """One text of a request, by the indices that its chunks bear."""

    prompt_index: int
    sample_index: int


class Slots:
    """Shares the engine's slots: a request of many samples leaves some to others.

    Each request may have one sample in the engine. Further ones, of all requests together, enter in
    turn, up to a number that leaves slots free: a request of one sample starts at once, however
    many samples another one has.
    """

    def __init__(self, num_slots: int) -> None:
        reserved = max(1, num_slots // _RESERVED)
        self._waiting = 0
        self._further = asyncio.Semaphore(max(0, num_slots - 1 - reserved))

    @property
    def num_waiting(self) -> int:
        """Samples that are not in the engine yet."""
        return self._waiting

    async def run(
        self,
        samples: Sequence[Sample],
        start: Callable[[Sample], AsyncGenerator[Chunk, None]],
    ) -> AsyncGenerator[Chunk, None]:
        """The chunks of all samples as they come. Closing it ends what runs.

        start: generates one sample. What it raises ends all of them.
        """
        left = list(reversed(samples))
        chunks: asyncio.Queue[Chunk | None] = asyncio.Queue()

        async def run_next() -> None:
            if left:
                sample = left.pop()
                self._waiting -= 1
                async with aclosing(start(sample)) as stream:
                    async for chunk in stream:
                        chunks.put_nowait(chunk._replace(**sample._asdict()))

        async def run_first() -> None:
            for _ in samples:
                await run_next()

        async def run_further() -> None:
            async with self._further:
                await run_next()

        self._waiting += len(left)
        lanes = [asyncio.ensure_future(run_first())]
        lanes += [asyncio.ensure_future(run_further()) for _ in samples[1:]]
        everything = asyncio.gather(*lanes)
        everything.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            await everything  # raises what a sample raised
        finally:
            for lane in lanes:
                lane.cancel()
            await asyncio.gather(*lanes, everything, return_exceptions=True)
            self._waiting -= len(left)
