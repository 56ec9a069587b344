"""What stands for vLLM's CUDA graphs on a CPU: a replay runs what would be in the graph."""

from __future__ import annotations

import functools
import importlib
import inspect
from contextlib import nullcontext
from typing import Any

from guided_spec.integrations.vllm.drafts.heads import drafting_of
from tests.integrations.vllm.parts import NUM_DRAFT

SLOTS = 8
SWITCHES = ("use_fused_multi_step_decode", "supports_decode_metadata_update")  # of two forms


def _vllm(module: str) -> Any:
    return importlib.import_module(f"vllm.{module}")


class _Graphs:
    """In the place of a graph manager: a replay runs what is in the graph on what lies there."""

    def __init__(self, speculator: Any, *, decodes: bool, is_fused: bool) -> None:
        self._speculator = speculator
        self._decodes = decodes
        self._is_fused = is_fused
        self.num_replays = 0

    def dispatch(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        graphs = _vllm("v1.worker.gpu.cudagraph_utils")
        full = graphs.CUDAGraphMode.FULL
        width = SLOTS if self._decodes else num_tokens
        return graphs.BatchExecutionDescriptor(
            cg_mode=full, num_tokens=width, num_reqs=SLOTS if self._decodes else num_reqs
        )

    def specialize_spec_tokens(self, desc: Any, num_speculative_tokens: int) -> Any:
        del num_speculative_tokens
        return desc

    def run_fullgraph(self, desc: Any) -> None:
        self.num_replays += 1
        own = self._speculator
        none = _vllm("config.compilation").CUDAGraphMode.NONE
        drafting = drafting_of(own)
        args = (desc.num_reqs, desc.num_tokens, None, None, None)
        with nullcontext() if drafting is None else drafting.capturing():
            if not self._decodes:
                own._prefill(*args)
            else:
                draft = own._generate_fused_drafts if self._is_fused else own._generate_draft
                has_length = "num_speculative_steps" in inspect.signature(draft).parameters
                draft(*args, none, *((NUM_DRAFT,) if has_length else ()))


class _NoGraphs:
    """A graph manager that captured nothing."""

    def __init__(self, **kwargs: Any) -> None:
        del kwargs

    def dispatch(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        graphs = _vllm("v1.worker.gpu.cudagraph_utils")
        none = graphs.CUDAGraphMode.NONE
        return graphs.BatchExecutionDescriptor(
            cg_mode=none, num_tokens=num_tokens, num_reqs=num_reqs
        )

    def specialize_spec_tokens(self, desc: Any, num_speculative_tokens: int) -> Any:
        del num_speculative_tokens
        return desc

    def run_fullgraph(self, desc: Any) -> None:
        raise AssertionError(desc)


def make_graphs(graphs: str, speculator: Any, cudagraph_mode: Any) -> None:
    del cudagraph_mode
    manager: Any = functools.partial(_Graphs, speculator)
    if graphs == "none":
        manager = _NoGraphs
    is_fused = any(getattr(speculator, switch, False) for switch in SWITCHES)
    speculator.prefill_cudagraph_manager = manager(decodes=False, is_fused=False)
    speculator.decode_cudagraph_manager = manager(decodes=True, is_fused=is_fused)
