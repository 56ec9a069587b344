"""The variables that we set for vLLM are ones that it reads."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from benchmarks.gpu.peers import ENVIRONMENT
from guided_spec.integrations.vllm import plugin
from guided_spec.integrations.vllm.llm import PROCESSES
from guided_spec.integrations.vllm.plugin import RAY_VARIABLE, VARIABLE

pytest.importorskip("vllm", reason="vLLM is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own


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


def test_workers_on_ray_get_the_plugins_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function with which vLLM chooses what it copies to them."""
    copied: Any = importlib.import_module("vllm.ray.ray_env").get_env_vars_to_copy
    monkeypatch.setenv(VARIABLE, "counts")
    monkeypatch.delenv(RAY_VARIABLE, raising=False)
    assert VARIABLE not in copied()
    monkeypatch.setenv(RAY_VARIABLE, "ANOTHER")  # put back after the test
    plugin._carry_to_ray()
    assert {VARIABLE, "ANOTHER"} <= copied()


def test_the_newer_executor_on_ray_copies_all_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: Any = importlib.import_module("vllm.v1.executor.ray_env_utils").get_driver_env_vars
    monkeypatch.setenv(VARIABLE, "counts")
    assert copied(set())[VARIABLE] == "counts"
