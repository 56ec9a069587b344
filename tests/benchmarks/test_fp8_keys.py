"""Greedy texts of two dtypes of keys, with drafts and without, in one table."""

from __future__ import annotations

from benchmarks.fp8_keys import COLUMNS, compare
from guided_spec.evaluate.measurement import WorkItem
from guided_spec.grammar.spec import GrammarSpec
from tests.tiny_llm import make_llm

ITEMS = [WorkItem("The name is", GrammarSpec.regex("[a-z]{12}")), WorkItem("1, 2, 3, 1, 2", None)]


def test_a_row_for_each_dtype_and_proposer() -> None:
    table = compare(make_llm("llama", "none", max_batch_size=2), ["none", "ngram"], ITEMS, 20)
    assert [str(column.header) for column in table.columns] == [*COLUMNS]
    cells = [[*column.cells] for column in table.columns]
    assert cells[:2] == [["auto"] * 2 + ["fp8"] * 2, ["none", "ngram"] * 2]
    assert cells[2][0] == cells[2][2] == "1.00"
    assert cells[-1][:2] == ["100.0%"] * 2  # drafts change no text
    assert cells[-1][2] == cells[-1][3]
