"""Functions over tensors of fixed shapes, captured as CUDA graphs and replayed by one launch.

On another device than CUDA the functions simply run, so that what uses a pool runs everywhere.
Batches are filled up to the sizes that graphs have.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from guided_spec.home import once_per_process
from guided_spec.ops.host import host_integers
from guided_spec.ops.side_stream import URGENT

# Sizes that batches and widths are padded to: few enough to capture, close enough to waste little.
SIZES = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128),
    *(160, 192, 224, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048),
)

# Of drafts, which have a graph for each kind and length: fewer. A padded row costs a head little.
ROW_SIZES = (*(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024),)

Inputs = Mapping[str, Tensor]
NOTHING: Inputs = MappingProxyType({})


def bucket(count: int, sizes: Sequence[int] = SIZES) -> int:
    """The smallest of the sizes that ``count`` fits in; ``count`` itself beyond them."""
    return next((size for size in sizes if size >= count), count)


def filled(count: int, sizes: Sequence[int] = SIZES) -> int:
    """The largest of the sizes that ``count`` fills; ``count`` itself beyond them, 1 or more."""
    return count if count > sizes[-1] else max(size for size in sizes if size <= count)


def row_sizes(most: int) -> list[int]:
    """The ``ROW_SIZES`` that drafts of up to so many rows need, the largest first."""
    largest = bucket(most, ROW_SIZES)
    return [size for size in reversed(ROW_SIZES) if size <= largest]


class Stage(Enum):
    """What becomes of a graph that is asked for: its kernels are compiled, it is captured, or, once
    all is closed, what it would hold runs launch by launch.
    """

    COMPILE = auto()
    CAPTURE = auto()
    CLOSED = auto()


@dataclass(slots=True)
class CaptureWindow:
    """What the graph pools of an engine do; shared by all of them.

    largest: tokens of the longest forward that has a graph, of ``SIZES``. Longer ones take longer
        than their launches, and a graph keeps memory for what goes in and comes out.
    """

    stage: Stage = Stage.CAPTURE
    largest: int = SIZES[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        """``SIZES`` up to the largest: tokens of the forwards that have graphs."""
        return SIZES[: bisect_right(SIZES, self.largest)]


class Captured(NamedTuple):
    """One graph, the tensors that are copied for it, and those that every replay writes.

    On another device than CUDA there is no graph, and only the copies are kept.
    """

    graph: Any
    inputs: dict[str, Tensor]
    outputs: Any


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, no garbage is collected.

    An engine that was dropped is a cycle of references: a capture fails if the collector comes
    upon its graphs or its pinned memory in the capturing thread, because CUDA may not free then.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphPool:
    """The graphs of one model; they share their memory, so only one runs at a time.

    device: where the functions run. window: see ``Stage``; None captures whatever comes.
    is_on_side_stream: whether they run on a ``SideStream``.
    """

    def __init__(
        self,
        device: torch.device,
        window: CaptureWindow | None = None,
        *,
        is_on_side_stream: bool = False,
    ) -> None:
        self.device = device
        self._window = window or CaptureWindow()
        self._is_cuda = device.type == "cuda"
        self._captured: dict[Hashable, Captured] = {}
        self._outputs: dict[int, Tensor] = {}  # of all graphs, by where they begin
        self._memory: Any = torch.cuda.graph_pool_handle() if self._is_cuda else None
        # One for all captures: memory that a stream has used is kept for it.
        # A graph's kernels are as urgent as the stream that it was captured on.
        priority = URGENT if is_on_side_stream else 0
        self._stream: Any = torch.cuda.Stream(device, priority) if self._is_cuda else None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of the forwards that have graphs, ascending; see ``CaptureWindow``."""
        return self._window.sizes

    @property
    def beyond(self) -> tuple[int, ...]:
        """Tokens of forwards without a graph that run beforehand, for their kernels: Triton
        compiles one for a number that is a multiple of 16, and texts are cut into more parts where
        tokens are few."""
        largest = self._window.largest
        return 4 * largest, 4 * largest + 1, largest + 16, largest + 1

    def has(self, size: int) -> bool:
        """Whether a forward of so many tokens has a graph."""
        return size <= self._window.largest

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    def prepare(
        self,
        key: Hashable | None,
        inputs: Inputs,
        body: Callable[[Inputs], Any],
        fixed: Inputs = NOTHING,
        kinds: Callable[[Inputs], Any] | None = None,
    ) -> bool:
        """Capture what ``run`` would at its first call with ``key``; ``body`` runs several times.

        For a body that may not run with the inputs of the first call: these are others.
        kinds: launches each kernel of ``body`` once, in less time; None: ``body`` does.

        Returns whether it is to have a graph.
        """
        kinds = kinds or body
        if key is None or self._window.stage is Stage.COMPILE:
            kinds({**upload(inputs, self.device), **fixed})
        else:
            self._captured[key] = self._capture(inputs, body, fixed, kinds)
        return key is not None

    def seconds(self, key: Hashable) -> float | None:
        """What a replay takes on the device; None where there is no such graph.

        Of what the graph was captured with, so it is for those that leave everything as it is then.
        """
        found = self._captured.get(key)
        if found is None or found.graph is None:
            return None
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        found.graph.replay()  # the first one brings it to the device
        began.record()
        found.graph.replay()
        ended.record()
        ended.synchronize()
        seconds: float = began.elapsed_time(ended) / 1000
        return seconds

    def whole(self, tensor: Tensor) -> Tensor | None:
        """The tensor returned by a graph's body whose first rows ``tensor`` is, if it is any's.

        It has the same address after each run, so that another pool's graphs may read it there.
        """
        return self._outputs.get(tensor.data_ptr())

    def run(
        self,
        key: Hashable | None,
        inputs: Inputs,
        body: Callable[[Inputs], Any],
        fixed: Inputs = NOTHING,
        overlapped: Callable[[], None] | None = None,
    ) -> Any:
        """``body`` of ``inputs`` and ``fixed``, captured at the first call with ``key``.

        key: says all that ``body`` depends on besides the inputs' values: their shapes too, and
            where those of ``fixed`` lie. None: so much work that a graph would not pay, which runs
            launch by launch, and leaves ``overlapped`` to be called later.
        inputs: tensors on the device, or on the host (pinned, for the copy not to block). From the
            second call on, those that are left out keep what ``body`` made of them.
        fixed: tensors on the device that are read at their addresses, without a copy.
        body: must not wait for the device. It may change its inputs in-place; what else it writes
            must not depend on how often it runs, which at the first call is several times.
        overlapped: work of this thread for which a device waits that runs, or is launched here. It
            is called once, overlapped with the launch, and before a capture.

        Returns what ``body`` returned; on CUDA the next call overwrites it, with whatever key: the
        graphs share their memory. What is to stay must be copied, or written elsewhere by ``body``.
        """
        if key is None:
            return body({**upload(inputs, self.device), **fixed})
        if key not in self._captured:
            if overlapped is not None:  # a capture waits for the device
                overlapped()
                overlapped = None
            self.prepare(key, inputs, body, fixed)
        found = self._captured[key]
        for name, value in inputs.items():
            found.inputs[name].copy_(value, non_blocking=True)
        if found.graph is None:
            outputs = body({**found.inputs, **fixed})
            if overlapped is not None:
                overlapped()
            return outputs
        self._replay(found.graph, overlapped)
        return found.outputs

    def _replay(self, graph: Any, overlapped: Callable[[], None] | None) -> None:
        if overlapped is None:
            graph.replay()
            return
        # The driver takes a microsecond for each kernel: meanwhile this thread serves the device.
        stream = torch.cuda.current_stream(self.device)
        launched = _launcher().submit(_launch, graph, stream)
        try:
            overlapped()
        finally:
            launched.result()

    def _capture(
        self,
        inputs: Inputs,
        body: Callable[[Inputs], Any],
        fixed: Inputs,
        kinds: Callable[[Inputs], Any],
    ) -> Captured:
        static = {
            name: torch.empty_like(value, device=self.device).copy_(value)
            for name, value in inputs.items()
        }
        if not (self._is_cuda and self._window.stage is Stage.CAPTURE):
            return Captured(None, static, None)
        given, graph = {**static, **fixed}, torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        # Not by ``torch.cuda.graph``: it gives memory back before each capture, and there are many.
        with torch.cuda.stream(self._stream):
            kinds(given)  # kernels are loaded, and libraries set up
            with _no_collection():
                # Other threads may use the device meanwhile: mask rows have a stream of their own.
                graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
                try:
                    outputs = body(given)
                finally:
                    graph.capture_end()
        current.wait_stream(self._stream)
        found = outputs if isinstance(outputs, tuple) else (outputs,)
        self._outputs |= {one.data_ptr(): one for one in found if isinstance(one, Tensor)}
        return Captured(graph, static, outputs)


def _launch(graph: Any, stream: Any) -> None:
    with torch.cuda.stream(stream):
        graph.replay()


@once_per_process
def _launcher() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="guided-spec-launch")


def upload(inputs: Inputs, device: torch.device) -> Inputs:
    """Inputs of a forward without a graph; the copy does not block the host."""
    return {name: value.to(device, non_blocking=True) for name, value in inputs.items()}


def pad_to(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """``tensor`` padded with zeros at the end of every dimension, up to ``shape``."""
    if tensor.shape == torch.Size(shape):
        return tensor
    padding = [(0, wanted - size) for size, wanted in zip(tensor.shape, shape, strict=True)]
    return functional.pad(tensor, [side for pair in reversed(padding) for side in pair])


def pad_rows(tensor: Tensor, size: int) -> Tensor:
    """``tensor`` padded with zeros after its last row, up to ``size`` rows."""
    return pad_to(tensor, (size, *tensor.shape[1:]))


def pack_index(rows: Sequence[Sequence[int]], size: int) -> Tensor:
    """int64 [len(rows), size] on the host; unused entries after the rows' own.

    rows: of B integers each, the slots before all others: -1 is what marks an unused entry.

    Not pinned: so few bytes are staged by the driver, which costs less than pinned memory does.
    """
    missing = size - len(rows[0])
    first, *others = rows
    return host_integers([[*first, *[-1] * missing], *([*row, *[0] * missing] for row in others)])
