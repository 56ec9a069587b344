"""The page "Add a proposer", followed to the letter: its file and its entry point, installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from guided_spec import LLM, GrammarSpec, SamplingParams
from guided_spec.proposers import ENTRY_POINT_GROUP, PROPOSERS, proposer_names
from tests.docs.installing import install
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "add_a_proposer.md").read_text()
PROMPTS = [
    "Please call Maria Lopez at +49 170 5551234.\n\nFields: name, phone\nJSON: ",
    "The launch was moved to March 5, 2024.\n\nDate: ",
    "one two three one two three one two",
]
PARAMS = [
    SamplingParams(grammar=GrammarSpec.json_object()),
    SamplingParams(grammar=GrammarSpec.regex(r"\d{4}-\d{2}-\d{2}")),
    SamplingParams(max_tokens=12),
]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The proposer's name, after an installer has done its work: a module and its metadata."""
    name, module = install(PAGE, ENTRY_POINT_GROUP, tmp_path)
    assert name not in proposer_names()
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(module, None)


def test_the_page_makes_an_installed_proposer(installed: str) -> None:
    assert installed in proposer_names()
    assert installed not in PROPOSERS, "the entry point is not what is tested"
    with LLM(proposer="none") as llm:
        plain = llm.generate(PROMPTS, PARAMS, on_error="return")
    for proposer in (installed, f"chain:grammar_forced+{installed}"):
        with llm.with_proposer(proposer) as other:
            found = other.generate(PROMPTS, PARAMS, on_error="return")
        assert [output.error for output in found] == [None] * len(PROMPTS)
        assert [output.token_ids for output in found] == [output.token_ids for output in plain]
        assert sum(o.stats.steps for o in found) < sum(o.stats.steps for o in plain)
