"""What of this package is at work in a running vLLM: asked of the process that decodes.

It imports nothing but the standard library, so that being loaded there changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

WORKER_EXTENSION = "benchmarks.gpu.plugins_worker.WorkerExtension"
_OURS = "guided_spec."


class WorkerExtension:
    """Mixed into vLLM's worker, by its dotted name as ``worker_extension_cls``."""

    vllm_config: Any

    def describe_guided_spec(self) -> dict[str, Any]:
        """``replaced``: see ``replaced_functions``; model runner, and how steps are scheduled."""
        config = self.vllm_config
        return {
            "replaced": replaced_functions(),
            "model_runner": 2 if config.use_v2_model_runner else 1,
            "asynchronous": bool(config.scheduler_config.async_scheduling),
        }


def replaced_functions(package: str = "vllm") -> list[str]:
    """Functions of ``package`` in this process that code of guided_spec stands in for, by name.

    Modules that are loaded are looked through, and the classes that they define.
    """
    loaded = [name for name in sys.modules if name.partition(".")[0] == package]
    return sorted({found for name in loaded for found in _replaced(name, sys.modules[name])})


def _replaced(module: str, namespace: Any) -> Iterator[str]:
    for name, value in list(vars(namespace).items()):
        if _is_ours(value):
            yield f"{module}.{name}"
        elif isinstance(value, type) and value.__module__ == module:
            yield from (f"{module}.{name}.{at}" for at, one in vars(value).items() if _is_ours(one))


def _is_ours(value: Any) -> bool:
    """By where it was written: a wrapper takes over its function's ``__module__``."""
    if not isinstance(value, FunctionType):
        return False
    return str(value.__globals__.get("__name__", "")).startswith(_OURS)
