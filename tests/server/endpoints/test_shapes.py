"""What the server answers is what OpenAI's own types take, field by field."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel

from guided_spec.server.endpoints import replies

# Fields that OpenAI's types lack: vLLM's names, ours, and two that OpenAI's server sends anyway.
OURS = {"reasoning_content", "max_model_len", "status", "trace", "shortened_texts"}
OURS |= {"custom", "store", "parent"}
PAIRS: list[tuple[type[BaseModel], type[BaseModel]]] = [
    (replies.ChatReply, ChatCompletion),
    (replies.ChatChunkReply, ChatCompletionChunk),
    (replies.CompletionReply, Completion),
    (replies.ModelCard, Model),
    (replies.ResponseReply, Response),
]


def models(annotation: Any) -> list[type[BaseModel]]:
    """The models that a field's type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in models(part)]


def differences(mine: type[BaseModel], theirs: type[BaseModel], place: str) -> list[str]:
    """Fields that they lack, and required ones that we lack, at every depth."""
    found = [
        f"{place}.{name}: unknown"
        for name in mine.model_fields.keys() - theirs.model_fields.keys() - OURS
    ]
    for name, field in theirs.model_fields.items():
        own = mine.model_fields.get(name)
        if own is None:
            if field.is_required():
                found.append(f"{place}.{name}: missing")
            continue
        for part in models(own.annotation):
            kinds = models(field.annotation)
            options = [differences(part, kind, f"{place}.{name}") for kind in kinds]
            found += sorted(options, key=len)[0] if options else []
    return found


@pytest.mark.parametrize(("mine", "theirs"), PAIRS, ids=lambda kind: kind.__name__)
def test_fields(mine: type[BaseModel], theirs: type[BaseModel]) -> None:
    assert differences(mine, theirs, mine.__name__) == []


def test_differences_are_found() -> None:
    found = differences(replies.ModelCard, ChatCompletion, "card")
    assert {"card.owned_by: unknown", "card.choices: missing"} <= set(found)


def test_what_is_absent_is_left_out() -> None:
    assert replies.Delta(content="a").model_dump() == {"content": "a"}
    message = replies.MessageReply(content=None).model_dump()
    assert message == {"role": "assistant", "content": None, "refusal": None}
