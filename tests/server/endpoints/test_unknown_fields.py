"""A field that the server does not know is refused by its name; null asks for nothing."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from guided_spec.server.endpoints.bodies import (
    ChatBody,
    CompletionBody,
    ResponsesBody,
    TokenizeBody,
)

ASKED: dict[type[pydantic.BaseModel], dict[str, Any]] = {
    ChatBody: {"messages": [{"role": "user", "content": "Hi"}]},
    CompletionBody: {"prompt": "Hi"},
    ResponsesBody: {"input": "Hi"},
    TokenizeBody: {"prompt": "Hi"},
}


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_it_is_named(kind: type[pydantic.BaseModel]) -> None:
    with pytest.raises(pydantic.ValidationError, match="no_such_field") as caught:
        kind.model_validate({**ASKED[kind], "no_such_field": 1})
    assert [error["type"] for error in caught.value.errors()] == ["extra_forbidden"]


@pytest.mark.every_case
@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_null_asks_for_nothing(kind: type[pydantic.BaseModel]) -> None:
    asked = kind.model_validate(ASKED[kind])
    assert kind.model_validate({**ASKED[kind], "no_such_field": None}) == asked
