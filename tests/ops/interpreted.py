"""Comparisons of kernels with torch, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from guided_spec.ops.attention.slot_attention import FP8
from tests.processes import run_forked


def run_interpreted(*arguments: str) -> str:
    """What Python prints, run with ``arguments``; asserts that it succeeds.

    A process of its own: the interpreter has to be chosen before triton is imported.
    """
    found = run_forked(*arguments)
    assert found.returncode == 0, found.output[-4000:] + found.errors[-4000:]
    return found.output.strip()


def round_to_fp8_as_devices_do() -> None:
    """Make the interpreter of this process round float32 to the nearest number of float8_e4m3fn.

    By itself it cuts small numbers off and loses what rounding carries into the exponent. Numbers
    beyond 448 become NaN here, so that a kernel that does not limit them is found.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(numbers: NDArray[Any], given: Any, wanted: Any, mode: Any) -> NDArray[Any]:
        if wanted != tl.float8e4nv or given != tl.float32:
            found: NDArray[Any] = convert(numbers, given, wanted, mode)
            return found
        exact = torch.from_numpy(np.ascontiguousarray(numbers))
        exact = exact.where(exact.abs() <= torch.finfo(FP8).max, torch.nan)
        return exact.to(FP8).view(torch.uint8).numpy()

    interpreter._convert_float = rounded
