"""Names for the parts of a step in a profiler's timeline."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

__all__ = ["named_range"]

_NOTHING = nullcontext()


def named_range(name: str) -> AbstractContextManager[object]:
    """What runs inside is called ``guided: <name>`` in the trace of a torch profiler.

    Without a running profiler nothing is recorded: the price is one look at a flag.
    """
    # torch.profiler.record_function itself takes microseconds, profiler or not.
    if profiler._is_profiler_enabled:
        return profiler.record_function(f"guided: {name}")
    return _NOTHING
