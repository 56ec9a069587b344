"""Tools beside a form of the answer: each text is calls that match, or is of the form."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import Phase, given, reject, settings
from hypothesis import strategies as st

from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tools.form import form_content
from guided_spec.grammar.tools.formats import TOOL_FORMATS
from tests.grammar.tools.test_begun_texts import check_end, follow
from tests.grammar.tools.test_tool_formats import (
    CALLS,
    EOS,
    KINDS,
    LIGHTS,
    TOOLS,
    Side,
    framed,
    side,
    spell,
    walk,
)
from tests.tiers import examples

ANSWER: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "parameters": {"type": "object"}},
    "required": ["name"],
    "additionalProperties": False,
}
FORMS = {
    "schema": GrammarSpec.json_schema(ANSWER),
    "object": GrammarSpec.json_object(),
    "regex": GrammarSpec.regex("[<{a]{1,30}"),
    "choice": GrammarSpec.choice(["yes", "<tool_call>", '{"name": "x']),
}
LIGHT = '{"on": true, "room": "the hall"}'


def is_of(form: str, text: str) -> bool:
    """Whether the text is of the form, as others than xgrammar see it."""
    if form == "regex":
        return re.fullmatch("[<{a]{1,30}", text) is not None
    if form == "choice":
        return text in ("yes", "<tool_call>", '{"name": "x')
    schema = ANSWER if form == "schema" else {"type": "object"}
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


def takes(found: Side, token_ids: list[int]) -> bool:
    matcher = found.compiled.new_matcher()
    return all(map(matcher.accept_token, [*token_ids, EOS])) and matcher.is_terminated()


def check_stream(found: Side, token_ids: list[int], *, may_wait: bool = False) -> None:
    """Nothing is taken back. may_wait: all of it may come at the end."""
    last = follow(found, token_ids)[-1]
    if not (may_wait and last.text == "" and not last.calls):
        check_end(found, token_ids)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=examples(24), phases=[Phase.generate], derandomize=True)
@given(
    tools=TOOLS,
    form=st.sampled_from([*FORMS]),
    kind=st.sampled_from(KINDS),
    parallel=st.booleans(),
    path=st.tuples(st.integers(0, 10**6), st.integers(0, 60)),
)
def test_every_text_is_one_of_the_two(
    name: str, tools: Any, form: str, kind: str, parallel: Any, path: tuple[int, int]
) -> None:
    found = side(name, kind, tools, "auto", parallel=parallel, form=FORMS[form])
    try:
        token_ids = walk(found, kind, *path)
    except AssertionError:  # it found no end, as some calls in a block have none in sight
        reject()
    read = found.read(token_ids)
    schemas = {tool.name: dict(tool.parameters) for tool in found.tools}
    for call in read.calls:
        jsonschema.validate(call.arguments, schemas[call.name])
    assert (read.text == "") if read.calls else is_of(form, read.text)
    assert parallel or len(read.calls) <= 1
    check_stream(found, token_ids, may_wait=name == "llama3" or form in ("regex", "choice"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_calls_and_answers(name: str, kind: str, form: str) -> None:
    found = side(name, kind, LIGHTS, "auto", form=FORMS[form])
    call = spell(CALLS[name].replace("%", LIGHT), kind)
    if name == "harmony" and kind != "call":
        call += spell("<|call|>", kind)
    assert takes(found, call)
    assert [one.arguments for one in found.read(call).calls] == [json.loads(LIGHT)]
    check_stream(found, call, may_wait=name == "llama3" or form in ("regex", "choice"))
    texts = {"schema": '{"name": "x"}', "object": '{"a": 1}', "regex": "a", "choice": "yes"}
    text = spell(framed(name, texts[form]), kind)
    assert takes(found, text)
    assert found.read(text) == (texts[form], (), None)
    for wrong in (b"", b"Well. ", b" "):
        assert not takes(found, [*wrong, *call, *wrong, *text])
        assert not takes(found, [*wrong, *b"hello"])


@pytest.mark.parametrize("at", ["name", "arguments"])
def test_json_that_begins_like_a_call_is_the_answer(at: str) -> None:
    """Llama writes calls as plain JSON: an answer may look like one until its last letter."""
    found = side("llama3", "bytes", LIGHTS, "auto", form=FORMS["schema"])
    text = CALLS["llama3"].replace("%", LIGHT if at == "name" else '{"on": 1}')
    text = text.replace("light", "dark") if at == "name" else text
    assert takes(found, [*text.encode()])
    assert found.read([*text.encode()]) == (text, (), None)
    check_stream(found, [*text.encode()], may_wait=True)


def test_a_call_within_the_answer_is_no_call() -> None:
    call = CALLS["mimo"]
    found = side("mimo", "bytes", LIGHTS, "auto", form=FORMS["schema"])
    text = json.dumps({"name": call})
    assert takes(found, [*text.encode()])
    assert found.read([*text.encode()]) == (text, (), None)
    check_end(found, [*text.encode()])


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (GrammarSpec.ebnf("root ::= [a]"), "response_format='ebnf'.*tool_choice"),
        (GrammarSpec.lark("start: /a/"), "response_format='lark'"),
        (GrammarSpec.structural_tag({"type": "structural_tag", "tags": []}), "structural_tag"),
        (GrammarSpec.json_schema({}, key_order="any"), "response_format.key_order='any'"),
        (GrammarSpec.json_schema({}, unsupported="warn"), "response_format.unsupported"),
        (GrammarSpec.json_object(any_whitespace=True), "response_format.any_whitespace"),
        (GrammarSpec.json_object().after("x"), "response_format.start"),
        (GrammarSpec.json_schema('{"a"'), "response_format=.*is not valid JSON"),
    ],
)
def test_what_a_tag_does_not_have_is_refused(form: GrammarSpec, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        form_content(form)


def test_a_tag_is_a_form() -> None:
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "so"}}
    found = side("hermes", "tokens", LIGHTS, "auto", form=GrammarSpec.structural_tag(tag))
    assert takes(found, [*b"so"])
    assert found.read([*b"so"]) == ("so", (), None)
