"""The bundled target's tokenizer and held-out documents, which every test here reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from guided_spec.bundled import bundled_asset
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.tokenizer import load_tokenizer

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Its template puts another text behind a question once it is answered. Not to be changed."""
    return load_tokenizer(bundled_asset("target"))


@pytest.fixture(scope="session")
def chat_tokenizer() -> Any:
    """The same with a template whose chats begin as their shorter ones do."""
    tokenizer = load_tokenizer(bundled_asset("target"))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary.from_tokenizer(tokenizer, len(tokenizer), (0,))


@pytest.fixture(scope="session")
def heldout() -> Path:
    return Path(bundled_asset("heldout.jsonl"))


@pytest.fixture(scope="session")
def records(heldout: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in heldout.read_text(encoding="utf-8").splitlines()]
