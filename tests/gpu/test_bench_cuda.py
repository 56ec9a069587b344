"""Widened models and ``bench gpu`` on a CUDA device, at tiny sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from guided_spec.bench.gpu import GpuPlan, run_gpu
from guided_spec.bench.gpu_end_to_end import DocumentPlan
from guided_spec.bench.gpu_kernels import measure_kernels
from guided_spec.bench.gpu_steps import StepPlan
from guided_spec.bench.widening import wide_model
from tests.bench.small_llama import SMALL, write_small

pytestmark = pytest.mark.gpu

WIDE = SMALL._replace(hidden_size=96, num_hidden_layers=5, vocab_size=SMALL.vocab_size + 13)


def test_widened_in_device_memory(tmp_path: Path) -> None:
    target = write_small(tmp_path).target
    on_cpu = wide_model(target, shape=WIDE, dtype=torch.float32)
    on_cuda = wide_model(target, shape=WIDE, dtype=torch.float32, device="cuda")
    ids = torch.arange(64)[None]
    with torch.inference_mode():
        before, after = on_cpu(ids).logits, on_cuda(ids.cuda()).logits.cpu()
    kept = SMALL.vocab_size
    torch.testing.assert_close(after[..., :kept], before[..., :kept], atol=1e-3, rtol=0)
    assert after.softmax(-1)[..., kept:].max() == 0


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
    given = {"layers": 1, "batch_sizes": "1,2", "context": 20}
    found = measure_kernels("cuda", lambda _: None, {"forwards": given})
    assert "weights read ms" in found["forwards"]
