"""The page "Add an engine", followed to the letter: its engine writes valid texts, and its own."""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import guided_spec
from guided_spec import LLM, DecodeBatch, GrammarSpec, SamplingParams
from guided_spec.core import DraftInFlight
from guided_spec.models.loading import load_model
from guided_spec.models.tokenizer import load_tokenizer
from tests.docs.pages import ROOT, read_blocks

PAGE = (ROOT / "docs" / "add_an_engine.md").read_text()
CODE = next(block.code for block in read_blocks(PAGE) if block.language == "python")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["person", "firm"]},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
DATE = r"\d{4}-\d{2}-\d{2}"
PROMPTS = [
    "Please call Maria Lopez at +49 170 5551234.\n\nJSON: ",
    "The launch was moved to March 5, 2024.\n\nDate: ",
    "one two three one two three one two",
]
GRAMMARS = [GrammarSpec.json_schema(SCHEMA), GrammarSpec.regex(DATE), None]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page's module, imported from a file of the name that the page gives it."""
    folder = tmp_path_factory.mktemp("page")
    assert "The whole of `tiny_engine.py`:\n\n```python" in PAGE
    (folder / "tiny_engine.py").write_text(CODE)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("tiny_engine")
    sys.path.remove(str(folder))
    del sys.modules["tiny_engine"]


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(str(files("guided_spec") / "assets" / "target"), device="cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(files("guided_spec") / "assets" / "target"))


def write(engine: Any, temperature: float = 0.0) -> list[list[int]]:
    params = [
        SamplingParams(
            max_tokens=40 if grammar else 8, grammar=grammar, temperature=temperature, seed=seed
        )
        for seed, grammar in enumerate(GRAMMARS)
    ]
    texts = engine.generate(PROMPTS, params)
    assert not engine.target.caches, "the slots are free again"
    return [text.output_ids for text in texts]


def check_valid(engine: Any, outputs: list[list[int]]) -> None:
    answer, date, _ = map(engine.guide.vocabulary.decode, outputs)
    jsonschema.validate(json.loads(answer), SCHEMA)
    assert re.fullmatch(DATE, date)


@pytest.fixture(scope="module")
def plain(page: Any, model: Any, tokenizer: Any) -> list[list[int]]:
    return write(page.TinyEngine(model, tokenizer, "none"))


@pytest.mark.parametrize("proposer", ["grammar_forced", "chain:grammar_forced+ngram"])
def test_any_proposer_gives_the_plain_text(
    page: Any, model: Any, tokenizer: Any, plain: list[list[int]], proposer: str
) -> None:
    engine = page.TinyEngine(model, tokenizer, proposer)
    verify, widths = engine.target.verify, list[int]()

    def counting(batch: DecodeBatch, flight: DraftInFlight) -> Any:
        widths.append(flight.draft.token_ids.shape[1])
        return verify(batch, flight)

    engine.target.verify = counting
    assert write(engine) == plain
    assert len(widths) < max(map(len, plain))
    check_valid(engine, plain)
    check_valid(engine, write(engine, temperature=1.2))


def test_the_text_is_that_of_the_packages_own_engine(
    model: Any, tokenizer: Any, plain: list[list[int]]
) -> None:
    params = [
        SamplingParams(max_tokens=40 if grammar else 8, grammar=grammar) for grammar in GRAMMARS
    ]
    with LLM(model, "none", tokenizer=tokenizer) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == plain


def test_the_page_uses_nothing_of_the_engine() -> None:
    used: list[str] = []
    for block in read_blocks(PAGE):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("guided_spec"):
                names = [alias.name for alias in node.names]
                modules = guided_spec._MODULES
                is_root = node.module == "guided_spec"
                used += [modules.get(n, "errors") for n in names] if is_root else [str(node.module)]
    assert used
    assert [module for module in used if "engine" in module] == []


def test_the_page_is_a_whole_engine_of_about_sixty_lines() -> None:
    body = CODE.partition("\nclass ")[2].splitlines()
    assert len([line for line in body if line.strip()]) <= 70


def test_files_named_on_the_page_exist() -> None:
    named = re.findall(r"`(tests/\S+\.py)`", PAGE)
    assert named
    assert all((Path(ROOT) / name).is_file() for name in named)
