"""A model split over two processes: both take the same decisions, and those of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from guided_spec.engine.parallel import SeedSource, is_parallel
from tests.engine.parallel_run import generate
from tests.tiny_llm import tiny_model, tiny_tokenizer


def test_one_process_is_not_parallel() -> None:
    model = tiny_model("llama")
    assert not is_parallel(model)
    assert SeedSource(model).draw() != SeedSource(model).draw()


def test_a_group_of_processes_may_have_a_model_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those that train a draft: whoever decodes with it waits for no other."""
    model: Any = tiny_model("llama")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert not is_parallel(model)
    assert not is_parallel(object())  # of another engine
    model._tp_size = 2
    assert is_parallel(model)


@pytest.mark.slow
def test_two_processes_agree(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    module = Path(__file__).with_name("parallel_run.py")
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    subprocess.run(
        [*run, str(module), str(folder), str(tmp_path)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    alone = generate(str(folder), None)
    assert first[:2] == alone[:2]  # the third is sampled with a seed of its own
