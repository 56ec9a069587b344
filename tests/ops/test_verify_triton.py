"""The kernels of the verify decision decide as the reference does; here in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = 40


def test_the_kernels_decide_as_the_reference() -> None:
    pytest.importorskip("triton")
    # A process of its own: the interpreter has to be chosen before triton is imported.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.ops.verify_cases", str(EXAMPLES)]
    found = subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
    num_cases, num_close = map(int, found.stdout.split())
    assert num_cases >= EXAMPLES
    assert num_close <= num_cases // 10
