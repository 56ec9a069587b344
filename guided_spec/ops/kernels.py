"""Where the kernels of a definition are: those of ``x.py`` in ``x_triton.py``."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any


@cache
def has_triton() -> bool:
    """Whether Triton is installed; it exists for Linux only."""
    return find_spec("triton") is not None


@cache
def kernels_of(definition: str) -> Any:
    """The module with the kernels of the module ``definition``.

    Imported when it is first asked for: without Triton it raises ImportError.
    """
    return importlib.import_module(f"{definition}_triton")
