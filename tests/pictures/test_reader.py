"""The bundled model that reads pictures: it reads those of the examples right, in each way."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from guided_spec import LLM, GrammarSpec, SamplingParams
from guided_spec.bundled import READER, bundled_asset
from guided_spec.cli.main import app

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGES = Path(bundled_asset("pages"))
SAID: dict[str, Any] = {
    "receipt": {
        "vendor": "Nelson Foods",
        "purchase_date": "2019-08-12",
        "lines": [
            {"item": "white boot", "count": 2, "total": 167.77},
            {"item": "organic hammer", "count": 1, "total": 13.1},
            {"item": "portable lantern", "count": 4, "total": 81.38},
        ],
        "grand_total": 262.25,
        "payment": "Voucher",
    },
    "form": {
        "position": "editor",
        "contactPhone": "+34 029 69716856",
        "annual_pay": 37,
        "expertise": ["marketing"],
        "business": "Novak Foods",
        "date_of_birth": "2017-09-02",
    },
    "table": {
        "entries": [
            {"job_title": "designer", "cost": 15.02, "rating": 0.3},
            {"job_title": "sales lead", "cost": 8007, "rating": 4.4},
            {"job_title": "consultant", "cost": 3.3, "rating": 1.9},
            {"job_title": "architect", "cost": 91.88, "rating": 1.3},
            {"job_title": "developer", "cost": 6818, "rating": 4},
            {"job_title": "pilot", "cost": 125, "rating": 1},
        ]
    },
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(READER, max_model_len=1024) as made:
        yield made


def test_the_name(llm: LLM) -> None:
    assert repr(llm).startswith("LLM('bundled-reader', ")


@pytest.mark.parametrize("kind", SAID)
def test_an_example_is_read_right(llm: LLM, kind: str) -> None:
    content = [{"type": "image", "image": str(EXAMPLES / f"{kind}.png")}]
    schema = json.loads((EXAMPLES / f"{kind}.schema.json").read_text())
    params = SamplingParams(grammar=GrammarSpec.json_schema(schema))
    (found,) = llm.generate([[{"role": "user", "content": content}]], params)
    assert found.parsed == SAID[kind]


@pytest.mark.slow
def test_most_of_the_pages_are_read_right(llm: LLM) -> None:
    lines = (PAGES / "pages.jsonl").read_text(encoding="utf-8").splitlines()
    pages = [json.loads(line) for line in lines]
    asked, params = [], []
    for page in pages:
        content = [{"type": "image", "image": str(PAGES / page["image"])}]
        if page["question"]:
            content.append({"type": "text", "text": page["question"]})
        asked.append([{"role": "user", "content": content}])
        params.append(SamplingParams(grammar=GrammarSpec.json_schema(page["schema"])))
    found = llm.generate(asked, params)
    right = sum(one.parsed == page["answer"] for one, page in zip(found, pages, strict=True))
    assert right >= len(pages) / 3


def test_a_command_takes_it_for_pictures() -> None:
    options = ["--schema", str(EXAMPLES / "receipt.schema.json"), "--json"]
    asked = ["generate", "--image", str(EXAMPLES / "receipt.png"), *options]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 0, found.output
    assert json.loads(json.loads(found.stdout)["text"]) == SAID["receipt"]


def test_a_question_alone_is_not_for_it() -> None:
    found = CliRunner().invoke(app, ["generate", "--regex", "a"])
    assert found.exit_code == 1
    assert "give the text to continue" in " ".join(found.output.split())
