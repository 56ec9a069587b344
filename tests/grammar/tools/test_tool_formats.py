"""Tool formats: what the grammar writes, the reader takes apart again."""

from __future__ import annotations

import json
import random
import re
import time
from functools import cache
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from guided_spec.errors import ConfigError, GrammarCompileError, UnsupportedSchemaError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tools import kimi_k3
from guided_spec.grammar.tools.delimited import DelimitedFormat
from guided_spec.grammar.tools.form import FormedFormat
from guided_spec.grammar.tools.format import (
    MarkedText,
    ReadText,
    Tool,
    ToolRules,
    read_choice,
    read_tools,
)
from guided_spec.grammar.tools.formats import (
    TOOL_FORMATS,
    ToolFormat,
    find_tool_format,
    get_tool_format,
)
from guided_spec.grammar.tools.reasoning import BEGINNINGS, Reasoning
from guided_spec.grammar.vocabulary import Vocabulary
from tests.chat_templates import PLAIN, TEMPLATES
from tests.masks.walks import BYTES

EOS = 256
NAMES = tuple(
    dict.fromkeys(
        found
        for known in TOOL_FORMATS.values()
        for literal in known.literals
        for found in re.findall(r"</?[a-z_:]+>|<[|｜].*?[|｜]>|\[[A-Z_]+\]|｜DSML｜", literal)
    )
)
DATA = (*BYTES.token_bytes[:256], *[b""] * (1 + len(NAMES)))
DSML = {
    "deepseek_v3_2": ("｜DSML｜", "function_calls"),
    "deepseek_v4": ("｜DSML｜", "tool_calls"),
    "deepseek_v4_1": ("｜DSML｜ ", "calls"),
}
XML = (*DSML, "glm_4_5", "glm_4_7", "kimi_k3", "minimax_m2", "mimo", "qwen3_coder")


@cache
def vocabulary(kind: str) -> Vocabulary:
    """``bytes``: no added tokens. ``tokens``: each mark is one. ``call``: one also ends texts.

    ``some``: a few marks are, as in most families; ``think``: none of a call is.
    """
    if kind == "bytes":
        return BYTES
    added = tuple((name, EOS + 1 + at) for at, name in enumerate(NAMES))
    if kind in ("some", "think"):
        few = ("<think>", "</think>") if kind == "think" else tuple(filter(_is_often_one, NAMES))
        added = tuple((name, EOS + 1 + at) for at, name in enumerate(few))
        shown = (*DATA[: EOS + 1], *(name.encode() for name in few))
        data = DATA[: EOS + 1 + len(few)]
        return Vocabulary(
            (*data, *[b""] * (len(shown) - len(data))), (EOS,), len(shown), shown, added
        )
    shown = (*DATA[: EOS + 1], *(name.encode() if "tool" in name else b"" for name in NAMES))
    stops = (EOS, dict(added)["<|call|>"]) if kind == "call" else (EOS,)
    return Vocabulary(DATA, stops, len(DATA), shown, added)


def _is_often_one(name: str) -> bool:
    return "tool_call>" in name or name in ("｜DSML｜", "[TOOL_CALLS]", "<|channel|>", "<|end|>")


KINDS = ("bytes", "tokens", "call", "some")
BACKENDS = {
    kind: XGrammarBackend(vocabulary(kind), compile_threads=1) for kind in (*KINDS, "think")
}


class Side(NamedTuple):
    """One format's two sides over one vocabulary."""

    compiled: CompiledGrammar
    marks: MarkedText
    tools: list[Tool]
    name: str
    known: ToolFormat | FormedFormat

    def read(self, token_ids: list[int]) -> ReadText:
        return self.known.read(self.marks.read(token_ids), self.tools, self.marks)


def side(
    name: str,
    kind: str,
    tools: list[Any],
    choice: Any,
    *,
    parallel: bool = True,
    form: GrammarSpec | None = None,
) -> Side:
    plain, shared = TOOL_FORMATS[name], vocabulary(kind)
    known = plain if form is None else FormedFormat(plain, form)
    stops = frozenset(n for n, token in shared.added_tokens if token in shared.stop_token_ids)
    wanted, left = read_choice(choice, read_tools(tools))
    content = known.content(ToolRules(left, wanted, parallel, stops))
    spec = GrammarSpec.structural_tag({"type": "structural_tag", "format": content})
    marks = MarkedText(shared, known.literals)
    return Side(BACKENDS[kind].compile(spec), marks, list(left), name, known)


def walk(found: Side, kind: str, seed: int, wander: int) -> list[int]:
    """Random tokens, and from ``wander`` on those that lead to an end."""
    shared, dice = vocabulary(kind), random.Random(seed)
    matcher, token_ids = found.compiled.new_matcher(), list[int]()
    bitmask = np.zeros((1, -(-shared.vocab_size // 32)), dtype=np.int32)
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(bitmask)
        bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")[: shared.vocab_size]
        legal = [int(t) for t in np.flatnonzero(bits) if t not in found.compiled.excluded]
        assert legal, token_ids
        likely = [t for t in legal if t > EOS or t in frozenset(b'",:]}{[<0123456789 \n')]
        options = likely if likely and dice.random() < 0.6 else legal
        if len(token_ids) > wander:
            options = _closing(found, kind, token_ids, legal)
        token_ids.append(dice.choice(options))
        assert matcher.accept_token(token_ids[-1])
        assert len(token_ids) < 4000, found.marks.show(found.marks.read(token_ids[-300:]))
    return token_ids[:-1]


def _closing(found: Side, kind: str, token_ids: list[int], legal: list[int]) -> list[int]:
    if EOS in legal:
        return [EOS]
    known = TOOL_FORMATS[found.name]
    closing = spell(getattr(known, "closing", ""), kind)
    if len(closing) == 1 and closing[0] in legal:
        return closing
    ends = [known.literals[-1], getattr(known, "closing", "")]
    if found.name == "kimi_k3":
        ends = [_next_end(found.marks.show(found.marks.read(token_ids)))]
    if found.name == "harmony":
        ends.insert(0, "<|end|><|start|>assistant<|channel|>final<|message|>")
        ends += [f"<|channel|>commentary to=functions.{tool.name} <|" for tool in found.tools[:1]]
    best, begun = list[int](), 0
    for end in (spell(text, kind) for text in ends if text):
        for size in range(min(len(end) - 1, len(token_ids)), -1, -1):
            if token_ids[len(token_ids) - size :] == end[:size]:
                if end[size] in legal and (size > begun or not best):
                    best, begun = [end[size]], size
                break
    if best and (begun or best[0] > EOS):
        return best
    # A line break stands in free text, but never in JSON.
    closers = [] if ord("\n") in legal else [t for t in legal if t in frozenset(b'"]}')]
    return closers[:1] or best or legal


def _next_end(text: str) -> str:
    """What ends the innermost part that is open in a text of Kimi K3, or else the message."""
    opened = {name: text.rfind(f"<|open|>{name}") for name in ("argument", "call", "tools")}
    for name, at in opened.items():
        if at > text.rfind(f"<|close|>{name}<|sep|>"):
            return f"<|close|>{name}<|sep|>"
    name = "message" if "<|close|>response<|sep|>" in text else "response"
    return f"<|close|>{name}<|sep|>"


KEYS = st.sampled_from(["city", "on", "a b", "x"])
STRINGS = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "minLength": 1, "maxLength": 3},
        {"enum": ["red", "dark green"]},
        {"type": "string", "const": "</tool"},
        {"type": "string", "pattern": "^[ab]{2,4}$"},
        {"type": ["string", "null"]},
        {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}]},
    ]
)
VALUES = st.recursive(
    st.one_of(
        STRINGS, st.sampled_from([{"type": "boolean"}, {"type": "integer"}, {"enum": [1, "b"]}])
    ),
    lambda inner: st.one_of(
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner),
        st.dictionaries(KEYS, inner, max_size=2).map(lambda found: _object(found, list(found)[:1])),
    ),
    max_leaves=3,
)


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    closed = {"type": "object", "additionalProperties": False}
    return {**closed, "properties": properties, "required": required}


SCHEMAS = st.dictionaries(KEYS, VALUES, max_size=3).flatmap(
    lambda found: st.builds(
        _object, st.just(found), st.lists(st.sampled_from([*found, ""]), unique=True)
    ).map(lambda schema: {**schema, "required": [key for key in schema["required"] if key]})
)
TOOLS = st.lists(SCHEMAS, min_size=1, max_size=2).map(
    lambda schemas: [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in zip(("get", "get_2"), schemas, strict=False)
    ]
)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=12, phases=[Phase.generate], derandomize=True)  # walks do not shrink
@given(
    tools=TOOLS,
    choice=st.sampled_from(["auto", "required", "none", "get"]),
    kind=st.sampled_from(KINDS),
    parallel=st.booleans(),
    path=st.tuples(st.integers(0, 10**6), st.integers(0, 150)),
)
def test_what_is_written_is_read(
    name: str, tools: Any, choice: str, kind: str, parallel: Any, path: tuple[int, int]
) -> None:
    found = side(name, kind, tools, choice, parallel=parallel)
    token_ids = walk(found, kind, *path)
    read = found.read(token_ids)
    schemas = {tool.name: tool.parameters for tool in found.tools}
    for call in read.calls:
        jsonschema.validate(call.arguments, dict(schemas[call.name]))
        if name not in XML:
            shape = re.sub(r'"(?:\\.|[^"\\])*"', '""', call.raw)
            assert not re.search(r"[ \t\r\n]{2}", shape), call.raw
    assert choice not in ("required", "get") or read.calls
    assert choice != "none" or not read.calls
    assert (parallel and choice != "get") or len(read.calls) <= 1
    whole = found.marks.show(found.marks.read(token_ids))
    assert all(call.raw in whole for call in read.calls)


LIGHT = _object({"on": {"type": "boolean"}, "room": {"type": "string"}}, ["on"])
LIGHTS = [{"type": "function", "function": {"name": "light", "parameters": LIGHT}}]
HEAD, TAIL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
)
CALLS = {
    "hermes": '<tool_call>\n{"name": "light", "arguments": %}\n</tool_call>',
    "llama3": '{"name": "light", "parameters": %}',
    "mistral": '[TOOL_CALLS] [{"name": "light", "arguments": %}]',
    "mistral_tekken": '[TOOL_CALLS][{"name": "light", "arguments": %}]',
    "mistral_v11": "[TOOL_CALLS]light[CALL_ID]abc123XYZ[ARGS]%",
    "mistral_v13": "[TOOL_CALLS]light[ARGS]%",
    "deepseek_v3": f"{HEAD}function<｜tool▁sep｜>light\n```json\n%\n```{TAIL}",
    "deepseek_v3_1": f"{HEAD}light<｜tool▁sep｜>%{TAIL}",
    **{
        name: f'<{mark}{block}>\n<{mark}invoke name="light">\n'
        f'<{mark}parameter name="on" string="false">true</{mark}parameter>\n'
        f'<{mark}parameter name="room" string="true">the hall</{mark}parameter>\n'
        f"</{mark}invoke>\n</{mark}{block}>"
        for name, (mark, block) in DSML.items()
    },
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.light:0"
    "<|tool_call_argument_begin|>%<|tool_call_end|><|tool_calls_section_end|>",
    "kimi_k3": "<|close|>response<|sep|><|open|>tools<|sep|>"
    '<|open|>call tool="light" index="1"<|sep|>'
    '<|open|>argument key="on" type="boolean"<|sep|>true<|close|>argument<|sep|>'
    '<|open|>argument key="room" type="string"<|sep|>the hall<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="light">\n<parameter name="on">true'
    '</parameter>\n<parameter name="room">the hall</parameter>\n</invoke>\n</minimax:tool_call>',
    "command_a": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "light", '
    '"parameters": %}\n]<|END_ACTION|>',
    "exaone4": '<tool_call>{"name": "light", "arguments": %}</tool_call>',
    "mimo": "<tool_call><function=light><parameter=on>true</parameter>"
    "<parameter=room>the hall</parameter></function></tool_call>",
    "glm_4_5": "<tool_call>light\n<arg_key>on</arg_key>\n<arg_value>true</arg_value>\n"
    "<arg_key>room</arg_key>\n<arg_value>the hall</arg_value>\n</tool_call>",
    "glm_4_7": "<tool_call>light<arg_key>on</arg_key><arg_value>true</arg_value>"
    "<arg_key>room</arg_key><arg_value>the hall</arg_value></tool_call>",
    "qwen3_coder": "<tool_call>\n<function=light>\n<parameter=on>\ntrue\n</parameter>\n"
    "<parameter=room>\nthe hall\n</parameter>\n</function>\n</tool_call>",
    "harmony": "<|channel|>analysis<|message|>so<|end|><|start|>assistant"
    "<|channel|>commentary to=functions.light <|constrain|>json<|message|>%",
}


def framed(name: str, text: str) -> str:
    """An answer as the family writes it."""
    match name:
        case "harmony":
            return f"<|channel|>final<|message|>{text}"
        case "kimi_k3":
            return f"{text}<|close|>response<|sep|><|close|>message<|sep|>"
    return text


def delimited(name: str) -> DelimitedFormat:
    """How a family that is not gpt-oss writes calls."""
    known = kimi_k3.CALLS if name == "kimi_k3" else TOOL_FORMATS[name]
    assert isinstance(known, DelimitedFormat)
    return known


def block(name: str, calls: str) -> str:
    """Calls with what the family writes around them."""
    known = delimited(name)
    written = f"{known.opening}{calls}{known.closing}".replace("{id}", "1")
    if name == "kimi_k3":
        return f"<|close|>response<|sep|>{written}<|close|>message<|sep|>"
    return written


def spell(text: str, kind: str) -> list[int]:
    """One token a byte, and added tokens where there are any."""
    ids = dict(vocabulary(kind).added_tokens)
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", text) if ids else [text]
    return [t for part in parts for t in ([ids[part]] if part in ids else part.encode())]


def test_each_format_has_a_text_and_a_template() -> None:
    assert CALLS.keys() == TOOL_FORMATS.keys() == TEMPLATES.keys()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_the_family_s_own_text(name: str, kind: str) -> None:
    text = CALLS[name].replace("%", '{"on": true, "room": "the hall"}')
    found = side(name, kind, LIGHTS, "required")
    token_ids = spell(text, kind)
    if name == "harmony" and kind != "call":
        token_ids += spell("<|call|>", kind)
    matcher = found.compiled.new_matcher()
    assert all(map(matcher.accept_token, [*token_ids, EOS])), text
    assert matcher.is_terminated()
    (call,) = found.read(token_ids).calls
    assert (call.name, call.arguments) == ("light", {"on": True, "room": "the hall"})
    ids = {"mistral_v11": "abc123XYZ", "kimi_k2": "functions.light:0", "command_a": "0"}
    ids["kimi_k3"] = "1"
    assert call.id == ids.get(name, "")
    assert found.read(token_ids).reasoning == ("so" if name == "harmony" else None)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_was_cut_off_stays_in_the_text(name: str) -> None:
    found = side(name, "bytes", LIGHTS, "auto")
    text = CALLS[name].replace("%", '{"on": true, "room": "the hall"}')
    cut = text.index("hall")
    read = found.read(spell(text[:cut], "bytes"))
    assert read.calls == ()
    assert "the " in read.text


def test_text_around_calls() -> None:
    found = side("hermes", "tokens", LIGHTS, "auto")
    call = CALLS["hermes"].replace("%", '{"on": false}')
    read = found.read(spell(f"Well.\n{call}\n{call}", "tokens"))
    assert read.text == "Well."
    assert [one.arguments for one in read.calls] == [{"on": False}] * 2
    assert read.calls[0].raw == call


def test_letters_of_a_token_are_text() -> None:
    found = side("hermes", "tokens", LIGHTS, "auto")
    call = CALLS["hermes"].replace("%", '{"on": false}')
    token_ids = list(call.encode())
    assert all(map(found.compiled.new_matcher().accept_token, token_ids))
    assert found.read(token_ids) == ReadText(call, ())


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_tells_its_format(name: str) -> None:
    known = find_tool_format(TEMPLATES[name])
    assert known is not None
    assert known.name == name


def test_unknown_families() -> None:
    assert find_tool_format(PLAIN) is None
    with pytest.raises(ConfigError, match="tool_format='chatty'.*hermes"):
        get_tool_format("chatty")


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"anyOf": [LIGHT]}, "tool 'light'.*uses anyOf"),
        ({"type": "object", "required": ["on"]}, "requires"),
        ({"type": "array"}, "it is none"),
    ],
)
def test_marks_need_listed_properties(schema: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        side(
            "glm_4_5",
            "bytes",
            [{"type": "function", "function": {"name": "light", "parameters": schema}}],
            "auto",
        )


def test_shared_definitions_reach_an_argument() -> None:
    schema = {
        **_object({"at": {"$ref": "#/$defs/Place"}}, ["at"]),
        "$defs": {"Place": _object({"x": {"type": "integer"}}, ["x"])},
    }
    tools = [{"type": "function", "function": {"name": "go", "parameters": schema}}]
    found = side("glm_4_7", "bytes", tools, "required")
    text = '<tool_call>go<arg_key>at</arg_key><arg_value>{"x": 3}</arg_value></tool_call>'
    assert all(map(found.compiled.new_matcher().accept_token, text.encode()))
    assert found.read(list(text.encode())).calls[0].arguments == {"at": {"x": 3}}


@pytest.mark.parametrize(("end", "begin"), BEGINNINGS.items())
def test_reasoning_is_split_off(end: str, begin: str) -> None:
    reasoning = Reasoning.of_template(f"x{end}y")
    assert reasoning == Reasoning(begin, end)
    marks = MarkedText(BYTES, reasoning)
    assert reasoning.split(f"{begin}\nso\n{end}\n\nyes", "unopened", marks) == ("so", "yes")
    assert reasoning.split(f"so\n{end}yes", "open", marks) == ("so", "yes")
    assert reasoning.split("so it goes", "open", marks) == ("so it goes", "")
    assert reasoning.split("yes", "unopened", marks) == (None, "yes")
    assert reasoning.split(f"a {end}", "closed", marks) == (None, f"a {end}")
    states = [reasoning.state_after(f"hi{tail}\n") for tail in (begin, begin + end, "")]
    assert states == ["open", "closed", "unopened"]


def test_json_in_tags_has_fixed_whitespace() -> None:
    content = {"type": "json_schema", "json_schema": LIGHT}
    compiled = BACKENDS["bytes"].compile(
        GrammarSpec.structural_tag({"type": "structural_tag", "format": content})
    )
    for text, is_taken in (
        ('{"on": true, "room": "a  b"}', True),
        ('{"on":true}', False),
        ('{ "on": true}', False),
        ('{"on": true }', False),
    ):
        matcher = compiled.new_matcher()
        assert all(map(matcher.accept_token, [*text.encode(), EOS])) == is_taken
        assert json.loads(text)["on"] is True


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["think", "some"])
@pytest.mark.parametrize("name", CALLS)
def test_reasoning_before_calls_that_are_spelled_out(name: str, kind: str) -> None:
    """Where the marks of the reasoning are tokens, and those of a call are not, or not all."""
    if name == "harmony":  # which holds the reasoning itself
        return
    known, shared = TOOL_FORMATS[name], vocabulary(kind)
    text = CALLS[name].replace("%", '{"on": true, "room": "<b>"}').replace("the hall", "<b>")
    for choice in ("auto", "required", "none"):
        content = known.content(ToolRules(read_tools(LIGHTS), choice))
        tag = Reasoning("<think>", "</think>").before(content)
        spec = GrammarSpec.structural_tag({"type": "structural_tag", "format": tag})
        found = Side(
            BACKENDS[kind].compile(spec),
            MarkedText(shared, known.literals),
            read_tools(LIGHTS),
            name,
            known,
        )
        assert takes(found, spell(f"<think>so</think>\n{text}", kind)) == (choice != "none")
        assert takes(found, spell(text, kind)) == (choice != "none")
        assert takes(found, spell(framed(name, "<think>so</think>Well <b>."), kind)) == (
            choice != "required"
        )
        if kind == "think":
            twice = spell("<think>so</think>", kind)
            assert not takes(found, [*twice, *twice])
            stray = spell(text.replace("<b>", "<b></think>"), kind)
            assert not takes(found, stray)
        (call,) = found.read(spell(text, kind)).calls
        assert call.arguments == {"on": True, "room": "<b>"}


def light(name: str, schema: Any = LIGHT) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def whole(name: str, text: str, kind: str = "tokens") -> list[int]:
    """With what ends a call in this format."""
    return spell(text + ("<|call|>" if name == "harmony" else ""), kind)


def takes(found: Side, token_ids: list[int]) -> bool:
    matcher = found.compiled.new_matcher()
    return all(map(matcher.accept_token, [*token_ids, EOS])) and matcher.is_terminated()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_required_stands_alone(name: str) -> None:
    text = CALLS[name].replace("%", '{"on": true}')
    call = whole(name, text)
    found = side(name, "tokens", LIGHTS, "required")
    assert takes(found, call)
    before, after = [*b"Well. "], [*b" Done."]
    if name == "harmony":
        before = spell("<|channel|>commentary<|message|>Well.<|end|><|start|>assistant", "tokens")
    assert not takes(found, [*before, *call])
    assert not takes(found, [*call, *after])
    free = side(name, "tokens", LIGHTS, "auto")
    assert takes(free, [*before, *call])


@pytest.mark.parametrize("name", CALLS)
def test_names_with_dots_are_names(name: str) -> None:
    text = CALLS[name].replace("light", "house.light-2").replace("%", '{"on": true}')
    found = side(name, "tokens", [light("house_light-2"), light("house.light-2")], "required")
    assert takes(found, whole(name, text))
    assert [call.name for call in found.read(whole(name, text)).calls] == ["house.light-2"]


@pytest.mark.parametrize("schema", [{"type": "object", "properties": {}}, {}, None])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_without_arguments(name: str, schema: Any) -> None:
    text = CALLS[name].replace("%", "{}")
    argument = (
        r"<(parameter|arg_key|｜DSML｜ ?p|\|open\|>argument).*"
        r"<(/parameter|/arg_value|/｜DSML｜ ?parameter|\|close\|>argument<\|sep\|)>\n?"
    )
    # DeepSeek V3.2 and V4.1 write an empty line instead.
    instead = "\n" * (name in DSML and name != "deepseek_v4")
    text = re.sub(argument, instead, text, flags=re.DOTALL)
    found = side(name, "tokens", [light("light", schema)], "required")
    assert takes(found, whole(name, text)), text
    (call,) = found.read(whole(name, text)).calls
    assert call.arguments == {}


@pytest.mark.parametrize("name", ["hermes", "kimi_k2", "qwen3_coder", "harmony"])
def test_hundreds_of_tools_cost_little_to_read(name: str) -> None:
    """A server reads every piece of every stream so, on the loop of all its clients."""
    seconds = []
    for count in (5, 500):
        tools = read_tools([light(f"tool_{at}") for at in range(count)])
        known, marks = (
            TOOL_FORMATS[name],
            MarkedText(vocabulary("tokens"), TOOL_FORMATS[name].literals),
        )
        arguments = '{"on": true, "room": "%s"}' % ("hall " * 40)
        text = CALLS[name].replace("light", f"tool_{count - 1}").replace("%", arguments)
        written = marks.read(spell(text, "tokens"))
        assert [call.name for call in known.read(written, tools, marks).calls] == [
            f"tool_{count - 1}"
        ]
        spent = []
        for _ in range(9):
            began = time.process_time()
            known.read_begun(written, tools, marks)
            spent.append(time.process_time() - began)
        seconds.append(min(spent))
    assert seconds[1] < 20 * max(seconds[0], 5e-5)


def test_five_hundred_tools_compile() -> None:
    found = side("hermes", "tokens", [light(f"tool_{at}") for at in range(500)], "auto")
    call = CALLS["hermes"].replace("light", "tool_499").replace("%", '{"on": true}')
    assert takes(found, spell(f"Well. {call}", "tokens"))
    assert not takes(found, spell(call.replace("tool_499", "tool_500"), "tokens"))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("hermes", "the tool 'sort': .*\n.*/properties/k: uniqueItems"),
        ("harmony", "the tool 'sort': .*\n.*/properties/k: uniqueItems"),
        (
            "glm_4_5",
            "the tool 'sort', argument 'k': .*\n.*/: uniqueItems|argument 'k'.*uniqueItems",
        ),
    ],
)
def test_a_refusal_names_the_tool_and_the_argument(name: str, reason: str) -> None:
    unique = {"type": "array", "items": {"type": "number"}, "uniqueItems": True}
    tools = [light("light"), light("sort", _object({"k": unique}, []))]
    with pytest.raises(UnsupportedSchemaError) as caught:
        side(name, "bytes", tools, "auto")
    assert re.search(reason, str(caught.value), re.DOTALL)
    wrong = light("sort", {"type": "object", "properties": {"k": {"type": "strnig"}}})
    with pytest.raises(GrammarCompileError, match="^the tool 'sort'.*'strnig' is no type"):
        side(name, "bytes", [wrong], "auto")
