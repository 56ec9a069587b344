"""Comparisons of kernels with torch, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["run_interpreted"]

ROOT = Path(__file__).resolve().parents[2]


def run_interpreted(*arguments: str) -> str:
    """What Python prints, run with ``arguments``; asserts that it succeeds.

    A process of its own: the interpreter has to be chosen before triton is imported.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    return found.stdout.strip()
