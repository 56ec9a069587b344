"""The tool that says which parts of the plugin fit a release of vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_vllm import lacks, main

RELEASE = {
    "__init__": "",
    "exceptions": "class VLLMValidationError(ValueError): ...",
    "sampling_params": """
class StructuredOutputsParams:
    json: str
    structural_tag: str
class SamplingParams:
    structured_outputs: StructuredOutputsParams
    def _validate_structured_outputs(self, config): ...
""",
}


def test_what_a_release_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = tmp_path / "1.2.3" / "vllm"
    package.mkdir(parents=True)
    with pytest.raises(FileNotFoundError):
        lacks(package.parent)
    for name, source in RELEASE.items():
        (package / f"{name}.py").write_text(source, encoding="utf-8")
    found = lacks(package.parent)
    assert [part for part, lack in found.items() if not lack] == ["schemas"]
    assert main([str(package.parent)]) == 1
    head, _, row, _, *reasons = capsys.readouterr().out.splitlines()
    assert dict(zip(head.split(" | "), row.split(" | "), strict=True))["schemas"] == "on"
    assert row.count("off") == len(reasons) == len(found) - 1
    assert reasons[0] == f"1.2.3, drafter: {found['drafter']}"
    assert "there is no v1.worker.gpu_model_runner" in found["drafter"]
