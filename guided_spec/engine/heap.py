"""Python's garbage collector beside a loaded model."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["frozen_heap"]


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Inside, the garbage collector looks at new objects only.

    A full run over all that torch and transformers have loaded takes a tenth of a second or more,
    holds up every thread, and comes when it likes. Nothing of before is collected meanwhile:
    for a process that serves one model, and for what is timed.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
