from __future__ import annotations

import dataclasses
import enum
import json
import pickle
import re
from typing import Annotated, Any, Literal, Optional, Union

import pydantic
import pytest
from typing_extensions import TypedDict

from guided_spec.errors import ConfigError
from guided_spec.grammar.backends.auto import AutoBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.value import parse_partial, parse_value
from guided_spec.types import SamplingParams
from tests.masks.walks import BYTES, accepts, walk


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Item(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=3)]
    colour: Colour


class Basket(pydantic.BaseModel):
    items: Annotated[list[Item], pydantic.Field(max_length=2)]
    tags: Annotated[set[Literal["a", "b"]], pydantic.Field(max_length=2)]
    note: Optional[Literal["x"]] = None  # noqa: UP045 - as many models are written


@dataclasses.dataclass
class Point:
    x: bool
    y: Colour


class Row(TypedDict):
    x: bool


TYPES: tuple[Any, ...] = (
    Basket,
    Point,
    Row,
    Colour,
    Literal["a", 1, None],
    list[bool],
    Union[Point, bool],  # noqa: UP007 - both spellings of a union are to work
    Point | None,
    tuple[bool, Colour],
    dict[Colour, bool],
    bool,
)
BACKEND = AutoBackend(BYTES)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_texts_of_a_type_are_its_values(kind: Any) -> None:
    spec = GrammarSpec.of(kind)
    assert spec.is_json
    assert SamplingParams(grammar=kind).grammar == spec
    grammar = BACKEND.compile(spec)
    finished = [w for w in (walk(grammar, seed) for seed in range(10)) if w.finished]
    assert finished
    adapter = pydantic.TypeAdapter(kind)
    for text in finished:
        value = parse_value(text.text, spec.value_type)
        assert adapter.validate_python(value) == value


@pytest.mark.parametrize("kind", [set[str], frozenset[int], list[set[str]]])
def test_sets_are_arrays_of_unique_items(kind: Any) -> None:
    grammar = BACKEND.compile(GrammarSpec.of(kind))
    text = '["a", "ab"]' if kind == set[str] else "[1, 11]"
    if kind == list[set[str]]:
        text = '[["a", "ab"], ["a", "ab"]]'
    assert accepts(grammar, text)
    assert len(parse_value(text, kind)) == 2
    assert not accepts(grammar, text.replace("ab", "a").replace("11", "1"))


def test_small_sets_hold_each_item_once() -> None:
    grammar = BACKEND.compile(GrammarSpec.of(set[Colour]))
    assert accepts(grammar, '["red", "blue"]')
    assert not accepts(grammar, '["red", "red"]')


def test_what_is_given_besides_types() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert GrammarSpec.of(schema) == GrammarSpec.json_schema(schema)
    assert GrammarSpec.of(re.compile("a+")) == GrammarSpec.regex("a+")
    spec = GrammarSpec.choice(["a"])
    assert GrammarSpec.of(spec) is spec
    assert GrammarSpec.json_schema(Item).value_type is Item


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (5, "grammar=5: "),
        (b"a", "a JSON schema as a dict"),
        ("a", "say which, as GrammarSpec.regex"),
        ("[0-9]+", "say which, as GrammarSpec.regex"),
        (re.compile("a", re.IGNORECASE), "without flags"),
        (re.compile(b"a"), "must be of text"),
        (object, "pass a GrammarSpec, a type"),
    ],
)
def test_anything_else_is_refused(wanted: Any, reason: str) -> None:
    if wanted is object:
        wanted = type("Own", (), {})
    with pytest.raises(ConfigError, match=reason):
        GrammarSpec.of(wanted)
    with pytest.raises(ConfigError, match=reason):
        SamplingParams(grammar=wanted)


def test_the_type_is_no_part_of_the_constraint() -> None:
    class Local(pydantic.BaseModel):
        x: bool

    spec = GrammarSpec.of(Local)
    plain = GrammarSpec.json_schema(json.loads(spec.source))
    assert spec == plain
    assert hash(spec) == hash(plain)
    assert pickle.loads(pickle.dumps(GrammarSpec.of(Item))) == GrammarSpec.of(Item)


def test_what_a_validator_asks_besides_is_an_error_of_the_value() -> None:
    class Even(pydantic.BaseModel):
        n: int

        @pydantic.field_validator("n")
        @classmethod
        def check(cls, n: int) -> int:
            if n % 2:
                raise ValueError("odd")
            return n

    assert parse_value('{"n": 2}', Even) == Even(n=2)
    with pytest.raises(pydantic.ValidationError, match="odd"):
        parse_value('{"n": 1}', Even)


@pytest.mark.parametrize(
    ("text", "value"),
    [("", None), ("{", {}), ('{"a": 1, "b": "x', {"a": 1, "b": "x"}), ("[1, [2", [1, [2]])],
)
def test_values_while_they_are_written(text: str, value: Any) -> None:
    assert parse_partial(text) == value
