"""What is fuzzed: ways from a text to a grammar, and the pieces that such texts are made of."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from guided_spec.grammar.spec import GrammarSpec


class Target(NamedTuple):
    """One kind of input.

    make: the spec of a text; None where the text asks for no constraint. It may raise a
        GuidedSpecError, and nothing else.
    fragments: what such texts are made of. seeds: whole ones.
    """

    make: Callable[[str], GrammarSpec | None]
    fragments: tuple[str, ...]
    seeds: tuple[str, ...]


_CHARACTERS = (*"ab01 -^$.|()[]{}*+?\\,:=!<>#\"'\n\t/@%&", "é", "😀", "\ud800", "\0", "\u2028")

_REGEX = (
    *("(?:", "(?=", "(?!", "(?<=", "(?<!", "(?i)", "(?a)", "(?x)", "(?s:", "(?-i:", "(?P<n>"),
    *("(?P=n)", "(?>", "(?#", "(?(1)a|b)", "(?(n)", r"\d", r"\W", r"\s", r"\b", r"\1", r"\A"),
    *(r"\Z", r"\x41", r"\u00e9", r"\U0001f600", r"\N{DIGIT ONE}", r"\p{L}", r"\0", r"\777"),
    *("{1,3}", "{,5}", "{2,}", "{300}", "{0}", "{9999999999}", "*?", "*+", "++", "[^", "[]"),
    *("[a-z]", "[z-a]", r"[\d-x]", r"[^\s\S]", "[[:alpha:]]", "[a&&b]", "(|)", "()*", "(a*)*"),
)

_EBNF = (
    *("root", " ::= ", "::=", '"a"', "'a'", "[a-z]", "[^", '""', "\n", 'root ::= "a"\n', "b ::= "),
    *("(=", "{2,3}", "{,2}", "{99999}", r"\x4", r"\u{41}", r"\u00e9", r"\xff", "...", "# a\n"),
    *("TagDispatch(", "TokenTagDispatch(", "Regex(", "Substring(", "Token(", "ExcludeToken("),
    *("stop_eos=true", "loop_after_dispatch=", "excludes=", '("a", b)', "json_string=true", ", "),
    *("root root", "root_above", "[\\]", "[]-a]", "[a-", "/* a", "a.b", "a-b", "=", ";"),
)

_LARK = (
    *("start", ": ", "start: ", '"a"', "/a+/", "/", "A: ", "A", "a: ", "\n", " | ", "(", ")*", "?"),
    *("%json {}", "%json ", "%regex ", "%lark ", "%import common.INT", "%ignore /x/", "%declare A"),
    *('%llguidance {"no_forcing": true}', "<[0]>", "<eos>", "<a>", "@a", "[max_tokens=3]", '"a"i'),
    *("~ 2..3", "~2", "{2,3}", "->", "!", ".1", "// a\n", "/(?i:a)/", "/[^a]/s", '"a".."z"', "&"),
    *("%override", "%extend", "[stop=", "[capture]", "[suffix=", "[lazy]", "_a: ", "\\u0041", "~"),
)

_KEYWORDS = (
    *("type", "enum", "const", "properties", "required", "items", "prefixItems", "anyOf", "oneOf"),
    *("allOf", "not", "if", "then", "else", "$ref", "$defs", "definitions", "$id", "$anchor"),
    *("$schema", "$dynamicRef", "$dynamicAnchor", "pattern", "format", "minimum", "maximum"),
    *("exclusiveMinimum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems"),
    *("uniqueItems", "contains", "minContains", "additionalProperties", "patternProperties"),
    *("propertyNames", "minProperties", "maxProperties", "dependentRequired", "dependentSchemas"),
    *("unevaluatedProperties", "unevaluatedItems", "dependencies", "$recursiveRef", "id"),
)
_JSON = (
    *('{"', '": ', '": {', '": [', '", "', "}", "]", ", ", "null", "true", "false", "0", "-1"),
    *("1.5", "1e999", "-0", "9" * 30, '""', '"a"', r'"\ud800"', r'"\u0000"', '"#"', "NaN", "1e-9"),
    *('"object"', '"array"', '"string"', '"integer"', '"#/$defs/a"', '"^a+$"', '"date"', "[[[["),
    *('"http://localhost:1/a"', '"#/properties/a"', '"(a"', '{"a": ', "Infinity", "\ufeff", "{}"),
)

_TAG = (
    *('"type": "', "structural_tag", "format", "tag", "begin", "end", "content", "triggered_tags"),
    *("triggers", "tags", "any_text", "excludes", "const_string", "value", "sequence", "elements"),
    *("or", "regex", "grammar", "json_schema", "qwen_xml_parameter", "at_least_one", "optional"),
    *("stop_after_first", "token", "token_dispatch", "rules", "dispatch", "separator", "repeat"),
    *("tags_with_separator", "exclude_tokens", "any_tokens", "plus", "star", "style", "any_order"),
    *("max_whitespace_cnt", "min", "max", "loop", "trigger_tokens", "structures", "schema"),
    *("<tool_call>", "</tool_call>", "<other>", "[HIDDEN]", "</s>", "a<other>b", "any", "once"),
)

_TOOLS = (
    *("type", "function", "name", "parameters", "description", "strict", "tool_choice", "tools"),
    *("auto", "required", "none", "tool_format", "parallel_tool_calls", "llama3", "hermes"),
)

_FORMATS = (
    "type",
    "json_schema",
    "schema",
    "regex_schema",
    "text",
    "json_object",
    "structural_tag",
)


def _tools(text: str) -> GrammarSpec | None:
    """``{"tools": [...], "tool_choice": ..., ...}``, or the list alone."""
    value: Any = _json(text)
    if not isinstance(value, dict):
        return GrammarSpec.tools(value)
    names = ("tool_choice", "tool_format", "parallel_tool_calls")
    options: dict[str, Any] = {name: value[name] for name in names if name in value}
    return GrammarSpec.tools(value.get("tools", []), **options)


def _response_format(text: str) -> GrammarSpec | None:
    return GrammarSpec.from_response_format(_json(text))


def _json(text: str) -> Any:
    """What a server would have parsed; broken JSON never gets as far as the library."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _quoted(*names: str) -> tuple[str, ...]:
    return tuple(f'"{name}": ' for name in names)


_FUNCTION = '{"type": "function", "function": {"name": "f", "parameters": %s}}'
_ARGUMENTS = '{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'
_SCHEMAS = (
    _ARGUMENTS,
    '{"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}',
    '{"oneOf": [{"type": "integer", "minimum": 3}, {"enum": ["a", null, 2.5]}]}',
    '{"type": "string", "pattern": "^[a-z]{1,5}$", "format": "date"}',
    '{"not": {"type": "object"}, "if": {"minimum": 1}, "then": {"multipleOf": 2}}',
    '{"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": false}',
)
_CONTENTS: tuple[str, ...] = (
    f'{{"type": "json_schema", "json_schema": {_ARGUMENTS}}}',
    '{"type": "regex", "pattern": "[ab]+"}',
    '{"type": "any_text", "excludes": ["</f>"]}',
    '{"type": "grammar", "grammar": "root ::= \\"a\\""}',
    '{"type": "or", "elements": [{"type": "const_string", "value": "a"}, {"type": "any_text"}]}',
    '{"type": "triggered_tags", "triggers": ["<f"], "tags": [{"begin": "<f>", '
    '"content": {"type": "any_text"}, "end": "</f>"}], "stop_after_first": true}',
)
_CONTENTS += tuple(content.replace("<f", "<tool_call>") for content in _CONTENTS[-1:])
_TAGS = tuple(f'{{"type": "structural_tag", "format": {content}}}' for content in _CONTENTS)

TARGETS: dict[str, Target] = {
    "regex": Target(
        GrammarSpec.regex,
        (*_CHARACTERS, *_REGEX),
        (r"\d{4}-\d\d", "(?:a|b)*c", r"^[^\s,]{1,9}(?:,[a-z]+)?$", "(?P<n>é|😀)+", "[]^-]"),
    ),
    "ebnf": Target(
        GrammarSpec.ebnf,
        (*_CHARACTERS, *_EBNF),
        (
            'root ::= "a" root | b\nb ::= [0-9]+ ("," b)?\n',
            'root ::= (=("a")) "a"{2,3} # c\n',
            'root ::= TagDispatch(("<a>", b), stop_eos=true)\nb ::= "x"',
            "root ::= [^\\x00-\\x1f\\u{10ffff}]*",
        ),
    ),
    "lark": Target(
        GrammarSpec.lark,
        (*_CHARACTERS, *_LARK),
        (
            'start: A | "b" start\nA: /[a-z]+/\n',
            'start: %json {"type": "integer"} | "x"~2..3',
            'start: a* "."\na: /\\d/ -> b\n%ignore / /\n',
        ),
    ),
    "schema": Target(
        GrammarSpec.json_schema,
        (*_JSON, *_quoted(*_KEYWORDS)),
        _SCHEMAS,
    ),
    "tag": Target(
        GrammarSpec.structural_tag,
        (*_JSON, *_quoted(*_TAG), *(f'"{word}"' for word in _TAG)),
        _TAGS,
    ),
    "tools": Target(
        _tools,
        (*_JSON, *_quoted(*_TOOLS), *(f'"{word}"' for word in _TOOLS)),
        (
            f'{{"tools": [{_FUNCTION % _ARGUMENTS}], "tool_choice": "required"}}',
            f'{{"tools": [{_FUNCTION % "{}"}], "tool_format": "llama3"}}',
            f'{{"tools": [{_FUNCTION % "{}"}], "parallel_tool_calls": false}}',
            f"[{_FUNCTION % _SCHEMAS[2]}]",
        ),
    ),
    "response_format": Target(
        _response_format,
        (*_JSON, *_quoted(*_FORMATS), *(f'"{word}"' for word in _FORMATS)),
        (
            f'{{"type": "json_schema", "json_schema": {{"schema": {_ARGUMENTS}}}}}',
            '{"type": "regex_schema", "regex_schema": "a+"}',
            '{"type": "json_object"}',
            _TAGS[0],
        ),
    ),
}
"""By name."""
