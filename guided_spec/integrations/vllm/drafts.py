"""vLLM's own drafters, EAGLE-3, EAGLE, MTP and draft models, under the grammars of their requests.

vLLM drafts without a grammar, and cuts what its grammar then refuses. Here the drafter's tokens are
legal from the start, by masks on its logits: see ``vllm_draft_masks``.

The functions are wrapped where vLLM makes its workers: no other process needs them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from guided_spec.integrations.vllm import runner_v1 as vllm_runner_v1
from guided_spec.integrations.vllm import runner_v2 as vllm_runner_v2
from guided_spec.integrations.vllm.drafting import FEATURE
from guided_spec.integrations.vllm.plugin import VARIABLE, VERSIONS, Patch, install

__all__ = ["PATCHES", "WORKER_PATCHES", "in_workers"]

WORKER_PATCHES = (*vllm_runner_v1.PATCHES, *vllm_runner_v2.PATCHES)


def in_workers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``WorkerWrapperBase.init_device``: the drafters' own patches come first."""

    @functools.wraps(original)
    def init_device(self: Any) -> Any:
        install(f"{VARIABLE}={FEATURE}", WORKER_PATCHES)
        return original(self)

    return init_device


PATCHES = (
    Patch(
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase.init_device",
        dict.fromkeys(VERSIONS, ("self",)),
        in_workers,
    ),
)
