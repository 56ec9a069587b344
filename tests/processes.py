"""Processes that begin with torch and transformers imported: forks of one that waits for work."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]

__all__ = ["Finished", "run_forked", "run_group"]

ROOT = Path(__file__).resolve().parents[1]


class Finished(NamedTuple):
    """returncode: as that of ``subprocess``. output: of both streams."""

    returncode: int
    output: str


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


def _enter(arguments: tuple[str, ...], environment: Mapping[str, str], output: str) -> None:
    """As ``python *arguments`` does."""
    with open(output, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.chdir(ROOT)
    os.environ.update(environment)
    flag, code, *others = arguments
    sys.argv = [flag, *others]
    if flag == "-c":
        exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
    else:
        assert flag == "-m"
        runpy.run_module(code, run_name="__main__", alter_sys=True)


def run_forked(*arguments: str) -> Finished:
    """``python -c CODE`` or ``python -m MODULE ...``, under Triton's interpreter."""
    (found,) = _run([{}], arguments)
    return found


def run_group(*arguments: str) -> list[Finished]:
    """Two processes of one group, as ``torchrun --nproc-per-node 2`` starts them."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    ranks = ("0", "1")
    return _run([{**shared, "RANK": rank, "LOCAL_RANK": rank} for rank in ranks], arguments)


def _run(environments: list[dict[str, str]], arguments: tuple[str, ...]) -> list[Finished]:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / str(at) for at in range(len(environments))]
        processes = [
            _context().Process(target=_enter, args=(arguments, own, str(file)))
            for own, file in zip(environments, files, strict=True)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=400)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert None not in codes, f"{arguments}: no end; {[file.read_text() for file in files]}"
        return [
            Finished(code, file.read_text())
            for code, file in zip(codes, files, strict=True)
            if code is not None
        ]
