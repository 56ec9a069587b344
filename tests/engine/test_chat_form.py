"""Chats with tools and a form of the answer: a reply is a call, or a value of the form."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import product
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.chat_templates import TEMPLATES, THINKING
from tests.engine.test_chat import ASK, LIGHT, TOOLS, options
from tests.engine.test_chat_stream import join
from tests.tiny_llm import make_llm, tiny_tokenizer


class Answer(BaseModel):
    """What the reply is where it is no call."""

    is_on: bool
    floor: int


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": Answer.model_json_schema()}}
SHORT = SamplingParams(max_tokens=150, temperature=1.0, n=4, seed=1)
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (TEMPLATES[name], {})
        for name in ("hermes", "llama3", "harmony", "glm_4_7", "kimi_k3")
    },
    "opened": (THINKING, {"opened": True}),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm("llama", tokenizer=copy.deepcopy(tiny_tokenizer()), max_model_len=512) as made:
        yield made


@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS)
def test_a_reply_is_one_of_the_two(llm: LLM, way: str) -> None:
    """Whole and streamed, by samples enough to see both."""
    template, variables = WAYS[way]
    chosen = options(template, variables=variables, response_format=Answer, params=SHORT)
    output = llm.chat(ASK, TOOLS, **chosen)
    chunks = list(llm.stream_chat(ASK, TOOLS, **chosen))
    for at, one in enumerate(output.completions):
        assert one.completion.is_complete
        assert bool(one.tool_calls) != bool(one.text), one.text
        assert way != "opened" or one.reasoning
        joined = join(chunks, at)
        assert joined.text.strip() == one.text
        assert [name for _, name, _ in joined.calls] == [call.name for call in one.tool_calls]
        if one.tool_calls:
            assert one.parsed is None
            schemas: dict[str, Any] = {"light": LIGHT, "off": {"maxProperties": 0}}
            for call in one.tool_calls:
                jsonschema.validate(call.arguments, schemas[call.name])
        else:
            assert one.parsed == Answer(**json.loads(one.text))
    if way == "hermes":
        assert {bool(one.tool_calls) for one in output.completions} == {True, False}


def test_reasoning_is_left_to_the_model(llm: LLM) -> None:
    """The grammar takes a call or an answer, with reasoning before it and without."""
    request = llm._chat.request(ASK, TOOLS, options(THINKING, response_format=Answer))
    assert request.params.grammar is not None
    compiled = llm._grammars.submit(request.params.grammar).result()
    call = '<tool_call>\n{"name": "off", "arguments": {}}\n</tool_call>'
    answer = '{"is_on": true, "floor": 3}'
    for text, reasoning in product((call, answer, "so"), ("", "<think>\nHm.\n</think>\n\n")):
        token_ids = llm.tokenizer(reasoning + text, add_special_tokens=False)["input_ids"]
        matcher = compiled.new_matcher()
        token_ids += llm.vocabulary.stop_token_ids[:1]
        assert all(map(matcher.accept_token, token_ids)) == (text != "so")
        read = request.reader.read(request.reader.marks.read(token_ids[:-1]))
        assert read.reasoning == ("Hm." if reasoning else None)
        assert (read.text, len(read.calls)) == (("", 1) if text == call else (text, 0))


def test_each_way_to_say_the_form_is_the_same(llm: LLM) -> None:
    params = SamplingParams(max_tokens=150, temperature=1.0, seed=1)
    spec = GrammarSpec.json_schema(Answer)
    texts = {
        llm.chat(ASK, TOOLS, **options(TEMPLATES["hermes"], **more)).completion.text
        for more in (
            {"params": params, "response_format": SCHEMA},
            {"params": params, "response_format": Answer},
            {"params": params, "response_format": spec},
            {"params": SamplingParams(max_tokens=150, temperature=1.0, seed=1, grammar=Answer)},
        )
    }
    assert len(texts) == 1


def test_a_choice_of_tools_decides(llm: LLM) -> None:
    for choice, is_call in (("required", True), ("light", True), ("none", False)):
        chosen = options(TEMPLATES["hermes"], response_format=Answer, tool_choice=choice)
        output = llm.chat(ASK, TOOLS, **chosen)
        assert bool(output.tool_calls) == is_call
        assert isinstance(output.parsed, Answer) != is_call


def test_a_reply_that_was_cut_off_has_no_value(llm: LLM) -> None:
    params = SamplingParams(max_tokens=3, complete=False)
    output = llm.chat(
        ASK, TOOLS, **options(TEMPLATES["hermes"], response_format=Answer, params=params)
    )
    assert output.finish_reason == "length"
    assert output.parsed is None


def test_what_cannot_stand_beside_tools_is_named(llm: LLM) -> None:
    chosen = options(TEMPLATES["hermes"], response_format=GrammarSpec.lark("start: /a/"))
    with pytest.raises(ConfigError, match=r"response_format='lark'.*tool_choice=\"none\""):
        llm.chat(ASK, TOOLS, **chosen)
