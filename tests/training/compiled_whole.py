"""What is compiled on CUDA, compiled anywhere: whole, and by the same graphs."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from guided_spec.training import compiled

WHOLE: Any = {"dynamic": True, "fullgraph": True, "backend": "aot_eager"}
LOOKS = pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch, at that of its inputs


def compiled_whole(run: Any) -> Any:
    """``run`` without its ``compiled_on_cuda``, compiled as that does it."""
    whole: Any = torch.compile(inspect.unwrap(run), **WHOLE)

    def call(*given: Any, **named: Any) -> Any:
        compiled._fix_widths(given)
        return whole(*given, **named)

    return call
