"""Chunks on their way to an event loop: how a call fails, and how threads hand them over."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, Protocol, get_args

from guided_spec.engine.outputs import Chunk
from guided_spec.engine.prompt import Prompt
from guided_spec.errors import ConfigError
from guided_spec.types import SamplingParams

__all__ = [
    "Cancellable",
    "Failures",
    "LoopMail",
    "Manner",
    "OnError",
    "Params",
    "Submits",
    "achunks",
    "cancel_all",
    "match_params",
]

OnError = Literal["raise", "return"]
Params = SamplingParams | Sequence[SamplingParams] | None


class Failures(NamedTuple):
    """of_written: whether to raise what ended a text that had begun. of_unwritten: all others."""

    of_unwritten: bool
    of_written: bool

    @classmethod
    def before_the_first_token(cls, on_error: OnError) -> Failures:
        """With "raise" only those that left no text. Raises ConfigError for another word."""
        return cls(_is_raised(on_error), of_written=False)

    @classmethod
    def at_any_time(cls, on_error: OnError) -> Failures:
        """With "raise" all of them. Raises ConfigError for another word."""
        is_raised = _is_raised(on_error)
        return cls(is_raised, is_raised)

    def look_at(self, chunk: Chunk, num_prompts: int) -> None:
        """Raise the error of a request's last chunk, if it is one of these.

        Among several prompts a note on the error says which one it was.
        """
        completion = chunk.completion
        if completion is None or completion.error is None:
            return
        if self.of_written if completion.token_ids else self.of_unwritten:
            if num_prompts > 1:
                place = f"prompt {chunk.prompt_index} of {num_prompts}, counted from 0"
                # Set, not added: a grammar's error is remembered, and raised by other calls too.
                completion.error.__notes__ = [f'{place}; on_error="return" serves the others']
            raise completion.error


def _is_raised(on_error: str) -> bool:
    if on_error not in get_args(OnError):
        raise ConfigError("on_error", on_error, f"must be one of {', '.join(get_args(OnError))}")
    return on_error == "raise"


def match_params(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int
) -> list[SamplingParams]:
    """One for each prompt. Raises ConfigError where that is not what they are."""
    if isinstance(params, SamplingParams):
        return [params] * num_prompts
    matched = list(params) if isinstance(params, Sequence) else [params]
    if not all(isinstance(one, SamplingParams) for one in matched):
        raise ConfigError("params", params, "must be a SamplingParams, or a list of them")
    if len(matched) != num_prompts:
        fix = f"pass one SamplingParams, or {num_prompts}: one for each prompt"
        raise ConfigError("params", f"{len(matched)} of them", fix)
    return matched


class Manner(NamedTuple):
    """Whether text is reported as it grows, and whether its steps are recorded."""

    is_streamed: bool
    is_traced: bool


class Cancellable(Protocol):
    """A sample that runs or waits."""

    def cancel(self) -> None:
        """It is not wanted any more. Does nothing where it has ended."""


class Submits(Protocol):
    """Queues every sample of every prompt: an engine here, or in another process."""

    def __call__(
        self,
        prompts: Sequence[Prompt],
        params: Params,
        report: Callable[[Chunk], None],
        manner: Manner,
    ) -> Sequence[Cancellable | None]:
        """One entry a sample; None for one that failed at once.

        report: called from another thread with every chunk, the last of a sample has its
            completion.
        """


class LoopMail:
    """What other threads hand to event loops. What comes together is taken in together.

    To wake a loop is a system call, and a step of the engine has a chunk for each of its texts.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._boxes = weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, deque[Callable[[], None]]
        ]()

    def call(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        """Have ``loop`` call the function soon, in the order of coming. Nothing if it is closed."""
        with self._lock:
            box = self._boxes.setdefault(loop, deque())
            box.append(function)
            if len(box) > 1:
                return  # it is on its way
            try:
                loop.call_soon_threadsafe(self._empty, box)
            except RuntimeError:  # it is closed
                box.clear()

    def _empty(self, box: deque[Callable[[], None]]) -> None:
        with self._lock:
            functions = list(box)
            box.clear()
        for function in functions:
            function()


_MAIL = LoopMail()


async def achunks(
    submit: Submits, prompts: list[Prompt], params: Params, failures: Failures, manner: Manner
) -> AsyncGenerator[Chunk, None]:
    """Every chunk of every sample. Closing it, or cancelling the task, cancels the rest."""
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[Chunk] = asyncio.Queue()

    def report(chunk: Chunk) -> None:
        _MAIL.call(loop, partial(chunks.put_nowait, chunk))

    samples = submit(prompts, params, report, manner)
    try:
        for _ in samples:
            while (chunk := await chunks.get()).completion is None:
                yield chunk
            failures.look_at(chunk, len(prompts))
            yield chunk
    finally:
        cancel_all(samples)


def cancel_all(samples: Sequence[Cancellable | None]) -> None:
    """None of these samples, as ``Submits`` returns them, is wanted any more."""
    for sample in samples:
        if sample is not None:
            sample.cancel()
