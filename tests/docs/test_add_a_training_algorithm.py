"""The page "Add a training algorithm", followed to the letter: installed, found, and trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from guided_spec.bundled import bundled_asset
from guided_spec.errors import ConfigError
from guided_spec.training.options import TrainOptions
from guided_spec.training.registry import (
    ALGORITHMS,
    ENTRY_POINT_GROUP,
    algorithm_names,
    find_algorithm,
)
from guided_spec.training.run import train
from tests.docs.installing import install
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "add_a_training_algorithm.md").read_text()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The algorithm's name, after an installer has done its work: a module and its metadata."""
    name, module = install(PAGE, ENTRY_POINT_GROUP, tmp_path)
    ALGORITHMS.pop(name, None)  # of the test that runs the blocks of all pages
    assert name not in algorithm_names()
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(module, None)
    ALGORITHMS.pop(name, None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages that train
def test_the_page_makes_an_algorithm_that_trains(installed: str, tmp_path: Path) -> None:
    assert installed in algorithm_names()
    assert installed not in ALGORITHMS, "the entry point is not what is tested"
    lines = Path(bundled_asset("heldout.jsonl")).read_text(encoding="utf-8").splitlines()
    (tmp_path / "data.jsonl").write_text("\n".join(lines[:24]), encoding="utf-8")
    options = TrainOptions(
        algorithm=installed,
        target=bundled_asset("target"),
        data=[str(tmp_path / "data.jsonl")],
        output=str(tmp_path / "head"),
        max_steps=3,
        batch_tokens=1024,
        draft_vocab_size=2048,
        heldout_share=0.1,
        decode_limit=1,
        device="cpu",
        workers=0,
    )
    report = train(options, {"top_k": 5, "ttt_steps": 2})
    assert report.steps == 3
    assert report.decoded is not None
    assert report.decoded["valid"] == 1
    config = json.loads((tmp_path / "head" / "config.json").read_text(encoding="utf-8"))
    assert config["speculators_model_type"] == "eagle3"
    with pytest.raises(ConfigError, match="top_k=0"):
        find_algorithm(installed).get_trainer_kwargs(top_k=0)
