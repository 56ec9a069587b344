"""A streamed chat: its pieces, joined, are the answer that ``chat`` gives."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from guided_spec.engine.chat import ChatChunk
from guided_spec.engine.llm import LLM
from guided_spec.types import SamplingParams
from tests.cases import rotated
from tests.chat_templates import TEMPLATES, THINKING
from tests.engine.test_chat import ASK, LIGHT, THOUGHT, TOOLS, XML, options
from tests.tiny_llm import make_llm, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = copy.deepcopy(tiny_model("llama"))
    model.config.max_position_embeddings = 768
    with make_llm(model, tokenizer=copy.deepcopy(tiny_tokenizer()), max_model_len=768) as made:
        yield made


class Joined(NamedTuple):
    """One sample's pieces. calls: lists of id, name and arguments."""

    text: str
    reasoning: str
    calls: list[list[str]]
    num_tokens: int
    last: ChatChunk


def join(chunks: list[ChatChunk], sample: int = 0) -> Joined:
    chunks = [chunk for chunk in chunks if chunk.sample_index == sample]
    calls: list[list[str]] = []
    complete = set[int]()
    for piece in (piece for chunk in chunks for piece in chunk.tool_calls):
        if piece.call_index == len(calls):
            assert piece.name
            calls.append([piece.id, piece.name, ""])
        else:
            assert not piece.name
            assert not piece.id
        assert piece.call_index not in complete
        calls[piece.call_index][2] += piece.arguments
        if piece.is_complete:
            complete.add(piece.call_index)
            json.loads(calls[piece.call_index][2])
    text = "".join(chunk.text for chunk in chunks)
    reasoning = "".join(chunk.reasoning for chunk in chunks)
    last = chunks[-1].completion
    assert len(complete) >= (0 if last is None else len(last.tool_calls))
    num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
    return Joined(text, reasoning, calls, num_tokens, chunks[-1])


def check(llm: LLM, tools: Any = None, **chosen: Any) -> Joined:
    joined = join(list(llm.stream_chat(ASK, tools, **chosen)))
    whole = llm.chat(ASK, tools, **chosen)
    answer = joined.last.completion
    assert answer is not None
    assert answer.message == whole.message
    assert joined.text.strip() == whole.text.strip()
    assert joined.reasoning == (whole.reasoning or "")
    assert [(id_, name) for id_, name, _ in joined.calls] == [
        (call.id, call.name) for call in whole.tool_calls
    ]
    assert [json.loads(one[2]) for one in joined.calls] == [c.arguments for c in whole.tool_calls]
    assert joined.num_tokens == len(whole.completion.token_ids)
    return joined


@pytest.mark.parametrize("name", ["hermes", "harmony", "glm_4_5", "kimi_k3"])
def test_a_call(llm: LLM, name: str) -> None:
    params = SamplingParams(max_tokens=320, temperature=1.0, seed=3)
    joined = check(llm, TOOLS, **options(TEMPLATES[name], tool_choice="light", params=params))
    assert joined.calls[0][1] == "light"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "choice"), rotated([*TEMPLATES], ["required", "auto", "off"], each=2)
)
def test_every_family(llm: LLM, name: str, choice: str) -> None:
    check(llm, TOOLS, **options(TEMPLATES[name], tool_choice=choice, parallel_tool_calls=False))
    assert (
        name not in XML
        or choice != "required"
        or check(llm, TOOLS, **options(TEMPLATES[name], tool_choice=choice))
    )


def test_reasoning(llm: LLM) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": LIGHT}}
    opened = options(THINKING, variables={"opened": True}, params=THOUGHT, response_format=form)
    assert check(llm, **opened).reasoning
    closed = options(THINKING, variables={"enable_thinking": False}, response_format=form)
    assert not check(llm, **closed).reasoning
    check(llm, TOOLS, **options(THINKING, tool_choice="off"))


def test_text_comes_in_pieces(llm: LLM) -> None:
    chunks = list(llm.stream_chat(ASK, **options(TEMPLATES["hermes"])))
    assert len([chunk for chunk in chunks if chunk.text]) > 10
    whole = llm.chat(ASK, **options(TEMPLATES["hermes"]))
    assert "".join(chunk.text for chunk in chunks) == whole.text


def test_stop_strings_are_never_shown(llm: LLM) -> None:
    free = llm.chat(ASK, **options(TEMPLATES["hermes"])).text
    params = SamplingParams(max_tokens=120, temperature=1.0, seed=3, stop=(free[20:24],))
    joined = check(llm, TOOLS, **options(TEMPLATES["hermes"], params=params))
    assert free[20:24] not in joined.text


def test_a_call_that_is_cut_off(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, complete=False)
    chosen = options(TEMPLATES["hermes"], tool_choice="light", params=params)
    joined = join(list(llm.stream_chat(ASK, TOOLS, **chosen)))
    assert joined.last.completion is not None
    assert joined.last.completion.finish_reason == "length"
    assert joined.last.completion.tool_calls == ()
    assert [name for _, name, _ in joined.calls] in ([], ["light"])
    assert joined.text in ("", joined.last.completion.text)


@pytest.mark.slow
def test_several_samples_and_asyncio(llm: LLM) -> None:
    params = SamplingParams(max_tokens=240, temperature=1.0, seed=3, n=2)
    chosen = options(TEMPLATES["hermes"], tool_choice="required", params=params)

    async def main() -> list[ChatChunk]:
        return [chunk async for chunk in llm.astream_chat(ASK, TOOLS, **chosen)]

    chunks = asyncio.run(main())
    whole = llm.chat(ASK, TOOLS, **chosen)
    ids = set()
    for sample, answer in enumerate(whole.completions):
        joined = join(chunks, sample)
        assert [one[0] for one in joined.calls] == [call.id for call in answer.tool_calls]
        assert joined.text.strip() == answer.text.strip()
        ids |= {call.id for call in answer.tool_calls}
    assert len(ids) == sum(len(answer.tool_calls) for answer in whole.completions)
