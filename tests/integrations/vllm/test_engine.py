"""vLLM's CPU build as a whole engine: with the feature ``drafts`` the texts stay, and cost less."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.plugins import install_beside
from guided_spec import LLM
from tests.integrations.vllm.own_llm import PARAMS, PROMPTS

try:
    IS_CPU_BUILD = version("vllm").endswith("+cpu")
except PackageNotFoundError:
    IS_CPU_BUILD = False

pytestmark = pytest.mark.skipif(not IS_CPU_BUILD, reason="vLLM's CPU build is not installed")
ROOT = Path(__file__).parents[3]
COUNT = 16
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


def run(folder: Path, features: str) -> dict[str, Any]:
    result = folder / f"{features.replace(':', ' ')}.json"
    command = [sys.executable, "-m", "tests.integrations.vllm.engine", str(result), str(COUNT)]
    environment = {**os.environ, **SETTINGS, "GUIDED_SPEC_VLLM": features}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    assert ("drafts under grammars" in done.stdout + done.stderr) == bool(features)
    return found


@pytest.mark.parametrize("proposer", ["none", "chain:grammar_forced+eagle3"])
def test_llm_writes_what_the_own_engine_writes(tmp_path: Path, proposer: str) -> None:
    result = tmp_path / "result.json"
    install_beside(tmp_path)
    command = [sys.executable, "-m", "tests.integrations.vllm.own_llm", str(result), proposer]
    path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": path}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found = json.loads(result.read_text(encoding="utf-8"))
    with LLM(proposer="none") as llm:
        own = llm.generate(PROMPTS, PARAMS)
    assert found["texts"] == [output.text for output in own]
    assert found["complete"] == [output.is_complete for output in own]
    assert all(found["complete"][:4])
    assert len(own[2].token_ids) <= 14 < len(own[1].token_ids)
    assert found["refused"] == "UnsupportedSchemaError"
    drafted = "drafts under grammars" in done.stdout + done.stderr
    assert drafted == (proposer != "none")


def test_texts_stay_and_more_drafts_are_accepted(tmp_path: Path) -> None:
    plain = run(tmp_path, "")
    masked = run(tmp_path, "drafts,exact,schemas")
    assert masked["texts"] == plain["texts"]
    assert masked["accepted"] > plain["accepted"]
