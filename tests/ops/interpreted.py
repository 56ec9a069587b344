"""Comparisons of kernels with torch, in Triton's interpreter."""

from __future__ import annotations

from tests.processes import run_forked


def run_interpreted(*arguments: str) -> str:
    """What Python prints, run with ``arguments``; asserts that it succeeds.

    A process of its own: the interpreter has to be chosen before triton is imported.
    """
    found = run_forked(*arguments)
    assert found.returncode == 0, found.output[-4000:] + found.errors[-4000:]
    return found.output.strip()
