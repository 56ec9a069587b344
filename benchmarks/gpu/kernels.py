"""The kernels' own benchmarks in one section: their tables as text."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

# Each has a ``main(device=...)`` that prints a table, and is a command of its own.
KERNELS = MappingProxyType(
    {
        "sampler": "benchmarks.kernels.sampler",
        "drafting": "benchmarks.kernels.drafting",
        "attention": "benchmarks.kernels.attention",
        "forwards": "benchmarks.kernels.forwards",
    }
)


def measure_kernels(
    device: str,
    report: Callable[[str], None],
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, str]:
    """What each benchmark prints, or why it could not run.

    arguments: further ones of each benchmark's ``main``, by its name; only those named are run.
        None runs all, with their own defaults. ``report`` is told each name before it runs.
    """
    chosen = dict.fromkeys(KERNELS, {}) if arguments is None else arguments
    found: dict[str, str] = {}
    for name, given in chosen.items():
        report(f"kernels: {name}")
        text = io.StringIO()
        try:
            module: Any = importlib.import_module(KERNELS[name])
            with contextlib.redirect_stdout(text):
                module.main(device=device, **given)
        except Exception as error:  # a kernel that does not compile must not cost the other figures
            text.write(f"{type(error).__name__}: {error}\n")
        found[name] = text.getvalue()
    return found
