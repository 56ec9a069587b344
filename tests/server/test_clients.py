"""Other people's clients: instructor and langchain."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.server.running import ASK, PATIENCE, Contact, Running

SHORT = 20  # tokens: the name has room, and the number has not


def test_instructor(client: openai.OpenAI) -> None:
    instructor: Any = pytest.importorskip("instructor")
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        patched = instructor.from_openai(client, mode=mode)
        found = patched.chat.completions.create(
            model="bundled", messages=ASK, response_model=Contact, max_retries=1, max_tokens=100
        )
        assert isinstance(found, Contact)


def test_langchain(served: Running) -> None:
    langchain: Any = pytest.importorskip("langchain_openai")
    url = f"{served.url}/v1"
    chat = langchain.ChatOpenAI(model="bundled", base_url=url, api_key="x", timeout=PATIENCE)
    try:
        structured = chat.with_structured_output(Contact)
        found = structured.invoke(ASK[0]["content"])
        assert found == Contact(name="Maria Lopez", phone="+49 170 5551234")
        short = chat.model_copy(update={"max_tokens": SHORT}).with_structured_output(Contact)
        with pytest.raises(openai.LengthFinishReasonError):
            short.invoke(ASK[0]["content"])
    finally:
        chat.root_client.close()


def test_instructor_refuses_a_shortened_object(client: openai.OpenAI, served: Running) -> None:
    instructor: Any = pytest.importorskip("instructor")
    from instructor.core.exceptions import IncompleteOutputException

    asked = {"model": "bundled", "messages": ASK, "response_model": Contact, "max_retries": 1}
    clients = [
        (instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA), SHORT),
        (instructor.from_openai(client, mode=instructor.Mode.TOOLS), SHORT + 16),
    ]
    for patched, most in clients:
        with pytest.raises(IncompleteOutputException):
            patched.chat.completions.create(**asked, max_tokens=most)
    anthropic: Any = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=served.url, api_key="x", max_retries=0) as own:
        with pytest.raises(IncompleteOutputException):
            instructor.from_anthropic(own).messages.create(**asked, max_tokens=SHORT + 16)
        found = own.messages.parse(
            model="bundled", messages=ASK, max_tokens=SHORT, output_format=Contact
        )
    assert isinstance(found.parsed_output, Contact)
    assert found.stop_reason == "max_tokens"


def test_pydantic_ai_takes_a_shortened_object(served: Running) -> None:
    pydantic_ai: Any = pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask() -> Any:
        url = f"{served.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="x", timeout=PATIENCE) as own:
            agent = pydantic_ai.Agent(
                OpenAIChatModel("bundled", provider=OpenAIProvider(openai_client=own)),
                output_type=pydantic_ai.NativeOutput(Contact),
                model_settings={"max_tokens": SHORT},
            )
            return (await agent.run(ASK[0]["content"])).output

    found = asyncio.run(ask())
    assert (found.name, len(found.phone) < len("+49 170 5551234")) == ("Maria Lopez", True)
