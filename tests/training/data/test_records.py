"""The shapes of records, and what is said about broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.training.data.records import Example, read_example, read_lines

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}
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
        ({"messages": [USER], "tools": [{}]}, "tools=.*system message"),
        (
            {"prompt": "a", "schemas": {}},
            "schemas={}: is unknown; the keys are additional_properties, answer, .* text",
        ),
        ({"conversations": [], "system": "Be kind"}, "system='Be kind': is unknown"),
        ({"prompt": "a", "regex": "b", "root": "c"}, "root='c': goes with ebnf only"),
        ({"prompt": "a", "regex": "b", "after": "x"}, "after='x': is not followed"),
        ({"prompt": "a", "lark": "b"}, "lark='b': .*write it as ebnf"),
        ({"prompt": "a", "ebnf": 5}, "must be a str"),
    ],
)
def test_broken_records(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_example(record)


def test_lines_of_several_files(tmp_path: Path) -> None:
    # The second separator ends no line of JSON Lines, though str.splitlines thinks so.
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": "\u2028"}\n', encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('{"a": {"b": 3}}', encoding="utf-8")
    lines = list(read_lines([tmp_path / "a.jsonl", str(tmp_path / "b.jsonl")]))
    assert [line.place for line in lines] == ["a.jsonl:1", "a.jsonl:3", "b.jsonl:1"]
    assert [line.record["a"] for line in lines] == [1, "\u2028", {"b": 3}]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1}\n{', "a.jsonl:2': is not JSON"),
        (b"[]", "a.jsonl:1': must be a JSON object"),
        (b"\xff", "cannot be read"),
    ],
)
def test_broken_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        list(read_lines([path]))
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_lines([tmp_path / "absent.jsonl"]))
