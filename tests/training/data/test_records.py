"""The shapes of records, and what is said about broken ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.training.data.records import Example, read_example

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "add"}}
EBNF = GrammarSpec.ebnf('r ::= "x"', root="r")
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def with_grammar(grammar: GrammarSpec | None) -> Example:
    return Example("a", None, grammar)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "a", "response": "b"}, Example("a", "b", None)),
        ({"prompt": "a", "completion": "b", "answer": "c"}, Example("a", "b", None)),
        ({"prompt": "a", "answer": {"ü": [1, None]}}, Example("a", '{"ü": [1, null]}', None)),
        ({"prompt": "a"}, Example("a", None, None)),
        ({"prompt": None, "text": "b"}, Example(None, "b", None)),
        ({"messages": [USER, REPLY]}, Example([USER], REPLY, None)),
        ({"prompt": [USER], "response": "Hello"}, Example([USER], REPLY, None)),
        ({"prompt": "Hi", "messages": [USER, REPLY]}, Example([USER], REPLY, None)),
        ({"messages": [USER, REPLY, USER]}, Example([USER, REPLY, USER], None, None)),
        (
            {
                "conversations": [
                    {"from": "human", "value": "Hi"},
                    {"from": "gpt", "value": "Hello"},
                ]
            },
            Example([USER], REPLY, None),
        ),
        ({"prompt": "a", "choice": ["x"]}, Example("a", None, GrammarSpec.choice(["x"]))),
        (
            {"prompt": "a", "schema": {}, "regex": None, "any_whitespace": True},
            Example("a", None, GrammarSpec.json_schema({}, any_whitespace=True)),
        ),
        ({"prompt": "a", "ebnf": 'r ::= "x"', "root": "r"}, with_grammar(EBNF)),
        ({"prompt": "a", "structural_tag": TAG}, with_grammar(GrammarSpec.structural_tag(TAG))),
        (
            {"prompt": "a", "response_format": {"type": "json_object"}},
            with_grammar(GrammarSpec.json_object()),
        ),
        ({"prompt": "a", "response_format": {"type": "text"}}, with_grammar(None)),
        ({"prompt": "a", "lark": 'start: "x"'}, with_grammar(GrammarSpec.lark('start: "x"'))),
        ({"messages": [USER], "tools": [TOOL]}, Example([USER], None, None, [TOOL])),
        ({"messages": [USER], "tools": json.dumps([TOOL])}, Example([USER], None, None, [TOOL])),
        (
            {"prompt": "a", "schema": {}, "key_order": "any", "unsupported": "rewrite"},
            with_grammar(GrammarSpec.json_schema({}, key_order="any", unsupported="rewrite")),
        ),
        ({"prompt": "a", "id": 7, "kind": "order", "tools": []}, with_grammar(None)),
    ],
)
def test_shapes(record: dict[str, Any], expected: Example) -> None:
    assert read_example(record) == expected


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "b"}, "none of prompt, messages"),
        ({"prompt": 5}, "prompt=5: must be a list of messages"),
        ({"prompt": []}, "at least one"),
        ({"text": ["a"]}, "must be a str"),
        ({"messages": "Hi"}, "must be a list of messages"),
        ({"messages": ["Hi"]}, "role and content"),
        ({"conversations": [{"from": "bot", "value": "Hi"}]}, "gpt"),
        ({"conversations": [{"from": "gpt"}]}, "value"),
        ({"prompt": "a", "schema": {}, "regex": "b"}, "at most one"),
        ({"prompt": "a", "schema": {}, "any_whitespace": 1}, "must be True or False"),
        ({"messages": [USER], "tools": {}}, "tools={}: must be a list of tools"),
        ({"messages": [USER], "tools": "{"}, "tools='{': is not JSON"),
        ({"prompt": "a", "tools": [{"type": "function"}]}, "tools=.*go with a chat"),
        (
            {"prompt": "a", "schemas": {}},
            "schemas={}: is unknown; the keys are additional_properties, answer, .* text",
        ),
        ({"conversations": [], "system": "Be kind"}, "system='Be kind': is unknown"),
        ({"prompt": "a", "regex": "b", "root": "c"}, "root='c': goes with ebnf only"),
        ({"prompt": "a", "regex": "b", "after": "x"}, "after='x': is not followed"),
        ({"prompt": "a", "ebnf": 5}, "must be a str"),
    ],
)
def test_broken_records(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_example(record)
