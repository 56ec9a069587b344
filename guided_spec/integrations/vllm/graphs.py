"""Steps that prefill prompts replay one CUDA graph, as steps that only decode do.

In its new model runner vLLM captures a step as one graph where every text has the same number of
tokens, and layer by layer, with attention outside, where the step also reads a prompt. With short
texts most steps are of the second kind, and the host then launches longer than the GPU computes.
FlashAttention 3 can be captured for any batch and needs no second path; other attention that claims
this keeps both, since it was not tried.

vLLM's own mode for that, FULL, is not safe there. A graph is captured for queries as short as its
tokens shared among its requests, which decides how large a piece of a query the kernel takes; the
schedule that a step hands it counts pieces for the longest query of the step. Where that is longer,
positions are left out. Here the longest query of such a graph is all of its tokens, when it is
captured and whenever it is replayed. Graphs of texts alone stay as vLLM captures them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from guided_spec.integrations.patches import Patch
from guided_spec.integrations.vllm.plugin import in_workers, log

_FLASH = "FlashAttentionBackend"
# Whether it is the attention of all layers.
_is_flash: ContextVar[bool] = ContextVar("FlashAttention alone", default=False)
# What is captured, or was dispatched for the step: a graph for any queries or not.
_is_any: ContextVar[bool] = ContextVar("a graph for any queries", default=False)
# Whether the attention that is prepared belongs to such a graph.
_is_prepared: ContextVar[bool] = ContextVar("attention of such a graph", default=False)


def note_backends(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``init_attn_backend``, which comes before ``resolve_cudagraph_mode_and_sizes``."""

    @functools.wraps(original)
    def init_attn_backend(*args: Any, **others: Any) -> Any:
        found = original(*args, **others)
        names = {group.backend.__name__ for groups in found[0] for group in groups}
        _is_flash.set(names == {_FLASH})
        return found

    return init_attn_backend


def capture_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``resolve_cudagraph_mode_and_sizes``: what is captured instead of vLLM's own mode.

    Any other mode was chosen by the user, and stays.
    """

    @functools.wraps(original)
    def resolve(self: Any, min_cg_support: Any, *args: Any, **others: Any) -> Any:
        mode = original(self, min_cg_support, *args, **others)
        is_new = others.get("use_v2_model_runner", False)
        is_any = _is_flash.get() and min_cg_support.name == "ALWAYS"  # FlashAttention 2 is not
        if not is_new or not is_any or mode.name != "FULL_AND_PIECEWISE":
            return mode
        log("steps that read prompts replay one graph")
        return _full_twice(type(mode))

    return resolve


def _full_twice(modes: Any) -> Any:
    """A mode that vLLM has no name for: graphs of texts alone, and graphs of any queries."""
    mode = object.__new__(modes)
    mode._name_, mode._value_ = "FULL_AND_FULL", (modes.FULL.value, modes.FULL.value)
    return mode


def note_captured(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``CudaGraphManager.capture``: what is prepared for a graph knows which one it is."""

    @functools.wraps(original)
    def capture(self: Any, create_forward_fn: Callable[..., Any], *args: Any, **others: Any) -> Any:
        def create(desc: Any, *given: Any, **named: Any) -> Any:
            with _about(desc):
                return create_forward_fn(desc, *given, **named)

        return original(self, create, *args, **others)

    return capture


def note_dispatched(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``CudaGraphManager.dispatch``: a step knows which graph its target replays."""

    @functools.wraps(original)
    def dispatch(self: Any, *args: Any, **others: Any) -> Any:
        desc = original(self, *args, **others)
        if type(self).__name__ == "ModelCudaGraphManager":
            _is_any.set(_takes_any(desc))
        return desc

    return dispatch


def prepare_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``prepare_attn`` of the states whose attention such a graph may hold."""

    @functools.wraps(original)
    def prepare_attn(
        self: Any, input_batch: Any, cudagraph_mode: Any, *args: Any, **others: Any
    ) -> Any:
        is_graph = others.get("for_capture", False) or cudagraph_mode.name == "FULL"
        token = _is_prepared.set(is_graph and _is_any.get())
        try:
            return original(self, input_batch, cudagraph_mode, *args, **others)
        finally:
            _is_prepared.reset(token)

    return prepare_attn


def bound_queries(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``build_attn_metadata``: the longest query of a graph for any is all of its tokens."""

    @functools.wraps(original)
    def build_attn_metadata(*args: Any, **others: Any) -> Any:
        if _is_prepared.get():
            others["max_query_len"] = others["num_tokens"]
        return original(*args, **others)

    return build_attn_metadata


@contextmanager
def _about(desc: Any) -> Iterator[None]:
    token = _is_any.set(_takes_any(desc))
    try:
        yield
    finally:
        _is_any.reset(token)


def _takes_any(desc: Any) -> bool:
    # From 0.32 on a graph may be for any queries up to a length, which vLLM itself captures it for.
    longest = getattr(desc, "max_query_len", None)
    return desc.cg_mode.name == "FULL" and desc.uniform_token_count is None and longest is None


_V2 = "vllm.v1.worker.gpu"
_GRAPHS = f"{_V2}.cudagraph_utils"
_STATES = {
    f"{_V2}.model_states.default": "DefaultModelState",
    f"{_V2}.model_states.encoder_decoder": "EncoderDecoderModelState",
}
_RESOLVE = "CompilationConfig.resolve_cudagraph_mode_and_sizes"
_PATCHES = (
    Patch(f"{_V2}.attn_utils", "init_attn_backend", "kv_cache_config vllm_config device ...",
          note_backends, importers=(f"{_V2}.model_runner",)),
    Patch("vllm.v1.attention.backends.flash_attn", _FLASH),
    Patch("vllm.config.compilation", _RESOLVE, "self min_cg_support ...", capture_whole),
    Patch("vllm.config.compilation", "CUDAGraphMode",
          attributes="FULL FULL_AND_PIECEWISE separate_routine decode_mode mixed_mode"),
    Patch("vllm.v1.attention.backend", "AttentionCGSupport", attributes="ALWAYS"),
    Patch(_GRAPHS, "BatchExecutionDescriptor", attributes="cg_mode uniform_token_count"),
    Patch(_GRAPHS, "CudaGraphManager.capture", "self create_forward_fn ...", note_captured),
    Patch(_GRAPHS, "CudaGraphManager.dispatch", "self num_reqs num_tokens ...", note_dispatched),
    Patch(_GRAPHS, "ModelCudaGraphManager"),
    *(
        Patch(module, f"{state}.prepare_attn", "self input_batch cudagraph_mode ...", prepare_whole)
        for module, state in _STATES.items()
    ),
    Patch(f"{_V2}.attn_utils", "build_attn_metadata", "attn_groups num_reqs num_tokens ...",
          bound_queries, importers=tuple(_STATES)),
)  # fmt: skip
PATCHES = (in_workers("graphs", (_PATCHES,)),)
PARTS = {"": (*PATCHES, *_PATCHES)}
