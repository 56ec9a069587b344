"""A schema that names no draft is of the one that it can only be of."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.errors import GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.schema.dialect import for_python, with_categories
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.schema.lowered import Lowered
from guided_spec.grammar.schema.prepare import lower_checked
from guided_spec.grammar.spec import GrammarSpec
from tests.masks.walks import BYTES, accepts, walk
from tests.tiers import examples

OLD = "http://json-schema.org/draft-04/schema#"
LISTED = "https://json-schema.org/draft/2019-09/schema"
PAIR = [{"type": "integer"}, {"type": "string"}]
ABOVE = {"type": "integer", "minimum": 3, "exclusiveMinimum": True}


def is_valid(lowered: Lowered, value: Any) -> bool:
    return jsonschema.Draft202012Validator(lowered.schema).is_valid(value)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("schema", "draft", "valid", "invalid"),
    [
        ({"type": "array", "items": PAIR}, LISTED, [[], [1], [1, "a"]], [["a"], [1, 2]]),
        (
            {"type": "array", "items": PAIR, "additionalItems": False},
            LISTED,
            [[1, "a"]],
            [[1, "a", 2], ["a", 1]],
        ),
        (ABOVE, OLD, [4], [3, 2]),
        ({"properties": {"a": ABOVE}, "required": ["a"], "type": "object"}, OLD, [{"a": 4}], [{}]),
        (
            {"type": "number", "maximum": 3, "exclusiveMaximum": False, "exclusiveMinimum": True}
            | {"minimum": 0},
            OLD,
            [3, 0.5],
            [0, 3.5],
        ),
        ({"type": "object", "definitions": {"a": ABOVE}, "properties": {"b": {}}}, OLD, [{}], [1]),
        (
            {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": ABOVE}}},
            OLD,
            [4],
            [3],
        ),
    ],
)
def test_it_is_read_as_what_it_can_only_be(
    schema: dict[str, Any], draft: str, valid: list[Any], invalid: list[Any]
) -> None:
    lowered = lower_checked(schema)
    assert [(e.keyword, e.level) for e in lowered.entries] == [("$schema", "note")]
    assert draft in lowered.entries[0].reason
    named = lower_checked({"$schema": draft, **schema})
    assert (named.schema, named.entries) == (lowered.schema, ())
    validator = jsonschema.validators.validator_for({"$schema": draft})(
        {"$schema": draft, **schema}
    )
    for value in valid:
        assert validator.is_valid(value)
        assert is_valid(lowered, value)
    for value in invalid:
        assert not is_valid(lowered, value)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("schema", "pointer"),
    [
        ({"items": PAIR, "prefixItems": 5}, "/prefixItems"),
        ({"items": PAIR, "prefixItems": PAIR}, "/items"),
        ({"items": [{"type": "strnig"}]}, "/type"),
        ({**ABOVE, "if": 5}, "/if"),
        ({"exclusiveMinimum": True}, ""),
        ({"$schema": "https://json-schema.org/draft/2020-12/schema", "items": PAIR}, "/items"),
        ({"$schema": LISTED, **ABOVE}, "/exclusiveMinimum"),
        ({"properties": {"a": ABOVE, "b": {"exclusiveMinimum": 5}}}, ""),
    ],
)
def test_what_no_draft_has_is_refused(schema: dict[str, Any], pointer: str) -> None:
    with pytest.raises(GrammarCompileError, match=f"not a JSON schema.*{pointer}"):
        lower_checked(schema)


def test_other_schemas_are_left_alone() -> None:
    for schema in (
        {"enum": [{"items": ["a"]}, 1]},
        {"prefixItems": PAIR, "items": False},
        {"exclusiveMinimum": 3, "type": "integer"},
        {"properties": {"items": {"type": "array"}, "exclusiveMinimum": {"type": "boolean"}}},
        {"properties": {"exclusiveMinimum": True}, "type": "object"},
    ):
        assert not [entry for entry in lower(schema).entries if entry.keyword == "$schema"]


def test_null_of_openapi_is_a_note() -> None:
    (entry,) = lower_checked({"properties": {"a": {"type": "string", "nullable": True}}}).entries
    assert (entry.pointer, entry.keyword, entry.level) == ("/properties/a", "nullable", "note")
    assert '"null"' in entry.fix
    assert not lower_checked({"type": ["string", "null"], "nullable": True}).entries
    assert not lower_checked({"properties": {"nullable": {"type": "boolean"}}}).entries


def test_groups_are_named_as_ecmascript_does() -> None:
    schema = {"pattern": r"^(?<year>\d{4})-(?<month>\d\d)\(?<$", "type": "string"}
    lowered = lower_checked(schema)
    assert is_valid(lowered, "2024-05(<") or is_valid(lowered, "2024-05<")
    assert not is_valid(lowered, "2024")
    named = lower_checked({"patternProperties": {"^(?<a>x)$": {"type": "null"}}, "type": "object"})
    assert is_valid(named, {"x": None})
    assert not is_valid(named, {"x": 1})
    data = {"const": {"pattern": "(?<a>x)"}}
    assert is_valid(lower_checked(data), {"pattern": "(?<a>x)"})
    with pytest.raises(GrammarCompileError, match="pattern"):
        lower_checked({"pattern": "(?<a>x"})


def test_dependencies_may_be_schemas_and_lists() -> None:
    dependencies = {"a": {"properties": {"b": {"type": "null"}}}, "c": ["d"]}
    for draft in ("http://json-schema.org/draft-07/schema#", OLD):
        schema = {"$schema": draft, "type": "object", "dependencies": dependencies}
        lowered = lower_checked(schema)
        for value in ({}, {"a": 1, "b": None}, {"c": 1, "d": 1}):
            assert is_valid(lowered, value)
        for value in ({"a": 1, "b": 1}, {"c": 1}):
            assert not is_valid(lowered, value)


ATOMS = [
    "\\p{L}",
    "\\P{L}",
    "\\p{Lu}",
    "\\p{gc=Nd}",
    "\\p{General_Category=Punctuation}",
    "\\d",
    "_",
]
ATOMS += ["\\P{Letter}", "\\p{Zs}", "\\]", "a-c", "\\\\", "\\p{S}"]
CHARACTERS = st.characters(exclude_categories=["Cs"]) | st.sampled_from(
    "aZ_\u00e9\u0663-]^\\ \u20ac"
)


def is_member(atom: str, char: str) -> bool:
    """Whether a member of a class has a character, by unicodedata."""
    if atom[:2] not in ("\\p", "\\P"):
        return re.fullmatch(f"[{atom}]", char) is not None
    name = atom[3:-1].rpartition("=")[2]
    short = {"Letter": "L", "Punctuation": "P"}.get(name, name)
    return unicodedata.category(char).startswith(short) == (atom[1] == "p")


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from(ATOMS), min_size=1, max_size=4),
    st.sampled_from(["[", "[^"]),
    st.text(CHARACTERS),
)
def test_classes_hold_the_characters_of_their_members(
    atoms: list[str], opening: str, text: str
) -> None:
    written = with_categories(f"{opening}{''.join(atoms)}]")
    for char in text:
        wanted = any(is_member(atom, char) for atom in atoms) == (opening == "[")
        assert (re.fullmatch(written, char) is not None) == wanted, (atoms, char)
    for atom in (one for one in atoms if one[:2] in ("\\p", "\\P")):
        alone = re.compile(with_categories(f"(?:{atom})+"))
        assert (alone.fullmatch(text) is not None) == (
            text != "" and all(is_member(atom, char) for char in text)
        )


@pytest.mark.every_case
@pytest.mark.parametrize("backend", ["auto", "xgrammar", "llguidance"])
@pytest.mark.parametrize(
    ("pattern", "valid", "invalid"),
    [
        ("^[\\p{L}\\d_-]+$", ["a\u00e9\u4e2d_-7", "\u03a3"], ["", "a b", "a.", "\u20ac"]),
        (
            "^\\p{Lu}\\p{Ll}*(?: \\p{Lu}\\p{Ll}*)?$",
            ["\u00c9mile Zola", "A"],
            ["\u00e9mile", "ZolA"],
        ),
        ("^\\P{N}{1,3}$", ["ab", "\u00e9\u00e9"], ["a1", "\u00b2", "abcd", ""]),
        ("^.*\\p{Sc}$", ["5 \u20ac", "$"], ["5", ""]),
        ("^[^\\p{C}\\p{Z}]+$", ["a\u00e9!"], ["a b", "a\u00a0b", "a\u200b"]),
        ("^\\\\p{1}$", ["\\\\p"[1:]], ["p", "\\\\pp"]),
        ("^(?!\\p{Nd})[\\p{L}\\p{Nd}]+$", ["a1"], ["1a", "\u0663a"]),
    ],
)
def test_general_categories_in_patterns(
    backend: str, pattern: str, valid: list[str], invalid: list[str]
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}}
    schema |= {"required": ["a"]}
    grammar = BackendChoice(backend, BYTES).compile(GrammarSpec.json_schema(schema))

    def admits(text: str) -> bool:
        return accepts(grammar, json.dumps({"a": text}, ensure_ascii=False))

    assert [text for text in valid if not admits(text)] == []
    assert [text for text in invalid if admits(text)] == []
    written = walk(grammar, 0)
    if written.finished:
        text = json.loads(written.text)["a"]
        assert re.search(with_categories(pattern), text)


def test_keys_by_their_category() -> None:
    schema: dict[str, Any] = {"patternProperties": {"^\\p{Lu}+$": {"type": "integer"}}}
    schema |= {"type": "object"} | {"additionalProperties": False}
    grammar = BackendChoice("auto", BYTES).compile(GrammarSpec.json_schema(schema))
    assert accepts(grammar, '{"\u00c9A": 1}')
    assert not accepts(grammar, '{"\u00e9": 1}')


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("\\p{Script=Greek}", "Script=Greek"),
        ("[a\\p{Alphabetic}]", "Alphabetic"),
        ("\\P{letter}", "letter"),
        ("\\p{gc=ASCII}", "gc=ASCII"),
        ("\\P{Any}", "no character"),
        ("[_-\\p{L}]", "cannot end a range"),
    ],
)
def test_other_properties_are_refused_by_name(pattern: str, name: str) -> None:
    with pytest.raises(UnsupportedSchemaError, match=re.escape(name)):
        lower_checked({"type": "string", "pattern": pattern})


VAST = (2**31, 2**53, 2**64, 1e30)


@pytest.mark.parametrize("most", VAST)
@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "string", "maxLength": 0}, "a"),
        ({"type": "string", "pattern": "^[a-z]+$", "maxLength": 0}, "ab"),
        ({"type": "string", "format": "date", "maxLength": 0}, "2024-01-01"),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, [None]),
        ({"additionalProperties": {"type": "null"}, "maxProperties": 0}, {"a": None}),
        ({"propertyNames": {"maxLength": 0}, "additionalProperties": {"const": 1}}, {"a": 1}),
        ({"type": "array", "contains": {"const": 1}, "items": {"type": "integer"}}, [2, 1]),
        ({"properties": {"maxLength": {"type": "string", "maxLength": 0}}}, {"maxLength": "a"}),
    ],
)
def test_a_vast_most_is_none(schema: dict[str, Any], value: Any, most: float, backend: str) -> None:
    written = json.loads(json.dumps(schema).replace('": 0', f'": {most!r}'))
    if "contains" in schema:
        written["maxContains"] = most
    if backend == "xgrammar" and schema.keys() & {"pattern", "format", "propertyNames"}:
        backend = "auto"  # which of both takes it is not what is tried
    compiled = BackendChoice(backend, BYTES).compile(GrammarSpec.json_schema(written))
    assert accepts(compiled, json.dumps(value))


@pytest.mark.parametrize("name", ["minLength", "minItems", "minProperties"])
@pytest.mark.parametrize("inside", [False, True])
def test_a_vast_least_is_refused_by_name(name: str, *, inside: bool) -> None:
    schema: dict[str, Any] = {name: 2**53}
    schema = {"type": "object", "propertyNames": schema} if inside else schema
    with pytest.raises(UnsupportedSchemaError, match=f"{name}=9007199254740992: no text"):
        BackendChoice("auto", BYTES).compile(GrammarSpec.json_schema(schema))


def test_keys_that_are_named_like_keywords_are_schemas() -> None:
    """Beside a schema that is rewritten for Python."""
    group = {"type": "string", "pattern": "^(?<y>a)$"}
    listed = {"type": "array", "items": {"type": "string"}, "minItems": 1, "required": ["x"]}
    names = {"default": group, "const": group, "enum": group, "dependencies": listed}
    schema = {"type": "object", "properties": names, "required": ["default"]}
    python = {**group, "pattern": "^(?P<y>a)$"}
    assert for_python(schema)["properties"] == {
        **dict.fromkeys(("default", "const", "enum"), python),
        "dependencies": listed,
    }
    listing = {"enum": [{"maxLength": 2**60}], "maxLength": 2**60}
    assert for_python(listing) == {**listing, "maxLength": 2**31 - 2}
