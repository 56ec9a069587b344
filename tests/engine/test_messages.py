"""Messages are what the template reads of them: all else is refused by name, in every call."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from guided_spec.engine.chats.messages import read_messages
from guided_spec.engine.chats.template import template_reads
from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError, UnknownOptionError
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, tiny_tokenizer

# What it reads of a message in each of the ways that templates have; {# hidden if for #}
TEMPLATE = """{% set ns = namespace(first=messages[0]) %}
{%- macro show(one, other) %}{{ one.by_macro }}{% endmacro %}
{%- if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{%- else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}{% generation %}{{ show(message, 1) }}{% endgeneration %}
{%- set role = message.role %}{% if role in ['ipython', 'tool'] or role != 'critic' %}{% endif %}
{%- if 'by_in' in message and message.get('by_get') %}{{ ns.first.by_namespace }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call['function'].name }}{{ call.extra }}{% endfor %}
{{- (messages | last).by_filter }}{{ loop.previtem.by_loop }}{{ message.content }}
{%- if loop.last %}{% break %}{% endif %}{% endfor %}
{%- for one in messages | selectattr('by_select') %}{% endfor %}{{ (rest + messages)[0].by_sum }}
{%- if thinking is not defined %}{% set thinking = words %}{% endif %}{{ thinking }}{{ tools }}"""
ASK: Any = {"role": "user", "content": "on"}
CALL: Any = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SHORT = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    with make_llm("llama", tokenizer=tokenizer) as made:
        yield made


def test_what_a_template_reads() -> None:
    reads = template_reads(TEMPLATE)
    found = {name for name in reads.fields() if name.startswith("by_")}
    ways = ("macro", "in", "get", "namespace", "filter", "loop", "select", "sum")
    assert found == {f"by_{way}" for way in ways}
    assert reads.fields() - found == {"role", "content", "tool_calls"}
    assert reads.fields("tool_calls", "[]") >= {"function", "extra"}
    assert reads.roles == {"system", "ipython", "tool", "critic"}
    assert reads.variables == {"messages", "thinking", "words", "tools"}
    assert not reads.takes_parts
    assert template_reads("{% for p in messages[0].content %}{{ p.text }}{% endfor %}").takes_parts


def test_a_template_that_is_none_reads_nothing() -> None:
    assert template_reads("{{ if a }").fields() == frozenset()


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        *[({**ASK, word: 1}, rf"^messages\[1\].{word}=1: is not known") for word in ("for", "if")],
        ({**ASK, "hidden": 1}, r"^messages\[1\].hidden=1: is not known"),
        ({**ASK, "nam": "x"}, r"^messages\[1\].nam='x': is not known.*did you mean name\?"),
        ({"content": "a"}, r"^messages\[1\].role=None: must be one of system, developer, user"),
        ({**ASK, "role": "systm"}, r"^messages\[1\].role='systm': .*did you mean system\?"),
        ({**ASK, "role": 3}, r"^messages\[1\].role=3: must be one of"),
        ({"role": "user"}, r"^messages\[1\].content=None: must be text"),
        ({**ASK, "content": 3}, r"^messages\[1\].content=3: must be text, or a list of"),
        (
            {**ASK, "content": [{"type": "image_url", "image_url": {}}]},
            r"^messages\[1\].content\[0\].type='image_url': this model reads text",
        ),
        (
            {**ASK, "content": [{"type": "txt", "text": "a"}]},
            r"^messages\[1\].content\[0\].type='txt': this model reads text: did you mean text\?",
        ),
        ({**ASK, "content": ["a"]}, r"^messages\[1\].content\[0\]='a': must be a dict such as"),
        (
            {**ASK, "content": [{"type": "text"}]},
            r"^messages\[1\].content\[0\].text=None: must be a str",
        ),
        (
            {**ASK, "content": [{"type": "text", "text": "a", "txt": "b"}]},
            r"^messages\[1\].content\[0\].txt='b': is not known here",
        ),
        ("hi", r"^messages\[1\]='hi': must be a dict such as"),
        (
            {"role": "assistant", "tool_calls": [{**CALL, "type": "functon"}]},
            r"^messages\[1\].tool_calls\[0\].type='functon': .*did you mean function\?",
        ),
        (
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "f", "args": "{}"}}],
            },
            r"^messages\[1\].tool_calls\[0\].function.args='\{\}': is not known",
        ),
        *[
            (
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": bad}}],
                },
                r"^messages\[1\].tool_calls\[0\].function.arguments=.*: must be a JSON object",
            )
            for bad in ("{a", "[1]", "1", [1])
        ],
        (
            {"role": "assistant", "tool_calls": [{"type": "function", "function": {}}]},
            r"^messages\[1\].tool_calls\[0\].function.name=None: must be a str",
        ),
        (
            {"role": "assistant", "tool_calls": {}},
            r"^messages\[1\].tool_calls=\{\}: must be a list",
        ),
    ],
)
def test_a_message_is_refused_in_every_call(llm: LLM, message: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_messages([ASK, message], TEMPLATE + "{# hidden #}")
    with pytest.raises(ConfigError, match=reason):
        llm.chat([ASK, message], params=SHORT)
    if isinstance(message, dict):
        with pytest.raises(ConfigError, match=reason):
            llm.generate([ASK, message], SHORT)
        with pytest.raises(ConfigError, match=reason):
            next(llm.map([[ASK, message]], SHORT))


def test_messages_that_are_none(llm: LLM) -> None:
    wrong: list[Any] = ["hi", ASK, 3, None]
    for given in wrong:
        with pytest.raises(ConfigError, match=r"^messages=.*: must be one conversation, a list of"):
            llm.chat(given, params=SHORT)


def test_what_the_template_reads_is_taken() -> None:
    more = {**ASK, "by_get": 1, "name": "x", "tool_calls": [{**CALL, "extra": 2}]}
    assert read_messages([more], TEMPLATE) == [more]
    roles = [{**ASK, "role": role} for role in ("ipython", "critic", "tool", "developer")]
    read = [message["role"] for message in read_messages(roles, TEMPLATE)]
    assert read == ["ipython", "critic", "tool", "system"]  # the last it does not know
    assert read_messages([{"role": "assistant", "content": None}], TEMPLATE)[0]["content"] == ""
    empty = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
    assert read_messages([empty], TEMPLATE)


def test_parts_are_joined_unless_the_template_reads_them() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    assert read_messages([message], TEMPLATE)[0]["content"] == "ab"
    template = "{% for p in messages[0].content %}{{ p.text }}{% endfor %}"
    (read,) = read_messages([message], template)
    assert read["content"] == [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read_messages([read], template) == [read]


def test_variables_that_the_template_does_not_read(llm: LLM) -> None:
    template = "{{ messages[0].content }}{{ enable_thinking }}{# foo #}"
    options: Any = {"chat_template": template, "enable_thinking": True}
    assert llm.chat([ASK], params=SHORT, chat_template_kwargs=options)
    for name, reason in (("foo", "it reads enable_thinking"), ("enable_thinkin", "did you mean")):
        with pytest.raises(UnknownOptionError, match=f"^chat_template_kwargs.{name}=1: .*{reason}"):
            llm.chat([ASK], params=SHORT, chat_template_kwargs={**options, name: 1})
