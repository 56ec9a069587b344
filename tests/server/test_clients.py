"""Other people's clients against a started server: typed answers, tools and whole agents.

OpenAI's and Anthropic's own are in ``endpoints``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.server.running import ASK, PATIENCE, Contact, Running

TEXT: str = ASK[0]["content"]
SHORT = 20  # tokens: the name has room, and the number has not
MARIA = Contact(name="Maria Lopez", phone="+49 170 5551234")


class Booking(BaseModel):
    """An answer that ends whatever the model would write on and on."""

    is_done: bool


def test_instructor(client: openai.OpenAI) -> None:
    instructor: Any = pytest.importorskip("instructor")
    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        patched = instructor.from_openai(client, mode=mode)
        found = patched.chat.completions.create(
            model="bundled", messages=ASK, response_model=Contact, max_retries=1, max_tokens=100
        )
        assert isinstance(found, Contact)


@pytest.mark.every_case
@pytest.mark.parametrize("uses_responses", [False, True])
def test_langchain(served: Running, *, uses_responses: bool) -> None:
    langchain: Any = pytest.importorskip("langchain_openai")
    url = f"{served.url}/v1"
    options = {"base_url": url, "api_key": "x", "max_tokens": 100}

    def book(seats: int) -> str:
        """Book seats on a train."""
        return f"booked {seats}"

    with httpx.Client(timeout=PATIENCE) as http:  # its own one is shared by all of a process
        chat = langchain.ChatOpenAI(
            model="bundled", use_responses_api=uses_responses, http_client=http, **options
        )
        assert chat.with_structured_output(Contact).invoke(TEXT) == MARIA
        if not uses_responses:
            short = chat.model_copy(update={"max_tokens": SHORT}).with_structured_output(Contact)
            with pytest.raises(openai.LengthFinishReasonError):
                short.invoke(TEXT)
        calling = chat.bind_tools([book], tool_choice="required", parallel_tool_calls=False)
        (call,) = calling.invoke(TEXT).tool_calls
        assert call["name"] == "book"
        assert isinstance(call["args"]["seats"], int)
        assert "".join(piece.text for piece in chat.stream(TEXT))


def _in_loop(url: str, work: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, Any]]) -> Any:
    """What ``work`` returns for a client of its own event loop."""

    async def run() -> Any:
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=PATIENCE
        ) as made:
            return await work(made)

    return asyncio.run(run())


@pytest.mark.slow
@pytest.mark.every_case
@pytest.mark.parametrize("uses_responses", [False, True])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_openai_agents(served: Running, *, uses_responses: bool, is_streamed: bool) -> None:
    """Each turn has tools and a type of the answer: a call, its result, and the typed answer."""
    agents: Any = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    booked: list[int] = []

    def book(seats: int) -> str:
        """Book seats on a train."""
        booked.append(seats)
        return "booked"

    async def work(made: openai.AsyncOpenAI) -> Any:
        kind = "OpenAIResponsesModel" if uses_responses else "OpenAIChatCompletionsModel"
        model = getattr(agents, kind)("bundled", made)
        settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False)
        agent = agents.Agent(
            name="a",
            model=model,
            tools=[agents.function_tool(book)],
            output_type=Booking,
            model_settings=settings,
        )
        if not is_streamed:
            return (await agents.Runner.run(agent, TEXT, max_turns=6)).final_output
        result = agents.Runner.run_streamed(agent, TEXT, max_turns=6)
        async for _ in result.stream_events():
            pass
        return result.final_output

    assert isinstance(_in_loop(served.url, work), Booking)
    assert booked


@pytest.mark.every_case
@pytest.mark.parametrize("uses_responses", [False, True])
def test_openai_agents_answer(served: Running, *, uses_responses: bool) -> None:
    agents: Any = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def work(made: openai.AsyncOpenAI) -> Any:
        kind = "OpenAIResponsesModel" if uses_responses else "OpenAIChatCompletionsModel"
        model = getattr(agents, kind)("bundled", made)
        agent = agents.Agent(name="a", instructions="Be brief.", model=model, output_type=Contact)
        return (await agents.Runner.run(agent, TEXT)).final_output

    assert isinstance(_in_loop(served.url, work), Contact)


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(served: Running, kind: str) -> None:
    ai: Any = pytest.importorskip("pydantic_ai")
    models: Any = pytest.importorskip("pydantic_ai.models.openai")
    providers: Any = pytest.importorskip("pydantic_ai.providers.openai")

    async def work(made: openai.AsyncOpenAI) -> Any:
        provider = providers.OpenAIProvider(openai_client=made)
        model = getattr(models, kind)("bundled", provider=provider)
        found = []
        for output in (ai.NativeOutput(Contact), ai.ToolOutput(Contact)):
            agent = ai.Agent(model, output_type=output, model_settings={"max_tokens": 120})
            found.append((await agent.run(TEXT)).output)
        agent = ai.Agent(model, output_type=ai.NativeOutput(Contact))
        async with agent.run_stream(TEXT) as stream:
            found.append(await stream.get_output())
        return found

    for found in _in_loop(served.url, work):
        assert isinstance(found, Contact)


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
