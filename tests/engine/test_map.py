"""``LLM.map``: rows without end, read as there is room, with outputs in their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from itertools import count
from typing import Any

import pytest

from guided_spec.engine.llm import LLM
from guided_spec.engine.rows.row_map import SLOTS_AHEAD
from guided_spec.engine.rows.template import PromptTemplate
from guided_spec.errors import ConfigError, PromptError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm

SHORT = SamplingParams(max_tokens=3)
SLOTS = 3


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm("llama", "ngram", max_batch_size=SLOTS) as made:
        yield made


def test_it_gives_what_generate_gives(llm: LLM) -> None:
    prompts = [f"The name {at}" for at in range(20)]
    params = SamplingParams(max_tokens=6, temperature=1, seed=4, n=2)
    mapped = list(llm.map(iter(prompts), params))
    expected = llm.generate(prompts, params)
    assert [one.prompt_index for one in mapped] == [*range(20)]
    texts = [[each.text for each in one.completions] for one in mapped]
    assert texts == [[each.text for each in one.completions] for one in expected]


def test_rows_fill_a_prompt(llm: LLM) -> None:
    rows = [{"name": "Ada", "age": at, "tags": ["é"]} for at in range(3)]
    grammar = GrammarSpec.choice(["yes", "no"])
    mapped = llm.map(rows, grammar, prompt="{{{name}}} is {age}, {tags}{age}")
    prompts = [f'{{Ada}} is {at}, ["é"]{at}' for at in range(3)]
    expected = llm.generate(prompts, grammar)
    assert [output.text for output in mapped] == [output.text for output in expected]
    by_keyword = llm.map(rows, grammar=grammar, prompt="{{{name}}} is {age}, {tags}{age}")
    assert [output.text for output in by_keyword] == [output.text for output in expected]


def test_rows_without_end_are_read_as_there_is_room(llm: LLM) -> None:
    read: list[int] = []

    def rows() -> Iterator[str]:
        for at in count():
            read.append(at)
            yield f"The age is {at}"

    mapped = llm.map(rows(), SHORT)
    assert read == []
    for at, output in enumerate(mapped):
        assert output.prompt_index == at
        assert len(read) <= at + 1 + SLOTS_AHEAD * SLOTS
        if at == 30:
            break
    mapped.close()  # type: ignore[attr-defined]
    until_idle(llm)


def until_idle(llm: LLM) -> None:
    """Nothing is left in flight."""
    for _ in range(1000):
        if (llm.load.running, llm.load.waiting) == (0, 0):
            return
        threading.Event().wait(0.01)
    raise AssertionError(llm.load)


def test_errors_of_rows(llm: LLM) -> None:
    rows: list[Any] = [{"a": "x"}, {"b": "x"}, {"a": None}, 5, {"a": "y" * 5000}, {"a": "z"}]
    outputs = list(llm.map(rows, SHORT, prompt="{a}", on_error="return"))
    found = ["" if output.error is None else str(output.error) for output in outputs]
    assert [bool(text) for text in found] == [False, True, True, True, True, False]
    assert found[1].startswith("the row has no column 'a'; the columns are b")
    assert found[2] == "the row has nothing in column 'a': give it a text"
    assert found[3] == "the row is 5, and not an object with columns"
    assert "only 191 fit" in found[4]
    with pytest.raises(PromptError, match="no column 'a'") as caught:
        list(llm.map(rows, SHORT, prompt="{a}"))
    assert caught.value.__notes__ == ['row 1, counted from 0; on_error="return" serves the others']
    until_idle(llm)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("value", "text"),
    [
        (date(2020, 1, 2), "2020-01-02"),
        (Decimal("1.50"), "1.50"),
        ([date(2020, 1, 2), "é"], '["2020-01-02", "é"]'),
        (True, "true"),
        (b"x", None),
        ({"k": [b"x"]}, None),
    ],
)
def test_values_as_text(value: Any, text: str | None) -> None:
    template = PromptTemplate("{a}")
    if text is not None:
        assert template.fill({"a": value}) == text
        return
    with pytest.raises(PromptError, match="column 'a' is no text: it holds bytes"):
        template.fill({"a": value})


def test_a_column_that_no_row_has(llm: LLM) -> None:
    options: Any = {"prompt": "{a}{nmae}", "on_error": "return"}
    reason = r"^prompt='{a}{nmae}': the rows have no column 'nmae'; did you mean name\? the columns"
    with pytest.raises(ConfigError, match=reason):
        llm.map([{"a": "x"}, 5, {"name": "x"}], SHORT, **options)


def test_rows_that_fail_cancel_the_others(llm: LLM) -> None:
    def rows() -> Iterator[str]:
        yield "The name is Ada"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(llm.map(rows(), SamplingParams(max_tokens=100)))
    until_idle(llm)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("rows", "options", "reason"),
    [
        ("A", {}, "^rows='A': must be an iterable of prompts"),
        ({"a": 1}, {}, "^rows=.*must be an iterable of prompts"),
        (5, {}, "^rows=5: must be an iterable of prompts"),
        ([], {"params": [SHORT]}, "^params=.*must be one SamplingParams, for all rows"),
        ([], {"prompt": 5}, "^prompt=5: must be a str with columns in braces"),
        ([], {"prompt": "{a"}, "^prompt='{a': expected '}' before end of string; write {{ and }}"),
        ([], {"prompt": "{}"}, "^prompt='{}': braces hold the name of a column and nothing else"),
        ([], {"prompt": '{"a": {a}}'}, "^prompt=.*"),
        ([], {"prompt": "{a!r}"}, "^prompt='{a!r}': braces hold the name of a column and nothing"),
        ([], {"prompt": "{a:>5}"}, "^prompt='{a:>5}': braces hold the name of a column and"),
        ([], {"on_error": "skip"}, "^on_error='skip'"),
    ],
)
def test_what_is_refused_at_once(llm: LLM, rows: Any, options: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        llm.map(rows, **options)


def test_a_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(llm.map(["A", "B"], SHORT, progress=True))) == 2
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tok/s=" in shown
    list(llm.map(["A"], SHORT))
    assert capsys.readouterr().err == ""
