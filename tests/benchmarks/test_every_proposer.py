"""Every text is valid, whoever drafts it: a sample of the schemas that the benchmark takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.schemas.corpus import Instance, SchemaCase, load_cases
from benchmarks.schemas.every_proposer import WITHOUT_HEADS, ProposerReport, write_with
from guided_spec.proposers import PROPOSERS
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, near_copy

DATA = Path(__file__).parent.parent / "data"
CASES = load_cases([DATA / "json_schema_test_suite", DATA / "bfcl"])[::60]
BLOCKS = {"dflash", "dflash2", "domino", "dspark", "lilicorr", "p_eagle"}
OF_ITS_KIND = {"pard"}  # a model that was trained for it
OWN_HEADS = {"deepseek_mtp", "eagle", "eagle3", "glm4_moe_mtp", "mtp", "qwen3_5_mtp", *BLOCKS}
PARAMS = SamplingParams(max_tokens=40, temperature=1.0, seed=1, complete=False)


def write(name: str, cases: list[SchemaCase]) -> ProposerReport:
    with make_llm("llama", name, near_copy("llama")) as llm:
        return write_with(llm, name, cases, PARAMS)


def test_no_proposer_is_left_out() -> None:
    names = {name.partition(":")[0] for name in WITHOUT_HEADS}
    assert names == PROPOSERS.keys() - OWN_HEADS - OF_ITS_KIND - {
        "auto"
    }  # auto is one of the others


@pytest.mark.parametrize("name", WITHOUT_HEADS)
def test_every_text_is_valid(name: str) -> None:
    report = write(name, CASES)
    assert report.schemas == len(CASES) > 5
    assert not report.failed
    assert not report.invalid
    assert report.refused + report.texts + report.cut == report.schemas
    assert report.texts > report.schemas * 2 // 3
    assert report.drafted >= report.accepted
    assert (report.drafted > 0) == (name != "none")


def test_what_is_not_valid_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.schemas.every_proposer.is_valid", lambda *_: False)
    case = SchemaCase("one", "x", {"enum": ["a"]}, (Instance("a", valid=True),))
    report = write("none", [case, case._replace(id="two", schema={"type": "no type"})])
    assert report.invalid == ("one: '\"a\"'",)
    assert report.refused == 1
