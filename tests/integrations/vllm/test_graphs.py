"""One graph for steps that read prompts: what vLLM captures, and what its attention is told."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from guided_spec.integrations.vllm import graphs  # noqa: E402
from tests.integrations.vllm.parts import NUM_DRAFT  # noqa: E402

FLASH = "FlashAttentionBackend"
SIZES, WIDTH, SLOTS = [1, 2, 4, 10, 20, 64], NUM_DRAFT + 1, 8


def vllm(module: str) -> Any:
    return importlib.import_module(f"vllm.{module}")


class Prepared:
    """What attention is told of each step: the longest query, by whether a graph is captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest: list[int] = []
        states = vllm("v1.worker.gpu.model_states.default")

        def build(**given: Any) -> dict[str, Any]:
            self.longest.append(given["max_query_len"])
            return {}

        monkeypatch.setattr(states, "build_attn_metadata", graphs.bound_queries(build))
        state = states.DefaultModelState
        self.prepare = functools.partial(graphs.prepare_whole(state.prepare_attn), own_state())


def own_state() -> Any:
    return SimpleNamespace(supports_mm_inputs=False, encoder_cache=None, max_model_len=512)


def note(*backends: str) -> None:
    """vLLM has found the attention of all layers."""
    found = [SimpleNamespace(backend=SimpleNamespace(__name__=name)) for name in backends]
    assert graphs.note_backends(lambda: ([found], None, []))() == ([found], None, [])


def resolve(
    mode: str, support: str, *, is_new: bool = True, backends: tuple[str, ...] = (FLASH,)
) -> Any:
    note(*backends)
    compilation = vllm("config.compilation")
    config = compilation.CompilationConfig(
        mode=compilation.CompilationMode.VLLM_COMPILE,
        cudagraph_mode=mode,
        cudagraph_capture_sizes=SIZES,
        max_cudagraph_capture_size=max(SIZES),
    )
    config.set_splitting_ops_for_v1(all2all_backend="", data_parallel_size=1)
    supports = vllm("v1.attention.backend").AttentionCGSupport
    whole = graphs.capture_whole(type(config).resolve_cudagraph_mode_and_sizes)
    found = whole(
        config, supports[support], "it", WIDTH, use_v2_model_runner=is_new, max_num_reqs=SLOTS
    )
    return config, found


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With graphs for any queries, as if they were captured."""
    utils = vllm("v1.worker.gpu.cudagraph_utils")
    ranks = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(utils, "get_pp_group", lambda: ranks)
    platform = SimpleNamespace(get_global_graph_pool=lambda: None)
    monkeypatch.setattr(utils, "current_platform", platform)
    monkeypatch.setattr(graphs, "log", lambda _: None)
    config, mode = resolve("FULL_AND_PIECEWISE", "ALWAYS")
    settings = SimpleNamespace(
        compilation_config=config,
        scheduler_config=SimpleNamespace(max_num_seqs=SLOTS),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
        speculative_config=None,
    )
    found = utils.ModelCudaGraphManager(settings, "cpu", mode, WIDTH)
    found._graphs_captured = True
    return found


def test_modes_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(graphs, "log", said.append)
    for mode in ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY"):
        assert resolve(mode, "ALWAYS")[1].name == mode
    others: tuple[dict[str, Any], ...] = (
        {"support": "UNIFORM_BATCH"},
        {"support": "ALWAYS", "is_new": False},
        {"support": "ALWAYS", "backends": ("TritonAttentionBackend",)},
        {"support": "ALWAYS", "backends": (FLASH, "TritonAttentionBackend")},
    )
    for changes in others:
        assert resolve("FULL_AND_PIECEWISE", **changes)[1].name == "FULL_AND_PIECEWISE"
    assert said == []
    config, mode = resolve("FULL_AND_PIECEWISE", "ALWAYS")
    assert config.cudagraph_mode.name == "FULL_AND_PIECEWISE"
    assert (mode.decode_mode().name, mode.mixed_mode().name) == ("FULL", "FULL")
    assert mode.separate_routine()
    assert said == ["steps that read prompts replay one graph"]


def test_texts_alone_keep_their_graphs(manager: Any) -> None:
    """Two texts of one width have a graph of their own; with a prompt they have one of any."""
    dispatch = functools.partial(manager.dispatch, num_active_loras=0)
    alone = dispatch(num_reqs=2, num_tokens=2 * WIDTH, uniform_token_count=WIDTH)
    assert (alone.cg_mode.name, alone.uniform_token_count) == ("FULL", WIDTH)
    mixed = dispatch(num_reqs=3, num_tokens=2 * WIDTH + 40, uniform_token_count=None)
    assert (mixed.cg_mode.name, mixed.num_tokens, mixed.uniform_token_count) == ("FULL", 64, None)
    assert dispatch(num_reqs=3, num_tokens=65, uniform_token_count=None).cg_mode.name == "NONE"


def batch(lengths: list[int], desc: Any) -> Any:
    """The input of a step with so many tokens of each text, padded to a graph."""
    import numpy as np
    import torch

    return SimpleNamespace(
        num_reqs=len(lengths),
        num_tokens=sum(lengths),
        num_reqs_after_padding=desc.num_reqs,
        num_tokens_after_padding=desc.num_tokens,
        num_scheduled_tokens=np.array(lengths),
        query_start_loc_np=np.cumsum([0, *lengths]),
        query_start_loc=None,
        seq_lens=None,
        seq_lens_cpu_upper_bound=torch.tensor(lengths),
        dcp_local_seq_lens=None,
        positions=None,
        prompt_lens=None,
        max_query_len=None,
        pcp=None,
        req_ids=[],
    )


def test_a_graph_for_any_queries_is_replayed_as_it_was_captured(
    manager: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = Prepared(monkeypatch)
    rest: tuple[Any, ...] = ((), None, [], None)
    modes = vllm("config.compilation").CUDAGraphMode
    dispatch = graphs.note_dispatched(type(manager).dispatch)
    captured = dict[Any, int]()

    def capture_all(self: Any, create: Any) -> None:
        for desc in (desc for descs in self._capture_descs.values() for desc in descs):
            create(desc, warmup=False)
            captured[desc] = prepared.longest[-1]

    def create(desc: Any, *, warmup: bool) -> None:
        each, rest_tokens = divmod(desc.num_tokens, desc.num_reqs)  # as vLLM's dummy batch
        lengths = [each] * (desc.num_reqs - 1) + [each + rest_tokens]
        prepared.prepare(batch(lengths, desc), modes.NONE, *rest, for_capture=not warmup)

    graphs.note_captured(capture_all)(manager, create)
    assert {desc.num_tokens for desc in captured} >= {1, 2, 4, 10, 20, 64}
    steps = [[40, 5, 5], [5, 5], [5, 5, 5, 5], [60], [6, 3, 1], [17, 1], [5] * 8, [1]]
    used = set[Any]()
    for lengths in steps:
        width = lengths[0] if len(set(lengths)) == 1 else None
        desc = dispatch(manager, len(lengths), sum(lengths), width, 0)
        used.add(desc)
        prepared.prepare(batch(lengths, desc), desc.cg_mode, *rest)
        assert prepared.longest[-1] == captured[desc] >= max(lengths)
    assert {desc.uniform_token_count for desc in used} == {None, WIDTH}
    # Beyond all graphs a step is told its own longest query.
    desc = dispatch(manager, 2, 100, None, 0)
    prepared.prepare(batch([90, 10], desc), desc.cg_mode, *rest)
    assert prepared.longest[-1] == 90
