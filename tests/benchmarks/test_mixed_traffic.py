"""Requests of all kinds through one engine, whose steps are timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks import mixed_traffic
from benchmarks.gpu.subject import load_subject
from guided_spec.bundled import bundled_asset


@pytest.mark.slow
def test_requests_come_and_go() -> None:
    subject = load_subject(bundled_asset("target"), None, device="cpu", dtype="float32")
    traffic = mixed_traffic.Traffic(steps=80, load=30, prompts=(5, 40))
    cells = mixed_traffic.measure(subject, "none", traffic, 4)
    ready, steps, *times = cells[:7]
    assert steps == "80"
    assert all(float(time) > 0 for time in (ready, *times))
    assert cells[7:9] == ["0", "0"]  # there are no graphs here, nor kernels
    assert int(cells[9]) > 0


def test_captures_are_counted() -> None:
    before = torch.cuda.CUDAGraph.capture_begin
    with mixed_traffic.counted() as made:
        assert torch.cuda.CUDAGraph.capture_begin is not before
    assert torch.cuda.CUDAGraph.capture_begin is before
    assert not made
