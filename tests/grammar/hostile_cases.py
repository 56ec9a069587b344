"""Grammars that an enemy would send: each ends in an error of ours or in a text that it allows."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from guided_spec.grammar.spec import GrammarSpec
from tests.grammar.test_limits import HOSTILE, nested, raw_schema


def _tag(content: Any) -> GrammarSpec:
    return GrammarSpec.structural_tag({"type": "structural_tag", "format": content})


def _overlapping(count: int) -> dict[str, Any]:
    """Branches of which each has to exclude all the others."""
    branches = [{"properties": {f"k{i}": {"minLength": i}}} for i in range(count)]
    return {"type": "object", "oneOf": branches}


def _chain(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for level in range(levels):
        schema = {"if": {"minimum": level}, "then": schema, "else": {"type": "string"}}
    return schema


def _doubling(levels: int) -> str:
    """A text of two to the ``levels`` characters in as many lines."""
    rules = [f"a{i} ::= a{i + 1} a{i + 1}" for i in range(levels)]
    return "\n".join(["root ::= a0", *rules, f'a{levels} ::= "x"'])


_REGEXES = {
    "counts in counts": "((a{1,20}){1,20}){1,20}",
    "optional chain": "a?" * 100 + "a" * 100,
    "stars of stars": "((a*)*)*b",
    "many dots": ".*.*.*.*.*x",
    "many words": "|".join(f"word{i}" for i in range(2_000)),
    "lookahead": "(?=a)b",
    "backreference": r"(a+)\1",
    "possessive": "a*+b",
    "no character": r"[^\s\S]",
    "nothing left": "a^b",
    "empty": "",
    "empty star": "(?:a{0})*",
    "anchors only": "^$",
    "beyond the plane": "[\U00010000-\U0010ffff]{2}",
    "writing to the left": "\u202e\u200b+",
    "end of text": re.escape("<eos>"),
    "nested set": "[[:alpha:]]+",
    "a megabyte of letters": "a" * 2**20 + "b",
}
_SCHEMAS: dict[str, Any] = {
    "const end of text": {"const": "<eos>"},
    "enum think": {"enum": ["<think>", "</think><eos>"]},
    "only the empty string": {"const": ""},
    "no length": {"type": "string", "maxLength": 0},
    "pattern of nothing": {"type": "string", "pattern": "^$"},
    "pattern bomb": {"type": "string", "pattern": "^(a+)+$"},
    "not anything": {"not": {}},
    "more than at most": {"type": "array", "minItems": 3, "maxItems": 1},
    "required and forbidden": {"properties": {"a": False}, "required": ["a"], "type": "object"},
    "endless object": {"properties": {"a": {"$ref": "#"}}, "required": ["a"], "type": "object"},
    "missing anchor": {"$ref": "#missing"},
    "into a constant": {"$ref": "#/const", "const": {"$ref": "#/const"}},
    "its own id": {"$id": "http://localhost:1/a", "$ref": "http://localhost:1/a"},
    "dynamic": {"$dynamicRef": "#a", "$dynamicAnchor": "a"},
    "a million items": {"type": "array", "minItems": 10**6, "items": {"type": "null"}},
    "longer than any context": {"type": "string", "minLength": 5_000},
    "a tiny step": {"type": "number", "multipleOf": 1e-300},
    "a bound of 400 digits": {"type": "integer", "minimum": 10**400},
    "a key of 10 KB": {"type": "object", "properties": {"k" * 10_000: {}}, "required": []},
    "a key of controls": {"type": "object", "required": ["\x01\x1f\x7f\u2028"]},
    "300 required keys": {"type": "object", "required": [f"k{i}" for i in range(300)]},
    "unique strings": {"type": "array", "uniqueItems": True, "items": {"type": "string"}},
    "overlapping branches": _overlapping(30),
    "chain of conditions": _chain(30),
    "50 arrays": nested(50),
    "broken pattern": {"type": "string", "pattern": "("},
    "format and pattern": {"type": "string", "format": "date", "pattern": "^a$"},
}
_JSON_TEXTS = {
    "byte order mark": "\ufeff{}",
    "trailing text": "{} x",
    "not a number": '{"const": NaN}',
    "a list": "[]",
    "null": "null",
    "empty JSON": "",
    "a type of its own": '{"type": "whatever"}',
}
_EBNF = {
    "ebnf empty": 'root ::= ""',
    "ebnf nothing": "",
    "ebnf no root": 'a ::= "a"',
    "ebnf twice": 'root ::= "a"\nroot ::= "b"',
    "ebnf undefined": "root ::= a",
    "ebnf to the left": 'root ::= root "a" | "a"',
    "ebnf doubling": _doubling(30),
    "ebnf NUL": 'root ::= "a\0b"',
    "ebnf backwards": "root ::= [z-a]",
    "ebnf surrogate": 'root ::= "\ud800"',
}
_LARK = {
    "lark empty": 'start: ""',
    "lark nothing": "",
    "lark to the left": 'start: start "a" | "a"',
    "lark token": "start: <eos>",
    "lark import": "start: A\n%import common.A",
    "lark bomb": 'start: (("a"~1..99)~1..99)~1..99',
    "lark surrogate": 'start: "\ud800"',
}
_TAGS: dict[str, Any] = {
    "tag of nothing": {},
    "tag of another kind": {"type": "whatever"},
    "tag with end of text": {"type": "const_string", "value": "a<eos>"},
    "tag without begin": {"type": "triggered_tags", "triggers": ["<think>"], "tags": [{}]},
    "tag with a broken schema": {"type": "json_schema", "json_schema": {"type": 5}},
    "tag with an empty string": {"type": "const_string", "value": ""},
    "tag that excludes nothing": {"type": "any_text", "excludes": [""]},
}

CASES: dict[str, GrammarSpec] = {
    **HOSTILE,
    **{name: GrammarSpec.regex(text) for name, text in _REGEXES.items()},
    **{name: GrammarSpec.json_schema(schema) for name, schema in _SCHEMAS.items()},
    **{name: raw_schema(text) for name, text in _JSON_TEXTS.items()},
    **{name: GrammarSpec.ebnf(text) for name, text in _EBNF.items()},
    **{name: GrammarSpec.lark(text) for name, text in _LARK.items()},
    **{name: _tag(content) for name, content in _TAGS.items()},
    "choice of NUL": GrammarSpec.choice(["\0"]),
    "choice of a surrogate": GrammarSpec.choice(["\ud800", "a"]),
    "choice of special tokens": GrammarSpec.choice(["<eos>", "<think>"]),
    "choice longer than any context": GrammarSpec.choice(["a" * 3_000]),
    "choice of 600": GrammarSpec.choice([f"option {i}" for i in range(600)]),
    "behind a marker of nothing known": GrammarSpec.regex("a").after("\0"),
}
"""By name."""

NOT_GRAMMARS: dict[str, Callable[[], object]] = {
    "no options": lambda: GrammarSpec.choice([]),
    "an empty option": lambda: GrammarSpec.choice(["a", ""]),
    "a number as a schema": lambda: GrammarSpec.json_schema(3),
    "NaN in a schema": lambda: GrammarSpec.json_schema({"const": float("nan")}),
    "a set in a schema": lambda: GrammarSpec.json_schema({"enum": {1, 2}}),
    "a regex of bytes": lambda: GrammarSpec.regex(b"a"),  # type: ignore[arg-type]
    "a tag of numbers": lambda: GrammarSpec.structural_tag(5),
    "no response format": lambda: GrammarSpec.from_response_format({"type": "xml"}),
    "no tools": lambda: GrammarSpec.tools(None),  # type: ignore[arg-type]
    "a tool of nothing": lambda: GrammarSpec.tools([{}]),
    "a choice of no tool": lambda: GrammarSpec.tools([], "required"),
}
"""What is not even a spec: a ConfigError where it is written."""
