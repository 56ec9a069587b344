"""Arguments that are written one by one: strings bare, as the families' templates write them."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import jsonschema
import pytest

from guided_spec.grammar.tools.arguments import ArgumentForm
from guided_spec.grammar.tools.format import ToolRules, read_tools
from guided_spec.grammar.tools.formats import TOOL_FORMATS
from tests.chat_templates import TEMPLATES
from tests.grammar.tools.test_tool_formats import (
    XML,
    block,
    delimited,
    light,
    side,
    spell,
    takes,
    walk,
    whole,
)

NULL = {"type": "null"}
COLOR = {"enum": ["red", "dark green"], "type": "string", "title": "Color"}
SHARED = {"Color": COLOR, "Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
# A schema, values that it has, and texts between the marks that are none of its.
SCHEMAS: dict[str, tuple[Any, list[Any], list[str]]] = {
    "str | None": ({"anyOf": [{"type": "string"}, NULL], "default": None}, ["a", "5", None], []),
    "string, null": ({"type": ["string", "null"]}, ['say "x"\n', None], []),
    "null, short": ({"type": ["null", "string"], "maxLength": 3}, ["abc", "", None], ["abcd"]),
    "Literal | None": ({"anyOf": [{"enum": ["a b", "c"]}, NULL]}, ["a b", None], ["d", '"c"']),
    "constants": ({"anyOf": [{"const": "on"}, {"const": "off"}]}, ["on", "off"], ['"on"', "o"]),
    "enum with null": ({"enum": ["a", None, 3]}, ["a", None, 3], ["b", "4"]),
    "Enum | None": ({"anyOf": [{"$ref": "#/$defs/Color"}, NULL]}, ["dark green", None], ["blue"]),
    "a reference": ({"$ref": "#/$defs/Name", "description": "x"}, ["Maria", "null"], []),
    "str | int": ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, ["a", 5, "5.5"], []),
    "short | int": ({"type": ["string", "integer"], "maxLength": 2}, ["ab", 123], ["abc"]),
    "str | list": (
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        ["a", ["b", "</p>"], "[b]"],
        [],
    ),
    "nested": ({"anyOf": [{"anyOf": [{"const": "x"}, NULL]}, COLOR]}, ["x", "red", None], ["y"]),
    "typed enum": ({"type": "string", "enum": ["a", 5]}, ["a"], ["5"]),
    "only others": ({"anyOf": [{"type": "integer"}, NULL]}, [7, None], ['"7"', "a"]),
    "a loop": ({"anyOf": [{"$ref": "#/$defs/Loop"}, {"const": "x"}]}, ["x"], []),
}


def tool(schema: Any, *, is_required: bool = True) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"on": schema}, "$defs": SHARED}
    return light("light", {**parameters, "required": ["on"] if is_required else []})


def rendered(name: str, value: Any) -> str:
    """A call as the family's template writes it."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.filters["tojson"] = json.dumps
    call = {"function": {"name": "light", "arguments": {"on": value}}}
    messages = [{"role": "assistant", "content": "@", "tool_calls": [call]}]
    text = environment.from_string(TEMPLATES[name]).render(messages=messages, tools=[])
    start = text.index("@") + 1
    ends = [text.find(mark, start) for mark in ("<|im_end|>", "<｜end", "<|end_of_msg|>")]
    stop = next((end for end in ends if end >= 0), len(text))
    return text[start:stop].strip()


@pytest.mark.every_case
@pytest.mark.parametrize("case", SCHEMAS)
@pytest.mark.parametrize("name", XML)
def test_a_value_is_written_as_the_template_writes_it(name: str, case: str) -> None:
    schema, values, _ = SCHEMAS[case]
    if case == "a loop":
        schema = {"anyOf": schema["anyOf"][1:]}
    for kind in ("bytes", "tokens"):
        found = side(name, kind, [tool(schema)], "required")
        for value in values:
            token_ids = whole(name, rendered(name, value), kind)
            assert takes(found, token_ids), rendered(name, value)
            (call,) = found.read(token_ids).calls
            assert call.arguments == {"on": value}


@pytest.mark.parametrize("case", [case for case in SCHEMAS if SCHEMAS[case][2]])
@pytest.mark.parametrize("name", XML)
def test_what_is_no_value_is_not_written(name: str, case: str) -> None:
    schema, _, wrong = SCHEMAS[case]
    found = side(name, "tokens", [tool(schema)], "required")
    for text in wrong:
        for marked in {rendered(name, "@@"), rendered(name, 12345)}:
            shown = marked.replace("@@", text).replace("12345", text)
            assert not takes(found, whole(name, shown)), shown


@pytest.mark.parametrize("kind", ["bytes", "tokens", "some"])
@pytest.mark.parametrize("case", [case for case in SCHEMAS if case != "a loop"])
@pytest.mark.parametrize("name", XML)
def test_whatever_is_written_is_valid(name: str, case: str, kind: str) -> None:
    schema = SCHEMAS[case][0]
    for is_required in (True, False):
        found = side(name, kind, [tool(schema, is_required=is_required)], "required")
        for seed in range(4):
            token_ids = walk(found, kind, seed, 20 + 20 * seed)
            for call in found.read(token_ids).calls:
                jsonschema.validate(call.arguments, dict(found.tools[0].parameters))


def test_deepseek_says_which_are_strings() -> None:
    either: Any = {"anyOf": [{"type": "string"}, {"type": "integer"}]}
    found = side("deepseek_v4", "tokens", [tool(either)], "required")
    for value in ("5", 5):
        token_ids = whole("deepseek_v4", rendered("deepseek_v4", value))
        assert takes(found, token_ids)
        assert found.read(token_ids).calls[0].arguments == {"on": value}
    swapped = rendered("deepseek_v4", "a").replace('string="true"', 'string="false"')
    assert not takes(found, whole("deepseek_v4", swapped))


@pytest.mark.parametrize(
    ("name", "none"),
    [("deepseek_v3_2", "\n"), ("deepseek_v4", ""), ("kimi_k3", ""), ("qwen3_coder", "")],
)
def test_no_arguments_where_all_are_optional(name: str, none: str) -> None:
    found = side(name, "bytes", [tool({"type": "string"}, is_required=False)], "required")
    call = delimited(name).call.replace("{name}", "light").replace("{arguments}", none)
    token_ids = spell(block(name, call), "bytes")
    assert takes(found, token_ids)
    assert found.read(token_ids).calls[0].arguments == {}


@pytest.mark.parametrize("name", ["kimi_k3", "qwen3_coder"])
@pytest.mark.parametrize("is_loop", [True, False])
def test_alternatives_that_double_are_not_followed_to_their_end(name: str, is_loop: Any) -> None:
    """A schema of some hundred bytes refers to parts without number."""
    depth = 1 if is_loop else 40
    names = [f"p{at}" for at in range(depth + 1)]
    following = [names[0], names[0]] if is_loop else names[1:]
    shared: dict[str, Any] = {
        name: {"anyOf": [{"$ref": f"#/$defs/{after}"}] * 2}
        for name, after in zip(names, following, strict=False)
    }
    shared[names[-1]] = {"type": ["string", "integer"]}
    parameters = {"type": "object", "properties": {"x": {"$ref": "#/$defs/p0"}}, "$defs": shared}
    (read,) = read_tools([light("light", parameters)])
    assert TOOL_FORMATS[name].content(ToolRules([read]))  # in full it takes hours


def test_a_key_may_hold_anything() -> None:
    form = ArgumentForm('<p name="{key}" s="{string}">{value}</p>')
    around = form.around("a{value}{key}{string}", "true")
    assert around == ('<p name="a{value}{key}{string}" s="true">', "</p>")
