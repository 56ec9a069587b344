"""A request names an adapter as its model, as in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from guided_spec.bundled import bundled_asset
from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError
from guided_spec.models.loading import load_model
from guided_spec.server.app import build_app
from guided_spec.server.service import ServerSettings
from guided_spec.types import SamplingParams
from tests.adapters import write_adapter
from tests.server.running import ASK, Running, running


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    base = load_model(bundled_asset("target"), device="cpu")
    folder = write_adapter(base, tmp_path_factory.mktemp("adapter"), target_modules="all-linear")
    with LLM(max_model_len=1024, max_batch_size=2, loras={"sql": folder}) as llm:
        yield llm


@pytest.fixture(scope="module")
def served(adapted: LLM) -> Iterator[Running]:
    with running(adapted) as made:
        yield made


def test_the_model_and_its_adapters_are_listed(client: openai.OpenAI) -> None:
    cards = [one.model_dump() for one in client.models.list().data]
    assert [(one["id"], one.get("parent")) for one in cards] == [
        ("bundled", None),
        ("sql", "bundled"),
    ]
    assert "parent" not in cards[0]
    assert client.models.retrieve("sql").model_dump()["parent"] == "bundled"


def test_each_endpoint_writes_with_the_adapter(
    client: openai.OpenAI, served: Running, adapted: LLM
) -> None:
    options: dict[str, Any] = {"prompt": "The name is", "max_tokens": 8}
    replies = {
        name: client.completions.create(model=name, **options) for name in ("bundled", "sql")
    }
    for name, reply in replies.items():
        lora = "sql" if name == "sql" else None
        params = SamplingParams(max_tokens=8, lora=lora)
        assert reply.choices[0].text == adapted.generate("The name is", params)[0].text
        assert reply.model == name
    assert len({reply.choices[0].text for reply in replies.values()}) == 2
    chat = client.chat.completions.create(model="sql", messages=ASK, max_tokens=8)
    own = adapted.chat(ASK, params=SamplingParams(max_tokens=8, lora="sql"))
    assert (chat.model, chat.choices[0].message.content) == ("sql", own.text)
    response = client.responses.create(model="sql", input=ASK, max_output_tokens=16)
    assert response.model == "sql"
    body = {"model": "sql", "messages": ASK, "max_tokens": 8}
    message = served.post("/v1/messages", body).json()
    assert (message["model"], message["content"][0]["text"]) == ("sql", own.text)
    assert served.post("/tokenize", {"model": "sql", "prompt": "a"}).status_code == 200


def test_other_names_are_not_served(client: openai.OpenAI) -> None:
    with pytest.raises(
        openai.NotFoundError, match="'sqll' is not served here; there is bundled, s"
    ):
        client.completions.create(model="sqll", prompt="a")


def test_a_name_is_the_model_s_or_an_adapter_s(adapted: LLM) -> None:
    with pytest.raises(ConfigError, match="loras='sql': the model is called so"):
        build_app(adapted, ServerSettings(model_names=("sql",)))
