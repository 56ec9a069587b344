"""The page "Add a grammar backend", followed to the letter: its file and entry point, installed."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from guided_spec import LLM, BudgetTooSmallError, GrammarSpec, SamplingParams, Vocabulary
from guided_spec.bundled import bundled_asset
from guided_spec.grammar.backends.guarded import check_grammar_backend
from guided_spec.grammar.backends.registry import (
    ENTRY_POINT_GROUP,
    GRAMMAR_BACKENDS,
    grammar_backend_names,
)
from guided_spec.models.tokenizer import load_tokenizer
from tests.docs.installing import install
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "add_a_grammar_backend.md").read_text()
WORDS = ["red", "reddish", "red, blue", "green"]
RANKING = GrammarSpec.choice(WORDS)
TEXTS = {", ".join(order) for order in itertools.permutations(WORDS)}
DATE = GrammarSpec.regex(r"\d{4}-\d{2}-\d{2}")
PROMPT = "Colours: green, red, reddish.\n\nRanking: "


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The backend's name, after an installer has done its work: a module and its metadata."""
    name, module = install(PAGE, ENTRY_POINT_GROUP, tmp_path)
    assert name not in grammar_backend_names()
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(module, None)


@pytest.mark.slow
def test_the_page_makes_an_installed_backend(installed: str) -> None:
    assert installed in grammar_backend_names()
    assert installed not in GRAMMAR_BACKENDS, "the entry point is not what is tested"
    own = RANKING.with_backend(installed)
    grammars = [
        own,
        DATE,
        DATE.with_backend("llguidance"),
        own.after("=", reasoning_budget=3),
        RANKING,
    ]
    params = [SamplingParams(max_tokens=60, grammar=spec) for spec in grammars]
    with LLM(proposer="none") as llm:
        plain = llm.generate([PROMPT] * len(params), params, on_error="return")
        for proposer in ("chain:grammar_forced+ngram", "draft_model:validate"):
            with llm.with_proposer(proposer) as other:
                found = other.generate([PROMPT] * len(params), params, on_error="return")
            assert [output.text for output in found] == [output.text for output in plain]
            assert sum(o.stats.steps for o in found) < sum(o.stats.steps for o in plain)
    assert [output.error for output in plain] == [None] * len(params)
    assert plain[0].text in TEXTS
    assert plain[1].text == plain[2].text
    assert plain[3].text.partition("=")[2] in TEXTS
    assert plain[4].text in WORDS


def test_its_texts_are_whole_within_any_budget_that_has_room(installed: str) -> None:
    params = [
        SamplingParams(
            max_tokens=budget, temperature=1.5, seed=budget, grammar=RANKING, complete=True
        )
        for budget in range(6, 24, 3)
    ]
    with LLM(proposer="grammar_forced", grammar_backend=installed) as llm:
        outputs = llm.generate([PROMPT] * len(params), params, on_error="return")
    refused = [isinstance(output.error, BudgetTooSmallError) for output in outputs]
    assert refused == sorted(refused, reverse=True)
    assert 0 < sum(refused) < 4
    for output in outputs[sum(refused) :]:
        assert output.is_complete
        assert output.text in TEXTS


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="workers need POSIX")
def test_its_large_grammars_are_tried_out_elsewhere(installed: str) -> None:
    words = [letter * 9_000 for letter in "ab"]
    spec = GrammarSpec.choice(words).with_backend(installed)
    with LLM(proposer="none") as llm:
        output = llm.generate(
            "1, 2", SamplingParams(max_tokens=8, grammar=spec, complete=False), on_error="return"
        )[0]
        isolated: Any = llm._grammars._backend
        assert isolated._workers
    assert output.error is None
    assert any(word.startswith(output.text) for word in words)


@pytest.mark.parametrize("kind", ["bytes", "bundled"])
def test_it_conforms(installed: str, kind: str) -> None:
    if kind == "bytes":
        vocabulary = Vocabulary((*(bytes([byte]) for byte in range(256)), b""), (256,), 257)
    else:
        tokenizer = load_tokenizer(bundled_asset("target"))
        size, stop = len(tokenizer), [tokenizer.eos_token_id]
        vocabulary = Vocabulary.from_tokenizer(tokenizer, size, stop)
    backend = importlib.import_module(installed).Ranking(vocabulary)
    texts = check_grammar_backend(backend, RANKING, num_texts=12)
    assert len(texts) == 12
    assert set(texts) <= TEXTS
    assert len(set(texts)) > 3
