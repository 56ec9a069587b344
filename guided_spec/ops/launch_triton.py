"""How kernels are launched: as dependents of the previous one, or compiled ahead, many at a time.

A dependent kernel is set up while its predecessor runs; it waits until all kernels before it are
done and their writes visible, and then lets its own successor be set up. Every kernel launched so
must wait: then waiting for one is waiting for all before it. Meanwhile it may read what was written
at least two launches before, since its predecessor has waited for that: where its rows are, or
weights. (CUDA C++ programming guide, "Programmatic dependent launch and synchronization".)
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, partial
from threading import Event, Lock
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._pytree import tree_leaves
from triton.compiler import CompiledKernel
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

FIRST_CAPABILITY = (9, 0)


HELD = 3.0  # seconds that compiling waits at most for all kernels to be known


class Ahead(NamedTuple):
    """What is being compiled ahead. kinds: of each kernel, and of its arguments."""

    kinds: set[Hashable]
    loader: _Loader


class _Loader(Executor):
    """Has kernels compiled by many threads, each of which loads what it has compiled.

    Loaded is a kernel with the code that launches it, which Triton has a C compiler build.

    may_begin: threads wait for it, since what Triton does in Python keeps others from it. Not for
    ever: modules that are not ours may launch kernels themselves, and wait for them.
    """

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self.may_begin = Event()
        self._loading = defaultdict[Hashable, Lock](Lock)

    def submit(self, compile: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        return self._threads.submit(self._load, compile, driver.active.get_current_device())

    def _load(self, compile: Callable[[], CompiledKernel], device: int) -> CompiledKernel:
        self.may_begin.wait(HELD)
        driver.active.set_current_device(device)  # of this thread
        kernel = compile()
        # Kernels with the same arguments are launched by the same code, which is one file.
        launcher = _launcher(kernel.src.signature.values())
        with self._loading[launcher], suppress(Exception):  # too large a one says so when launched
            kernel._init_handles()
        return kernel


def _launcher(types: Iterable[Any]) -> Hashable:
    """A key that is equal for kernels with one launcher: their arguments, without constants."""
    return tuple((at, one) for at, one in enumerate(tree_leaves([*types])) if one != "constexpr")


_AHEAD: ContextVar[Ahead | None] = ContextVar("compiled ahead", default=None)


def launch(
    kernel: Any, grid: tuple[int, ...], after: Tensor | None = None
) -> Callable[..., object]:
    """A launcher of ``kernel`` over ``grid``, to be called with the kernel's arguments.

    after: any argument of a kernel that begins with ``await_previous``; None for others. It also
    sets IS_DEPENDENT.
    """
    options: dict[str, Any] = {}
    if after is not None:
        is_dependent = after.is_cuda and _is_served(after.get_device())
        options["IS_DEPENDENT"] = is_dependent
        if is_dependent:
            options["launch_pdl"] = True
    ahead = _AHEAD.get()
    if ahead is not None:
        return partial(_compile, ahead, kernel, grid, **options)
    return partial(kernel[grid], **options)


@contextmanager
def compiling_ahead() -> Iterator[None]:
    """Inside, a launch only has its kernel compiled, by one of many threads; at exit all are ready.

    Ready means loaded as well. Compilation begins at the exit: Triton holds the interpreter lock
    for much of the time, and the launching thread would wait for it at each step.

    Nothing is run: the outputs of kernels are uninitialized, and code inside must not depend on
    their values. A kernel that cannot be compiled fails where it is launched, which may be never.
    """
    workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with ThreadPoolExecutor(workers, thread_name_prefix="guided-spec-compile") as threads:
        loader = _Loader(threads)
        with triton.AsyncCompileMode(loader, ignore_errors=True):
            token = _AHEAD.set(Ahead(set(), loader))
            try:
                yield
            finally:
                _AHEAD.reset(token)
                loader.may_begin.set()


def _compile(
    ahead: Ahead, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any
) -> None:
    """Begin to compile ``kernel``, unless it is: to ask Triton takes it milliseconds each time."""
    kinds = (
        value if parameter.is_constexpr else _kind(value)
        for parameter, value in zip(kernel.params, arguments, strict=False)
    )
    key = (kernel, *kinds, *sorted(options.items()))
    if key not in ahead.kinds:
        ahead.kinds.add(key)
        made = kernel.warmup(*arguments, grid=grid, **options)
        if isinstance(made, CompiledKernel):  # before: it may not have been launched yet
            ahead.loader.submit(lambda: made)


def _kind(value: Any) -> Hashable:
    """What Triton compiles a kernel for, of an argument that is no constant."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple):
        return tuple(map(_kind, value))
    if isinstance(value, TensorDescriptor):
        return tuple(value.block_shape)
    if isinstance(value, int):
        return value == 1, value % 16 == 0
    return type(value).__name__


@cache
def _is_served(device: int) -> bool:
    is_nvidia = torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


@triton.jit  # type: ignore[untyped-decorator]
def await_previous(IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the kernels before this one, and let the next one be set up."""
    if IS_DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
