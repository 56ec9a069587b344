"""The variables that we set for vLLM are ones that it reads."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.peers import ENVIRONMENT
from guided_spec.config import THREADS
from guided_spec.integrations.patches import Patch
from guided_spec.integrations.vllm import plugin
from guided_spec.integrations.vllm.llm import PROCESSES
from guided_spec.integrations.vllm.plugin import RAY_VARIABLE, VARIABLE

pytest.importorskip("vllm", reason="vLLM is not installed")
from tests.integrations.vllm.parts import make_config  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own
BASE = "vllm.v1.worker.worker_base"
EXECUTORS = "vllm.v1.executor"


def test_vllm_knows_the_variables() -> None:
    envs: Any = importlib.import_module("vllm.envs")
    ours = {name for name in ENVIRONMENT if name.startswith("VLLM_")} | {PROCESSES}
    assert ours <= set(envs.environment_variables)


def test_vllm_spawns_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork of a process whose imports have asked for a device gets none."""
    envs: Any = importlib.import_module("vllm.envs")
    monkeypatch.delenv(PROCESSES, raising=False)
    assert envs.VLLM_WORKER_MULTIPROC_METHOD == "fork"
    monkeypatch.setenv(PROCESSES, "spawn")
    assert envs.VLLM_WORKER_MULTIPROC_METHOD == "spawn"


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that vLLM is in; its executor is as it was after the test."""
    executor: Any = importlib.import_module(f"{EXECUTORS}.abstract").Executor
    monkeypatch.setattr(executor, "__init__", executor.__init__)
    monkeypatch.setenv(RAY_VARIABLE, "ANOTHER")
    found = plugin.installed_root()
    assert found is not None
    return found


def test_workers_on_ray_get_the_plugins_variable(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    """By the function with which vLLM chooses what it copies to them."""
    copied: Any = importlib.import_module("vllm.ray.ray_env").get_env_vars_to_copy
    monkeypatch.setenv(VARIABLE, "counts")
    assert VARIABLE not in copied()
    plugin._send_to_ray(root)
    assert {VARIABLE, "ANOTHER"} <= copied()


def test_the_newer_executor_on_ray_starts_its_workers_with_the_variable(
    monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    """It copies variables that a node does not have, and a node may have been started with one."""
    pytest.importorskip("ray", reason="Ray is not installed")
    base: Any = importlib.import_module(f"{EXECUTORS}.ray_executor_v2").RayExecutorV2

    class Executor(base):  # type: ignore[misc]
        def _init_executor(self) -> None:
            self.made = self._build_runtime_env()

    plugin._send_to_ray(root)
    monkeypatch.setenv(VARIABLE, "drafts,exact")
    config = make_config()
    config.parallel_config.ray_runtime_env = {"pip": ["it"], "env_vars": {"ANOTHER": "2"}}
    made = Executor(config).made
    assert made["pip"] == ["it"]
    assert made["env_vars"] == {**made["env_vars"], "ANOTHER": "2", VARIABLE: "drafts,exact"}


def as_actor(monkeypatch: pytest.MonkeyPatch, wanted: type) -> Any:
    """A class as Ray has it in the process of an actor: with functions around those of its bases,
    which themselves are said to have a parameter more."""

    def traced(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def resumed(self: Any, *args: Any, _ray_trace_ctx: Any = None, **kwargs: Any) -> Any:
            del _ray_trace_ctx
            return method(self, *args, **kwargs)

        return resumed

    context = inspect.Parameter("_ray_trace_ctx", inspect.Parameter.KEYWORD_ONLY, default=None)
    methods: dict[str, Any] = {}
    for name, method in inspect.getmembers(wanted, inspect.isfunction):
        signature = inspect.signature(method)
        more = signature.replace(parameters=[*signature.parameters.values(), context])
        if not any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values()):
            monkeypatch.setattr(method, "__signature__", more, raising=False)
        methods[name] = traced(method)
    return type("Actor", (wanted,), methods)


def start_worker(monkeypatch: pytest.MonkeyPatch, wrapper: Callable[..., Any]) -> Any:
    """A worker with a patch of ``check_health``, in what vLLM has around it."""
    base: Any = importlib.import_module(BASE)
    for name in ("__init__", "check_health"):  # put back after the test
        monkeypatch.setattr(base.WorkerBase, name, getattr(base.WorkerBase, name))

    def healthy(original: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(original)(lambda _: "healthy")

    of_workers = Patch(BASE, "WorkerBase.check_health", "self", healthy)
    monkeypatch.delenv(VARIABLE, raising=False)
    plugin.install("it", [plugin.in_workers("it", [[of_workers]])])
    config = make_config()
    config.parallel_config.worker_cls = f"{BASE}.WorkerBase"
    own = {"local_rank": 0, "rank": 0, "distributed_init_method": "", "is_driver_worker": True}
    started = wrapper(rpc_rank=0)
    started.init_worker([{"vllm_config": config, **own}])
    return started.worker


def test_a_worker_in_an_actor_of_rays_gets_the_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The older executor's actor is the class around the worker."""
    base: Any = importlib.import_module(BASE)
    actor = as_actor(monkeypatch, base.WorkerWrapperBase)
    assert start_worker(monkeypatch, actor).check_health() == "healthy"


@pytest.mark.parametrize("has_gpu", [True, False])
@pytest.mark.parametrize("threads", [None, "16"])
def test_a_worker_of_a_gpu_has_one_thread(
    monkeypatch: pytest.MonkeyPatch, threads: str | None, *, has_gpu: bool
) -> None:
    """A CPU's worker needs them all, and a user who counts them knows why."""
    base: Any = importlib.import_module(BASE)
    limits: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", limits.append)
    monkeypatch.delenv(THREADS, raising=False)
    if threads is not None:
        monkeypatch.setenv(THREADS, threads)
    start_worker(monkeypatch, base.WorkerWrapperBase)
    assert limits == ([1] if has_gpu and threads is None else [])
