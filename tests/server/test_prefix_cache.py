"""What the server tells of the prefix cache, and whose prompts it holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from guided_spec.engine.llm import LLM
from tests.server.running import PATIENCE, Running, running

MESSAGES: list[Any] = [{"role": "user", "content": "Say where the parcel is now, please. " * 12}]


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    """Two callers, and a model over blocks."""
    with (
        LLM(proposer="none", kernels="packed", max_model_len=512, max_batch_size=2) as llm,
        running(llm, api_keys=("first", "second")) as made,
    ):
        yield made


def cached(keyed: Running, key: str, salt: str | None = None) -> int:
    """Prompt tokens that one chat finds in the cache."""
    url, body = f"{keyed.url}/v1", {} if salt is None else {"cache_salt": salt}
    with openai.OpenAI(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE) as client:
        found = client.chat.completions.create(
            model="bundled", messages=MESSAGES, max_tokens=2, extra_body=body
        )
    assert found.usage is not None
    assert found.usage.prompt_tokens_details is not None
    return found.usage.prompt_tokens_details.cached_tokens or 0


def test_callers_share_prompts_with_themselves_alone(keyed: Running) -> None:
    assert cached(keyed, "first") == 0
    assert cached(keyed, "first") > 0
    assert cached(keyed, "second") == 0
    assert cached(keyed, "first", "another") == 0
    assert cached(keyed, "first", "another") > 0


def test_completions_and_responses_tell_it_too(keyed: Running) -> None:
    url, text = f"{keyed.url}/v1", str(MESSAGES[0]["content"])
    with openai.OpenAI(base_url=url, api_key="second", timeout=PATIENCE) as client:
        for _ in range(2):
            completion = client.completions.create(model="bundled", prompt=text, max_tokens=2)
            response = client.responses.create(model="bundled", input=text, max_output_tokens=2)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens_details is not None
    assert completion.usage.prompt_tokens_details.cached_tokens
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens
