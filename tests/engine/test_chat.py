"""Chats with tools, end to end: the template's prompt, the family's calls, the answer's parts."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import jsonschema
import pytest
from pydantic import BaseModel

from guided_spec.engine.chat import ChatOptions
from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError, GrammarCompileError, PromptError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.chat_templates import PLAIN, TEMPLATES, THINKING
from tests.tiny_llm import make_llm, tiny_model, tiny_tokenizer

ASK = [{"role": "user", "content": "Is it on?"}]
LIGHT = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["on", "kind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "light", "parameters": LIGHT}},
    {"type": "function", "function": {"name": "off"}},
]
XML = ("glm_4_5", "glm_4_7", "kimi_k3", "minimax_m2", "mimo", "qwen3_coder")
DEEPSEEK = ("deepseek_v3_2", "deepseek_v4", "deepseek_v4_1")
SHORT = SamplingParams(max_tokens=180, temperature=1.0, seed=3)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = copy.deepcopy(tiny_model("llama"))
    model.config.max_position_embeddings = 768
    with make_llm(model, tokenizer=copy.deepcopy(tiny_tokenizer()), max_model_len=768) as made:
        yield made


def options(template: str, **more: Any) -> ChatOptions:
    variables = {"chat_template": template, **more.pop("variables", {})}
    made = {"params": SHORT, "chat_template_kwargs": variables, **more}
    return cast(ChatOptions, made)


@pytest.mark.slow
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_in_every_family(llm: LLM, name: str) -> None:
    """The grammar's call is read, and the answer goes into the next prompt as a message."""
    params = SamplingParams(max_tokens=360, temperature=1.0, seed=3)
    choice: dict[str, Any] = {"tool_choice": "light", "parallel_tool_calls": False}
    chosen = options(TEMPLATES[name], params=params, variables={"thinking": False}, **choice)
    output = llm.chat(ASK, TOOLS, **chosen)
    (call,) = output.tool_calls
    assert call.name == "light"
    jsonschema.validate(call.arguments, LIGHT)
    assert output.finish_reason == "tool_calls"
    own = {"kimi_k2": r"functions\.light:\d+", "kimi_k3": r"\d+", "command_a": r"\d+"}
    assert re.fullmatch(own.get(name, "[a-zA-Z0-9]{9}"), call.id)
    done = {"role": "tool", "tool_call_id": call.id, "content": "ok"}
    more = llm._chat.request([*ASK, output.message, done], TOOLS, chosen)
    prompt = llm.tokenizer.decode(more.prompt_ids)
    kind = call.arguments["kind"]
    shown = kind if name in (*XML, *DEEPSEEK) else json.dumps(kind)
    assert shown in prompt.rpartition("Is it on?")[2]
    assert len(more.prompt_ids) < 768


def test_a_message_from_openai_s_client_means_the_same(llm: LLM) -> None:
    chosen = options(TEMPLATES["hermes"], tool_choice="light")
    message = llm.chat(ASK, TOOLS, **chosen).message
    other = copy.deepcopy(message)
    function = other["tool_calls"][0]["function"]
    function["arguments"] = json.dumps(function["arguments"])
    before = copy.deepcopy(other)
    prompts = [llm._chat.request([*ASK, one], TOOLS, chosen).prompt_ids for one in (message, other)]
    assert prompts[0] == prompts[1]
    assert other == before


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_text_without_calls(llm: LLM, choice: str) -> None:
    output = llm.chat(ASK, TOOLS, **options(TEMPLATES["hermes"], tool_choice=choice))
    assert output.text
    assert output.tool_calls == ()
    assert output.finish_reason in ("stop", "length")
    assert output.message == {"role": "assistant", "content": output.text}


def test_no_tools_is_generate() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATES["hermes"]
    with make_llm("llama", tokenizer=tokenizer, max_model_len=512) as other:
        output = other.chat(ASK, params=SHORT)
        (expected,) = other.generate([ASK], SHORT)
        assert output.completion.token_ids == expected.token_ids
        assert output.text == expected.text
        assert "".join(chunk.text for chunk in other.stream([ASK], SHORT)) == expected.text


def test_functions_and_models_are_tools(llm: LLM) -> None:
    def light(seats: int, kind: str = "cat") -> str:
        """
        Switch a light.

        Args:
            seats: How many.
            kind: Which one.
        """
        return f"{seats} {kind}"

    class Off(BaseModel):
        """Switch all off."""

        hard: bool

    output = llm.chat(ASK, [light, Off], **options(TEMPLATES["hermes"], tool_choice="Off"))
    (call,) = output.tool_calls
    assert Off(**call.arguments).hard in (True, False)
    output = llm.chat(ASK, [light], **options(TEMPLATES["llama3"], tool_choice="required"))
    assert output.tool_calls[0].arguments.keys() <= {"seats", "kind"}


THOUGHT = SamplingParams(max_tokens=150, seed=3, temperature=1.0)


def test_reasoning_that_the_prompt_opens(llm: LLM) -> None:
    chosen = options(THINKING, variables={"opened": True}, tool_choice="required", params=THOUGHT)
    output = llm.chat(ASK, TOOLS, **chosen)
    assert output.reasoning
    assert "</think>" not in output.reasoning + output.text
    assert output.tool_calls
    assert output.message["reasoning_content"] == output.reasoning
    chosen = options(
        THINKING,
        variables={"opened": True},
        params=THOUGHT,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": LIGHT}},
    )
    output = llm.chat(ASK, **chosen)
    assert output.reasoning
    jsonschema.validate(json.loads(output.text), LIGHT)


def test_reasoning_switched_off(llm: LLM) -> None:
    chosen = options(THINKING, variables={"enable_thinking": False}, tool_choice="required")
    output = llm.chat(ASK, TOOLS, **chosen)
    assert output.reasoning is None
    assert output.tool_calls


def test_reasoning_is_left_to_the_model(llm: LLM) -> None:
    """The grammar takes a call with reasoning before it, and without."""
    request = llm._chat.request(ASK, TOOLS, options(THINKING, tool_choice="off"))
    assert request.params.grammar is not None
    call = '<tool_call>\n{"name": "off", "arguments": {}}\n</tool_call>'
    for text, reasoning in ((call, None), (f"<think>\nHm.\n</think>\n\n{call}", "Hm.")):
        compiled = llm._grammars.submit(request.params.grammar).result()
        token_ids = llm.tokenizer(text, add_special_tokens=False)["input_ids"]
        matcher = compiled.new_matcher()
        assert all(map(matcher.accept_token, token_ids)), text
        read = request.reader.read(request.reader.marks.read(token_ids))
        assert (read.reasoning, read.calls[0].name) == (reasoning, "off")


def test_a_grammar_of_one_s_own_behind_a_marker(llm: LLM) -> None:
    params = SamplingParams(
        max_tokens=90, grammar=GrammarSpec.choice(["yes", "no"]).after("[go]", reasoning_budget=9)
    )
    output = llm.chat(ASK, **options(TEMPLATES["hermes"], params=params))
    assert output.text in ("yes", "no")
    assert output.reasoning is not None
    assert (
        output.completion.text == f"{output.completion.text.partition('[go]')[0]}[go]{output.text}"
    )


def test_harmony_without_tools(llm: LLM) -> None:
    chosen = options(
        TEMPLATES["harmony"], response_format={"type": "regex_schema", "regex_schema": "[0-9]{3}"}
    )
    chosen["params"] = SamplingParams(max_tokens=150, temperature=1.0, seed=5)
    output = llm.chat(ASK, **chosen)
    assert output.text.endswith(output.completion.text[-3:])
    assert output.text[-3:].isdigit()


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("choice", ["no tools", "auto", "none", "off"])
def test_kimi_k3_reasons_and_responds(llm: LLM, choice: str, thinking: Any) -> None:
    """The prompt opens one of the two parts, and tags end them, with tools and without."""
    params = replace(SHORT, max_tokens=360)
    chosen = options(TEMPLATES["kimi_k3"], variables={"thinking": thinking}, params=params)
    chosen["response_format"] = {"type": "regex_schema", "regex_schema": "[0-9]{3}"}
    tools = [] if choice == "no tools" else TOOLS
    chosen["tool_choice"] = choice if tools else "auto"
    output = llm.chat(ASK, tools, **chosen)
    assert (output.reasoning is not None) == thinking
    assert bool(output.tool_calls) != bool(output.text)
    assert choice != "off" or output.tool_calls
    assert output.tool_calls or re.fullmatch("[0-9]{3}", output.text)
    assert "<|" not in output.text


@pytest.mark.parametrize("thinking", [True, False])
def test_kimi_k3_writes_free_text(llm: LLM, thinking: Any) -> None:
    free = llm.chat(ASK, TOOLS, **options(TEMPLATES["kimi_k3"], variables={"thinking": thinking}))
    assert "response<|sep|>" not in free.text


def test_several_answers(llm: LLM) -> None:
    params = SamplingParams(max_tokens=120, n=3, temperature=1.0, seed=1)
    chosen = options(TEMPLATES["hermes"], params=params, tool_choice="required")
    output = llm.chat(ASK, TOOLS, **chosen)
    assert len(output.completions) == 3
    assert all(one.tool_calls for one in output.completions)


def test_stop_strings_are_no_part_of_it(llm: LLM) -> None:
    free = llm.chat(ASK, **options(TEMPLATES["hermes"])).text
    stop = free[20:22]
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=3, stop=(stop,))
    output = llm.chat(ASK, **options(TEMPLATES["hermes"], params=params))
    assert output.text == free.partition(stop)[0]


def test_tokens_that_end_the_text_are_no_part_of_it(llm: LLM) -> None:
    free = llm.chat(ASK, **options(PLAIN)).completion
    token = next(one for one in free.token_ids[8:] if len(llm.vocabulary.text_bytes[one]) > 1)
    params = SamplingParams(max_tokens=180, temperature=1.0, seed=3, stop_token_ids=(token,))
    output = llm.chat(ASK, **options(PLAIN, params=params))
    assert output.completion.token_ids[-1] == token
    assert output.text == output.completion.text
    pieces = llm.stream_chat(ASK, **options(PLAIN, params=params))
    assert "".join(piece.text for piece in pieces) == output.text


def test_achat(llm: LLM) -> None:
    chosen = options(TEMPLATES["mistral"], tool_choice="light")
    output = asyncio.run(llm.achat(ASK, TOOLS, **chosen))
    assert output.tool_calls == llm.chat(ASK, TOOLS, **chosen).tool_calls


def test_a_prompt_begins_once() -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.bos_token = "<eos>"
    tokenizer.chat_template = TEMPLATES["llama3"]
    with make_llm("llama", tokenizer=tokenizer, max_model_len=512) as other:
        prompt_ids = other._chat.request(ASK, TOOLS, {}).prompt_ids
        assert prompt_ids.count(tokenizer.bos_token_id) == 1


GRAMMAR = SamplingParams(grammar=GrammarSpec.choice(["a"]))
JSON = {"type": "json_object"}


@pytest.mark.parametrize(
    ("tools", "chosen", "reason"),
    [
        (TOOLS, options(PLAIN), "tool_format=None.*hermes"),
        (TOOLS, options("{{ messages[0].content }}"), "does not render tools"),
        (TOOLS, options(TEMPLATES["hermes"], tool_format="x"), "tool_format='x'"),
        (TOOLS, options(TEMPLATES["hermes"], tool_choice="x"), "tool_choice='x'.*light, off"),
        (None, options(TEMPLATES["hermes"], response_format=JSON, params=GRAMMAR), "leave one"),
        (None, options(TEMPLATES["hermes"], params=SamplingParams(echo=True)), "params.echo"),
        (None, options(TEMPLATES["hermes"], params={"echo": True}), "must be a SamplingParams"),
        (None, {"tool_chioce": "auto"}, "tool_chioce=.*tool_choice"),
        (["x"], options(TEMPLATES["hermes"]), r"tools\[0\]='x'"),
        ([lambda on: on], options(TEMPLATES["hermes"]), "docstring"),
    ],
)
def test_mistakes_are_named(llm: LLM, tools: Any, chosen: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        llm.chat(ASK, tools, **chosen)


def test_tool_format_by_name(llm: LLM) -> None:
    output = llm.chat(ASK, TOOLS, **options(PLAIN, tool_format="mistral", tool_choice="off"))
    assert output.tool_calls[0].raw == '{"name": "off", "arguments": {}}'


def test_what_fails_later_raises_too(llm: LLM) -> None:
    broken = SamplingParams(grammar=GrammarSpec.ebnf("root ::= ("))
    with pytest.raises(GrammarCompileError):
        llm.chat(ASK, **options(TEMPLATES["hermes"], params=broken))
    with pytest.raises(PromptError, match="tokens"):
        llm.chat([{"role": "user", "content": "a b " * 600}], **options(TEMPLATES["hermes"]))
    with pytest.raises(PromptError, match="chat template"):
        llm.chat(ASK)
    with pytest.raises(PromptError, match="chat template"):
        llm.chat(ASK, **options("{{ raise_exception('no') }}"))
    with pytest.raises(ConfigError, match=r"^messages\[0\].tool_calls=3: must be a list"):
        llm.chat([{"role": "assistant", "tool_calls": 3}], **options(TEMPLATES["hermes"]))
    with pytest.raises(PromptError, match="chat template"):
        llm.chat(ASK, **options(TEMPLATES["hermes"], variables={"messages": 4}))
    with pytest.raises(ConfigError, match="one conversation"):
        llm.chat("hi")  # type: ignore[arg-type]
