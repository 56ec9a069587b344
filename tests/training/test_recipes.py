"""The recipes of ``examples/train``: their commands are run at the size of a toy."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from guided_spec.cli.main import app
from tests.tiny_llm import VOCAB_SIZE
from tests.training.toy_algorithm import write_documents, write_target

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "train"
CPU = ["--device", "cpu"]
SMALL = ["--limit", "8", "--batch-tokens", "512", "--epochs", "1", "--workers", "0", *CPU]
FEW = ["--decode-limit", "1", "--decode-max-tokens", "32", "--regenerate-max-tokens", "64"]
OWN = {"block_drafter": ["--num-layers", "1", "--anchors", "2"]}
WRITTEN = {"mixture_of_experts": ("head", "first"), "published_model": ("eagle3", "dspark")}

# It writes its arguments, a line each, and an empty line.
RECORDER = """#!/usr/bin/env bash
printf '%s\\n' "$@" '' >> "$RECORDED"
"""


def commands_of(recipe: str, folder: Path, arguments: list[str]) -> list[list[str]]:
    """What a script calls ``guided-spec`` with."""
    binary = folder / "bin" / "guided-spec"
    binary.parent.mkdir()
    binary.write_text(RECORDER)
    binary.chmod(0o755)
    settings = {
        "TARGET": write_target(folder / "target"),
        "DATA": write_documents(folder / "documents.jsonl", 8),
        "OUTPUT": str(folder / "out"),
        "DRAFT_VOCAB_SIZE": str(VOCAB_SIZE // 2),
        "RECORDED": str(folder / "recorded"),
        "PATH": f"{binary.parent}{os.pathsep}{os.environ['PATH']}",
    }
    script = RECIPES / recipe / "train.sh"
    subprocess.run([script, *arguments], env={**os.environ, **settings}, check=True, timeout=30)
    recorded = (folder / "recorded").read_text().removesuffix("\n\n")
    return [command.split("\n") for command in recorded.split("\n\n")]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", sorted(path.parent.name for path in RECIPES.glob("*/train.sh")))
def test_recipe(recipe: str, tmp_path: Path) -> None:
    few = [] if recipe == "mixture_of_experts" else FEW  # that one decodes nothing
    commands = commands_of(recipe, tmp_path, [*SMALL, *few, *OWN.get(recipe, [])])
    for command in commands:
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
    for folder in WRITTEN.get(recipe, (".",)):
        assert (tmp_path / "out" / folder / "model.safetensors").is_file()
    if recipe == "mtp_layer":
        assert commands[-1][0] == "stitch"
        assert (tmp_path / "out-stitched" / "config.json").is_file()
    assert (RECIPES / recipe / "README.md").is_file()
