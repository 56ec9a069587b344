"""One model and one server for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import torch

from guided_spec.engine.llm import LLM
from tests.server.running import PATIENCE, Running, running


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # server and clients need the other core
    with LLM(max_model_len=1024, max_batch_size=4) as made:
        yield made
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def served(llm: LLM) -> Iterator[Running]:
    with running(llm, max_queue=16) as made:
        yield made


@pytest.fixture
def client(served: Running) -> Iterator[openai.OpenAI]:
    url = f"{served.url}/v1"
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0, timeout=PATIENCE) as made:
        yield made
