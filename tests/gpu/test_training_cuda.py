"""Training on a CUDA device: bf16 autocast, resuming, and what comes out of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from guided_spec.bundled import bundled_asset
from guided_spec.training.options import TrainOptions
from guided_spec.training.run import TrainingReport, train

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle": {},
    "mtp": {},
    "draft_model": {"hidden_size": 64, "intermediate_size": 128},
}


def options_for(folder: Path, algorithm: str) -> TrainOptions:
    return TrainOptions(
        algorithm=algorithm,
        target=bundled_asset("target"),
        data=[bundled_asset("heldout.jsonl")],
        output=str(folder),
        epochs=20,
        max_steps=60,
        batch_tokens=8192,
        learning_rate=1e-3,
        draft_vocab_size=2048 if algorithm == "eagle3" else None,
        heldout_share=0.1,
        decode_limit=8,
        save_every=30,
        device="cuda",
        workers=2,
    )


def run(options: TrainOptions) -> TrainingReport:
    return train(options, {"ttt_steps": 4, **ALGORITHMS[options.algorithm]})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_draft_learns_and_serves(algorithm: str, tmp_path: Path) -> None:
    report = run(options_for(tmp_path, algorithm))
    assert report.steps == 60
    assert report.peak_cuda_bytes
    assert report.expected_cuda_bytes
    assert report.heldout["acceptance_length"] > 1.5
    assert report.decoded is not None
    assert report.decoded["valid"] == 1
    assert report.decoded["acceptance_length"] > 1.5


def test_resuming_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Not bitwise: CUDA kernels sum in varying order. Close, and in the same order of documents."""
    whole = run(options_for(tmp_path / "whole", "eagle3"))
    options = options_for(tmp_path / "parts", "eagle3")
    run(replace(options, max_steps=30))
    resumed = run(replace(options, resume=True))
    assert resumed.steps == whole.steps
    assert resumed.tokens == whole.tokens
    assert resumed.heldout["loss"] == pytest.approx(whole.heldout["loss"], rel=0.15)
