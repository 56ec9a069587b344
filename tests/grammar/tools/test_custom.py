"""Custom tools: a text under a grammar of its own, in each family's form of calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import ConfigError, GrammarCompileError
from guided_spec.grammar.tools.custom import InputReader, as_function_call, custom_names
from guided_spec.grammar.tools.format import read_choice, read_tools, tool_dicts
from tests.grammar.backends.test_printed import PATCH
from tests.grammar.tools.test_tool_formats import (
    CALLS,
    XML,
    block,
    delimited,
    light,
    side,
    takes,
    whole,
)

LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": PATCH}}
REGEX = {"type": "grammar", "grammar": {"syntax": "regex", "definition": r'say "\w+"\n?'}}
GOOD = '*** Begin Patch\n*** Update File: a "b".py\n@@\n+say("hi\\n")\n*** End Patch'


def custom(form: Any = None, name: str = "light") -> dict[str, Any]:
    inner = {"name": name, "description": "Change files."}
    return {"type": "custom", "custom": inner if form is None else {**inner, "format": form}}


def call(name: str, text: str, *, is_quoted: bool) -> str:
    """A family's call of the tool "light" with one text."""
    written = json.dumps(text, ensure_ascii=False)
    one = CALLS[name].replace("%", f'{{"input": {written}}}')
    if name in XML:
        known = delimited(name)
        assert known.argument is not None
        kinds = known.argument.kinds
        kind = kinds[-1] if is_quoted and kinds[-1] == "false" else kinds[0]
        before, after = known.argument.around("input", kind)
        argument = f"{before}{written if is_quoted else text}{after}"
        one = known.call.replace("{name}", "light").replace("{arguments}", argument)
        one = block(name, one)
    return one


@pytest.mark.every_case
@pytest.mark.parametrize("name", CALLS)
def test_the_text_keeps_to_its_grammar_and_is_read_back(name: str) -> None:
    found = side(name, "tokens", [custom(LARK)], "required")
    for text, is_taken in ((GOOD, True), (GOOD + "\n\n", False), ("hello", False)):
        token_ids = whole(name, call(name, text, is_quoted=True))
        assert takes(found, token_ids) == is_taken, text
    token_ids = whole(name, call(name, GOOD, is_quoted=True))
    (read,) = found.read(token_ids).calls
    assert (read.name, read.arguments) == ("light", {"input": GOOD})


@pytest.mark.parametrize("name", CALLS)
def test_regexes_and_free_texts(name: str) -> None:
    found = side(name, "tokens", [custom(REGEX)], "required")
    for text, is_taken in (('say "no"\n', True), ('say "no', False)):
        assert takes(found, whole(name, call(name, text, is_quoted=True))) == is_taken
    for form in (None, {"type": "text"}):
        found = side(name, "tokens", [custom(form)], "required")
        token_ids = whole(name, call(name, 'any "text"\n', is_quoted=False))
        assert takes(found, token_ids)
        assert found.read(token_ids).calls[0].arguments == {"input": 'any "text"\n'}


def test_beside_functions() -> None:
    tools = [light("light"), custom(REGEX, "say"), custom(LARK, "patch")]
    found = side("hermes", "tokens", tools, "auto")
    text = CALLS["hermes"].replace("light", "say").replace("%", '{"input": "say \\"x\\""}')
    assert takes(found, whole("hermes", f"Well. {text}"))
    wrong = text.replace('"name": "say"', '"name": "light"')
    assert not takes(found, whole("hermes", wrong))


def test_the_model_is_shown_a_function() -> None:
    (shown,) = tool_dicts([custom(LARK)])
    function = shown["function"]
    assert (shown["type"], function["name"]) == ("function", "light")
    assert function["description"].startswith("Change files.\n\nThe input is a text that this Lark")
    assert PATCH in function["description"]
    assert function["parameters"]["required"] == ["input"]
    assert tool_dicts([custom()])[0]["function"]["description"] == "Change files."
    assert custom_names([custom(), light("x"), 3, {"type": "custom"}]) == {"light"}


def test_a_call_of_the_conversation_is_shown_as_one_of_a_function() -> None:
    given = {"id": "a", "type": "custom", "custom": {"name": "light", "input": "x"}}
    function = {"name": "light", "arguments": {"input": "x"}}
    assert as_function_call(given) == {"id": "a", "type": "function", "function": function}
    for other in ({"type": "function", "function": function}, {"type": "custom"}, 3):
        assert as_function_call(other) is other


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        ({"type": "custom"}, r"tools\[0\].custom=None.*must be a dict"),
        ({"type": "custom", "custom": {}}, r"tools\[0\].custom.name=None"),
        ({"type": "custom", "custom": {"name": "a b"}}, r"tools\[0\].custom.name='a b'"),
        ({"type": "custom", "name": "a"}, r"tools\[0\].name"),
        (custom("text"), r"custom.format='text'.*must be \{"),
        (custom({"type": "text", "grammar": {}}), r"custom.format.grammar"),
        (custom({"type": "grammar"}), r"custom.format.grammar=None"),
        (custom({"type": "grammar", "grammar": {"syntax": "ebnf"}}), "must be one of lark, regex"),
        (custom({"type": "grammar", "grammar": {"syntax": []}}), "must be one of lark, regex"),
        (custom({"type": ["grammar"]}), "custom.format=.*must be"),
        (custom({"type": "grammar", "grammar": {"syntax": "lark"}}), "definition=None"),
        (custom({**LARK, "syntax": "lark"}), "format.syntax"),
    ],
)
def test_mistakes_are_named(tool: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_tools([tool])


def test_a_name_is_taken_once() -> None:
    with pytest.raises(ConfigError, match=r"tools\[1\].custom.name='light' is taken|is taken"):
        read_tools([light("light"), custom()])


@pytest.mark.parametrize("name", ["hermes", "glm_4_5", "harmony"])
@pytest.mark.parametrize(
    ("syntax", "definition", "reason"),
    [("lark", "start: missing", "missing"), ("regex", "(?=a)", "lookahead"), ("regex", "(", "")],
)
def test_a_broken_grammar_names_its_tool(
    name: str, syntax: str, definition: str, reason: str
) -> None:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    with pytest.raises(GrammarCompileError, match=f"^the tool 'light'.*{reason}"):
        side(name, "bytes", [custom(form)], "auto")


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [custom(None, "b")]}}


def allowed(*tools: Any, mode: Any = "required") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def named(name: str, kind: str = "function") -> dict[str, Any]:
    return {"type": kind, kind: {"name": name}}


def test_some_tools_are_allowed() -> None:
    tools = read_tools([light("a"), custom(None, "b"), light("c")])
    for mode in ("auto", "required"):
        choice, left = read_choice(allowed(named("c"), named("b", "custom"), mode=mode), tools)
        assert (choice, [tool.name for tool in left]) == (mode, ["b", "c"])
    assert read_choice(named("b", "custom"), tools) == ("named", [tools[1]])
    found = side("hermes", "tokens", [light("a"), light("c")], allowed(named("c"), mode="auto"))
    text = CALLS["hermes"].replace("%", '{"on": true}')
    assert takes(found, whole("hermes", text.replace("light", "c")))
    assert not takes(found, whole("hermes", text.replace("light", "a")))


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        (allowed(), "allowed_tools.tools=\\[\\].*at least one"),
        (allowed(named("x")), r"tools\[0\].function.name='x': is not one of the tools: a"),
        (allowed(named("a"), mode="none"), "allowed_tools.mode='none'"),
        (allowed("a"), r"allowed_tools.tools\[0\]='a'"),
        (allowed({"type": "mcp"}), r"allowed_tools.tools\[0\]="),
        (allowed({**named("a"), "x": 1}), r"allowed_tools.tools\[0\].x"),
        ({"type": "allowed_tools"}, "allowed_tools=None"),
        ({"type": "allowed_tools", "mode": "auto"}, "tool_choice.mode"),
        ({"type": "function", "function": {"name": 3}}, "tool_choice="),
        ({"type": "custom", "function": {"name": "a"}}, "tool_choice.function"),
    ],
)
def test_mistaken_choices_are_named(choice: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_choice(choice, read_tools([light("a")]))


@given(
    st.text(st.characters(codec="utf-8")), st.lists(st.integers(1, 5), min_size=1), st.booleans()
)
def test_a_text_is_read_while_it_comes(text: str, sizes: list[int], ascii_only: bool) -> None:  # noqa: FBT001
    written, reader, at = json.dumps({"input": text}, ensure_ascii=ascii_only), InputReader(), 0
    seen = ""
    for step in range(len(written)):
        size = sizes[step % len(sizes)]
        seen += reader.feed(written[at : at + size])
        at += size
        assert text.startswith(seen)
    assert seen == text == reader.text


def test_half_of_a_pair_stands_alone_where_nothing_goes_on_with_it() -> None:
    reader = InputReader()
    assert reader.feed('{"input": "a\\ud83d') == "a"
    assert reader.feed("\\ude00\\ud83d") == "\U0001f600"
    assert reader.feed("x") == "\ud83dx"
    assert reader.feed('\\udc00"}') == "\udc00"
