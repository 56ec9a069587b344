"""Other people's clients: instructor and langchain."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.server.running import ASK, PATIENCE, Contact, Running


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
    finally:
        chat.root_client.close()
