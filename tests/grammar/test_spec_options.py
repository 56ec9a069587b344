"""Specs that ask for different texts are different: caches of grammars go by a spec alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from guided_spec.grammar.spec import GrammarSpec

SPEC = GrammarSpec.json_schema({"type": "object", "properties": {"a": {}, "b": {}}})
CHANGES: list[dict[str, Any]] = [
    {"any_whitespace": True},
    {"key_order": "any"},
    {"additional_properties": "schema"},
    {"unsupported": "rewrite"},
    {"strict": True},
    {"backend": "llguidance"},
    {"source": "{}"},
]


@pytest.mark.every_case
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_each_option_is_part_of_a_spec(change: dict[str, Any]) -> None:
    other = replace(SPEC, **change)
    assert other != SPEC
    assert len({SPEC, other, replace(SPEC)}) == 2


def test_where_the_constraint_begins_is_part_of_a_spec() -> None:
    assert len({SPEC, SPEC.after("</think>"), SPEC.after("</answer>")}) == 3
