"""``benchmarks.gpu`` on a CUDA device, at tiny sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.documents import DocumentPlan
from benchmarks.gpu.kernels import measure_kernels
from benchmarks.gpu.run import GpuPlan, run_gpu
from benchmarks.gpu.steps import StepPlan
from tests.benchmarks.small_llama import write_small

pytestmark = pytest.mark.gpu


def test_steps_and_documents(tmp_path: Path) -> None:
    folders = write_small(tmp_path)
    plan = GpuPlan(
        sections=("steps", "end-to-end"),
        model=str(folders.target),
        eagle3=str(folders.eagle3),
        dtype="float32",
        steps=StepPlan(("none", "eagle3:mask"), (1, 8), (0.0,), 3, 40, 6, 2),
        documents=DocumentPlan(("none", "chain:grammar_forced+eagle3"), (4,), (0.7,), 3, 200, 6),
    )
    sections = {section.name: section.records for section in run_gpu(plan, lambda _: None)}
    rows = sections["steps"]["rows"] + sections["end-to-end"]["rows"]
    assert len(rows) == 2 * 2 * 2 + 2
    assert [row["problem"] for row in rows] == [None] * len(rows)
    assert sections["machine"]["device"] == torch.cuda.get_device_name(0)


def test_forwards() -> None:
    given = {"layers": 4, "batch_sizes": "1,2", "context": 20}  # a hybrid attends in one of 4
    found = measure_kernels("cuda", lambda _: None, {"forwards": given})
    assert "weights read ms" in found["forwards"]
