"""The limit of a device, from what its forwards take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import limit
from benchmarks.gpu.limit import device_limit


class _Model:
    device = torch.device("cpu")

    def __init__(self, times: dict[int, float]) -> None:
        self.times = times

    def forward_seconds(self, _layers: tuple[int, ...]) -> dict[int, float]:
        return self.times


def _llm(times: dict[int, float]) -> Any:
    engine = SimpleNamespace(model=_Model(times), _layers=())
    return SimpleNamespace(_runner=SimpleNamespace(setup=SimpleNamespace(engine=engine)))


def _completions(count: int) -> list[Any]:
    stats = SimpleNamespace(prompt_tokens=300, cached_tokens=44, output_tokens=50, steps=10)
    return [SimpleNamespace(stats=stats)] * count


def test_no_limit_without_measured_forwards() -> None:
    assert device_limit(_llm({}), _completions(4), 4, 5, None) is None


def test_prompts_and_steps_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """256 tokens of each prompt are read, and 20 steps verify 4 texts of 6 tokens."""
    llm, eight = _llm({1: 0.01, 24: 0.02, 512: 0.1}), _completions(8)
    plain = 8 * 256 / 512 * 0.1 + 20 * 0.02
    assert device_limit(llm, eight, 4, 5, None) == pytest.approx(8 * 50 / plain)
    (tmp_path / "model.safetensors").write_bytes(bytes(3000))
    monkeypatch.setattr(limit, "read_bandwidth", lambda _device: 1e6)
    drafts = 20 * 5 * 3000 / 1e6
    assert device_limit(llm, eight, 4, 5, str(tmp_path)) == pytest.approx(400 / (plain + drafts))
