"""Processes that begin with torch and transformers imported: forks of one that waits for work."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

from torch._C._distributed_c10d import TCPStore

ROOT = Path(__file__).resolve().parents[1]


class Finished(NamedTuple):
    """As ``subprocess`` has it; output and errors: of the two streams."""

    returncode: int | None
    output: str
    errors: str


@cache
def _context() -> ForkServerContext:
    """Importing takes seconds of each process that is started anew, and less than one of a fork.

    Triton's interpreter has to be chosen before triton is imported; no kernel runs here without it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["hypothesis", "triton", "guided_spec.training.run", "datasets", "matplotlib.figure"]
    )
    own = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    before = dict(os.environ)
    os.environ.update(own)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _enter(arguments: tuple[str, ...], environment: Mapping[str, str], streams: list[str]) -> None:
    """As ``python *arguments`` does; streams: the files of its output and of its errors."""
    for number, stream in enumerate(streams, 1):
        with open(stream, "w") as file:
            os.dup2(file.fileno(), number)
    gc.freeze()  # else each collection looks through all that was imported
    os.chdir(ROOT)
    os.environ.update(environment)
    flag, code, *others = arguments
    sys.argv = [flag, *others]
    if flag == "-c":
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        assert flag == "-m"
        runpy.run_module(code, run_name="__main__", alter_sys=True)


def in_fork(function: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What the function returns, or raises, in a fork of this process. It must not hang there."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        pid = os.fork()
    if pid == 0:
        try:
            reply = (True, function())
        except BaseException as error:
            reply = (False, error)
        writer.send(reply)
        os._exit(0)
    try:
        assert reader.poll(seconds), f"nothing came back within {seconds} s"
        is_returned, found = reader.recv()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    if not is_returned:
        raise found
    return found


def run_forked(*arguments: str) -> Finished:
    """``python -c CODE`` or ``python -m MODULE ...``, under Triton's interpreter."""
    (found,) = _run([{}], arguments)
    return found


def run_compiling(module: str, cache: Path) -> Any:
    """What ``python -m module`` prints last, as JSON; it compiles kernels, anew into ``cache``.

    A process of its own kind: those of ``run_forked`` have Triton's interpreter, and torch loaded.
    """
    environment = os.environ | {"TRITON_CACHE_DIR": str(cache), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-W", "ignore", "-m", module]
    found = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(found.stdout.splitlines()[-1])


def run_group(*arguments: str, per_node: int = 2) -> list[Finished]:
    """Two processes of one group, as ``torchrun --nproc-per-node 2`` starts them.

    per_node: 1 starts them as ``torchrun --nnodes 2 --nproc-per-node 1`` on two machines does.
    """
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_WORLD_SIZE": str(2 // per_node),
    }
    own = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "GROUP_RANK": str(rank // per_node)}
        for rank in range(2)
    ]
    return _run([{**shared, **one} for one in own], arguments)


def _run(environments: list[dict[str, str]], arguments: tuple[str, ...]) -> list[Finished]:
    with tempfile.TemporaryDirectory() as folder:
        streams = [
            [f"{folder}/{at}_output", f"{folder}/{at}_errors"] for at in range(len(environments))
        ]
        processes = [
            _context().Process(target=_enter, args=(arguments, *own))
            for own in zip(environments, streams, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=400)
        codes = [process.exitcode for process in processes]  # None: it has not ended
        for process in processes:
            process.kill()
        written = [[Path(stream).read_text() for stream in both] for both in streams]
    return [Finished(code, *texts) for code, texts in zip(codes, written, strict=True)]
