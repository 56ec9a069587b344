"""The variables that we set for vLLM are ones that it reads."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from benchmarks.gpu.peers import ENVIRONMENT
from guided_spec.integrations.vllm.llm import PROCESSES

pytest.importorskip("vllm", reason="vLLM is not installed")


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
