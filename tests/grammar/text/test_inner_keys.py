"""No key stands twice in an object, on any level."""

from __future__ import annotations

import pytest

from guided_spec.grammar.backends.auto import AutoBackend
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts

NUMBERS = {"type": "object", "additionalProperties": {"type": "integer"}}
OBJECTS = {"type": "object", "additionalProperties": NUMBERS}
LISTS = {"type": "object", "additionalProperties": {"type": "array", "items": NUMBERS}}


@pytest.fixture(scope="module", params=[OBJECTS, LISTS], ids=["objects", "arrays"])
def compiled(request: pytest.FixtureRequest) -> CompiledGrammar:
    return AutoBackend(BYTES).compile(GrammarSpec.json_schema(request.param))


def written(compiled: CompiledGrammar, first: str, second: str, inner: str) -> bool:
    """Whether an object of two keys is admitted, whose second value holds ``inner``."""
    one, other = '{"a": 1}', f"{{{inner}}}"
    if accepts(compiled, '{"a": []}'):
        one, other = f"[{one}]", f"[{one}, {other}]"
    return accepts(compiled, f'{{"{first}": {one}, "{second}": {other}}}')


def test_a_key_may_stand_once_in_each_object(compiled: CompiledGrammar) -> None:
    assert written(compiled, "a", "b", '"a": 1, "b": 2')


def test_no_key_stands_twice_outside(compiled: CompiledGrammar) -> None:
    assert not written(compiled, "a", "a", '"a": 1')


def test_no_key_stands_twice_inside(compiled: CompiledGrammar) -> None:
    assert not written(compiled, "a", "b", '"c": 1, "c": 2')
    assert not written(compiled, "a", "b", '"b": 1, "c": 2, "b": 3')
