from __future__ import annotations

import pytest

from tests.models.tiny import build
from tests.tiny_llm import VOCAB_SIZE, tiny_tokenizer


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model and its tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("model")
    build("llama", 0, VOCAB_SIZE).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
