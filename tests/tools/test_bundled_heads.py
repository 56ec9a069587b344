"""The bundled draft heads, and the command that makes them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from guided_spec.bundled import bundled_asset
from guided_spec.evaluate.measurement import load_workload
from guided_spec.models.loading import load_model
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.training.validation import HeldoutDecoding
from guided_spec.types import SamplingParams
from tools.bundled_models.heads import HEADS, main

SIZE_LIMIT = 10_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bundled_head_drafts_well(name: str, temperature: float) -> None:
    """The figures of all documents are on the head's card; these are the first twelve."""
    path = bundled_asset("target")
    decoding = HeldoutDecoding(
        load_model(path, device="cpu"),
        load_tokenizer(path),
        load_workload(Path(bundled_asset("heldout.jsonl")), 12),
        SamplingParams(max_tokens=360, temperature=temperature, seed=0),
        num_draft_tokens=5,
    )
    found = decoding.run(Path(bundled_asset(name)))
    assert found.valid == 1
    # DSpark's was trained for a minute.
    assert found.acceptance_length >= (2.5 if name == "dspark" else 3.0)


def test_heads_are_small_and_tell_no_place() -> None:
    files = [path for name in HEADS for path in Path(bundled_asset(name)).iterdir()]
    assert sum(path.stat().st_size for path in files) <= SIZE_LIMIT
    for name in HEADS:
        config = json.loads((Path(bundled_asset(name)) / "config.json").read_text())
        verifier = config.get("speculators_config", {}).get("verifier", {})
        assert verifier.get("name_or_path") is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages that train
def test_the_command_makes_a_head(tmp_path: Path) -> None:
    main(
        [
            *("--output", str(tmp_path / "heads"), "--work", str(tmp_path / "work")),
            *("--documents", "8", "--decode-limit", "1", "--workers", "0", "--names", "mtp"),
        ]
    )
    made = tmp_path / "heads" / "mtp"
    assert {path.name for path in made.iterdir()} == {
        "README.md",
        "config.json",
        "model.safetensors",
    }
    assert "tokens per target forward" in (made / "README.md").read_text()
