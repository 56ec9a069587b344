"""Tool lists: what may be called, with arguments that always match, and by which tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.errors import (
    ConfigError,
    GrammarCompileError,
    GrammarError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tools.formats import TOOL_FORMATS
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.bitmask import unpack_bitmask
from tests.masks.walks import BYTES, accepts, walk
from tests.tiers import examples
from tests.toys import CPU

EOS, CALL, END, OTHER, HIDDEN, THINK, THOUGHT = range(256, 263)
NAMES = ("</s>", "<tool_call>", "</tool_call>", "<other>", "[HIDDEN]", "<think>", "</think>")
DATA = (*BYTES.token_bytes[:256], *[b""] * len(NAMES))
SHOWN = (*DATA[:CALL], *(name.encode() for name in NAMES[1:4]), b"", *DATA[:2])
SPECIAL = Vocabulary(
    DATA, (EOS,), len(DATA), SHOWN, tuple((n, EOS + i) for i, n in enumerate(NAMES))
)
BACKENDS = {
    "bytes": XGrammarBackend(BYTES, compile_threads=1),
    "special": XGrammarBackend(SPECIAL, compile_threads=1),
}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 4},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
ON = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "light": {**ON, "additionalProperties": False}}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": False}}
    for name, schema in SCHEMAS.items()
]
NAMED = {"type": "function", "function": {"name": "light"}}
LIGHT = '<tool_call>\n{"name": "light", "arguments": {"on": true}}\n</tool_call>'
WRONG = LIGHT.replace("true", '"yes"')
RAIN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 3}}\n</tool_call>'


def ids(text: str, kind: str) -> list[int]:
    """One token a byte, and added tokens where there are any."""
    if kind == "bytes":
        return list(text.encode())
    found: list[int] = []
    while text:
        name = next((name for name in NAMES if text.startswith(name)), "")
        found += [EOS + NAMES.index(name)] if name else [*text[0].encode()]
        text = text[len(name) or 1 :]
    return found


def takes(compiled: CompiledGrammar, token_ids: Sequence[int]) -> bool:
    matcher = compiled.new_matcher()
    for token_id in [*token_ids, EOS]:
        if token_id in compiled.excluded or token_id not in row(matcher):
            return False
        assert matcher.accept_token(token_id)
    return matcher.is_terminated()


def row(matcher: GrammarMatcher) -> set[int]:
    bitmask = np.zeros((1, 9), dtype=np.int32)
    matcher.fill_next_token_bitmask(bitmask)
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[: len(DATA)]).tolist())


TEXTS = ("", "hi", LIGHT, RAIN, f"so {LIGHT} and", LIGHT + "\n" + RAIN, WRONG, "<tool_call>x")
TEXTS_AFTER = (f"{LIGHT} and", f"{LIGHT}\n")
EXPECTED: list[tuple[Any, bool, str]] = [
    ("auto", True, "111111..11"),
    ("auto", False, "1111......"),
    ("required", True, "..11.1...."),
    ("required", False, "..11......"),
    ("none", True, "11........"),
    (NAMED, True, "..1......."),
]


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(("choice", "parallel", "expected"), EXPECTED)
def test_choices(choice: Any, parallel: Any, expected: str, kind: str) -> None:
    spec = GrammarSpec.tools(TOOLS, choice, parallel_tool_calls=parallel)
    compiled = BACKENDS[kind].compile(spec)
    found = "".join(".1"[takes(compiled, ids(text, kind))] for text in (*TEXTS, *TEXTS_AFTER))
    assert found == expected


@settings(max_examples=examples(25))
@given(
    st.integers(0, 10**6),
    st.sampled_from(["required", NAMED]),
    st.sampled_from(["bytes", "special"]),
)
def test_arguments_always_match(seed: int, choice: Any, kind: str) -> None:
    """Random walks over the masks; with special tokens these stand where the tag says only."""
    compiled = BACKENDS[kind].compile(GrammarSpec.tools(TOOLS, choice, parallel_tool_calls=False))
    matcher, dice = compiled.new_matcher(), random.Random(seed)
    token_ids: list[int] = []
    while not matcher.is_terminated():
        options = row(matcher) & {*range(compiled_size(kind))}
        if kind == "special":
            assert options <= {*range(EOS + 1), CALL, END}
            assert not {CALL, END} & options or len(options) == 1
        closing = sorted(options & {*b'"}', EOS, CALL, END}) or sorted(options - {*b" \n\t\r"})
        is_hasty = closing and dice.random() < 0.6
        token_ids.append(dice.choice(closing if is_hasty else sorted(options)))
        assert matcher.accept_token(token_ids[-1])
        assert len(token_ids) < 2000
    vocabulary = BACKENDS[kind].vocabulary
    text = b"".join(vocabulary.text_bytes[t] for t in token_ids).decode(errors="replace")
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    jsonschema.validate(call["arguments"], SCHEMAS[call["name"]])


def test_special_tokens_stand_where_the_tag_says() -> None:
    compiled = BACKENDS["special"].compile(GrammarSpec.tools(TOOLS))
    assert compiled.excluded == {OTHER, HIDDEN, THINK, THOUGHT}
    matcher = compiled.new_matcher()
    assert row(matcher) == {*range(EOS + 1), CALL}
    assert all(map(matcher.accept_token, ids("so ", "special")))
    assert matcher.accept_token(CALL)
    assert row(matcher) == {*b"\n"}
    assert all(map(matcher.accept_token, ids(RAIN, "special")[1:-1]))
    assert row(matcher) == {END}
    none = BACKENDS["special"].compile(GrammarSpec.tools(TOOLS, "none"))
    assert none.excluded == {*range(CALL, THOUGHT + 1)}
    assert not takes(none, ids("<tool_call>", "bytes"))


@given(st.integers(0, 40), st.integers(0, 6), st.sampled_from(["bytes", "special"]))
def test_triggers_inside_draft_blocks(start: int, size: int, kind: str) -> None:
    token_ids = [*ids(f"so <b>{LIGHT} {RAIN}", kind), EOS]
    compiled = BACKENDS[kind].compile(GrammarSpec.tools(TOOLS))
    constraint = Constraint(compiled)
    assert constraint.commit(token_ids[:start]) == token_ids[:start]
    draft = token_ids[start : start + size]
    rows = MaskRows(1, 7, compiled_size(kind), CPU)
    lookahead = Lookahead.fork([constraint], rows, [6])
    assert lookahead.extend([[*draft, OTHER]])[0] == draft or kind == "bytes"
    masks = lookahead.finish(len(draft))
    assert masks is not None
    for depth in range(len(draft) + 1):
        fresh = compiled.new_matcher()
        assert all(map(fresh.accept_token, token_ids[: start + depth]))
        legal = unpack_bitmask(masks[0, depth], compiled_size(kind))
        assert set(legal.nonzero()[:, 0].tolist()) == row(fresh) & {*range(len(legal))}


def compiled_size(kind: str) -> int:
    return BACKENDS[kind].vocabulary.vocab_size


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_families_write_their_own_calls(name: str) -> None:
    spec = GrammarSpec.tools(TOOLS, NAMED, tool_format=name)
    assert spec.kind == "structural_tag"
    assert walk(BACKENDS["bytes"].compile(spec), 1)


@pytest.mark.parametrize("name", ["hermes", "llama3", "harmony"])
def test_schemas_in_tools_are_checked(name: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"not": {"multipleOf": 2}}}}
    with pytest.raises(UnsupportedSchemaError, match="not"):
        BACKENDS["bytes"].compile(GrammarSpec.tools([tool], tool_format=name))


def test_a_tool_without_parameters_takes_none() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    compiled = BACKENDS["bytes"].compile(GrammarSpec.tools([tool], "required"))
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert accepts(compiled, text)
    assert not accepts(compiled, text.replace("{}", '{"a": 1}'))
    assert accepts(BACKENDS["bytes"].compile(GrammarSpec.tools([])), "text")


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": ["object", "null"], "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    ],
)
def test_arguments_are_an_object(parameters: Any) -> None:
    compiled = BACKENDS["bytes"].compile(
        GrammarSpec.tools(function(name="f", parameters=parameters), "required")
    )
    for arguments, is_right in [('{"a": 1}', True), ("[1]", False), ("null", False)]:
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert accepts(compiled, text) is is_right, arguments


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": fields}]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: GrammarSpec.tools("x"), "tools="),
        (lambda: GrammarSpec.tools([{"type": "function", "name": "f"}]), r"tools\[0\]="),
        (lambda: GrammarSpec.tools([3]), r"tools\[0\]="),
        (lambda: GrammarSpec.tools([*TOOLS, *function(name="a b")]), r"tools\[2\].function.name"),
        (lambda: GrammarSpec.tools(function(name="f", parameters=3)), "tool 'f'"),
        (
            lambda: GrammarSpec.tools(function(name="f", parameters={"type": "array"})),
            r"^tools\[0\]\.function\.parameters\.type='array': of the tool 'f'",
        ),
        (lambda: GrammarSpec.tools([*TOOLS, TOOLS[0]]), "'weather': is taken"),
        (lambda: GrammarSpec.tools([], "required"), "pass tools"),
        (lambda: GrammarSpec.tools(TOOLS, "any"), "tool_choice="),
        (lambda: GrammarSpec.tools(TOOLS, {"type": "function"}), "tool_choice="),
        (
            lambda: GrammarSpec.tools(TOOLS, {"type": "function", "function": {"name": "x"}}),
            "is not one of the tools: weather, light",
        ),
        (lambda: GrammarSpec.tools(TOOLS, tool_format="gpt"), "tool_format='gpt'.*hermes"),
    ],
)
def test_mistakes_are_named(make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make()


CALLED = {"type": "tag", "begin": "<tool_call>", "content": {"type": "any_text"}, "end": "."}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"type": "const_string", "value": "a</s>"}, "ends the text"),
        ({"type": "token", "token": "<nobody>"}, "no added token"),
        ({"type": "token", "token": EOS}, "ends the text"),
        ({**CALLED, "end": ["<other>", "x"]}, "choose one end"),
        (
            {
                "type": "triggered_tags",
                "triggers": ["x"],
                "tags": [{**CALLED, "begin": "x<other>"}],
                "excludes": [""],
            },
            "excludes the empty text",
        ),
        ({"type": "triggered_tags", "triggers": ["<tool_call>", "x"], "tags": [CALLED]}, "let all"),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<tool_call>"],
                "tags": [CALLED],
                "excludes": ["x"],
            },
            "excludes 'x'",
        ),
        ({"type": "json_schema", "json_schema": ON, "any_order": True}, "any_order"),
        ({"type": "json_schema", "json_schema": WEATHER, "excludes": ["x"]}, "excludes"),
    ],
)
def test_tags_that_cannot_be_kept_are_refused(content: Any, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        BACKENDS["special"].compile(
            GrammarSpec.structural_tag({"type": "structural_tag", "format": content})
        )
    assert isinstance(caught.value, GrammarCompileError)


LAST = {"type": "token", "token": OTHER}


@pytest.mark.parametrize(
    ("content", "right", "wrong"),
    [
        ({"type": "const_string", "value": "a<other>b"}, "a<other>b", "a<tool_call>b"),
        ({**CALLED, "begin": "x<other>y"}, "x<other>yhi.", "xyhi."),
        ({**CALLED, "end": {"type": "token", "token": "<other>"}}, "<tool_call>hi<other>", "hi"),
        ({"type": "any_tokens", "exclude_tokens": ["<other>"]}, "hi", "hi<other>"),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, LAST]},
            "hi<other>",
            "hi<other><other>",
        ),
        (
            {
                "type": "token_triggered_tags",
                "trigger_tokens": ["<tool_call>"],
                "tags": [{**CALLED, "begin": {"type": "token", "token": "<tool_call>"}}],
                "exclude_tokens": ["<other>"],
            },
            "a<tool_call>b.c",
            "a<other>",
        ),
    ],
)
def test_tokens_in_tags(content: Any, right: str, wrong: str) -> None:
    spec = GrammarSpec.structural_tag({"type": "structural_tag", "format": content})
    compiled = BACKENDS["special"].compile(spec)
    assert takes(compiled, ids(right, "special"))
    assert not takes(compiled, ids(wrong, "special"))
