"""A heap that Python's garbage collector leaves alone while something is timed."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_heap"]


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Inside, the garbage collector looks at new objects only.

    A full run over all that torch and transformers have loaded takes a tenth of a second or more,
    which is a part of what is timed, or all of it, and comes when it likes. docs/gpu.md tells users
    how to be rid of it.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
