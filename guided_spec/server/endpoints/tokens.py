"""``/tokenize``: the tokens of a prompt or of a conversation."""

from __future__ import annotations

from typing import Any

from fastapi.responses import Response

from guided_spec.engine.chat import ChatOptions
from guided_spec.engine.chats.messages import num_letters, read_messages
from guided_spec.engine.prompt import Prompt
from guided_spec.server.endpoints.bodies import TokenizeBody
from guided_spec.server.endpoints.messages import template_variables
from guided_spec.server.endpoints.replies import TokenizeReply
from guided_spec.server.faults import invalid_value, json_response
from guided_spec.server.service import Service


async def tokenized(service: Service, body: TokenizeBody) -> Response:
    """The response to one request. Raises ApiError."""
    service.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid_value("prompt: pass prompt or messages, one of them", "prompt")
    param = "prompt" if body.messages is None else "messages"
    async with service.room.turn(body.messages or ()):
        prompt: Any = body.prompt
        if body.messages is not None:
            prompt = await service.workers.run_out(lambda: _chat_prompt(service, body))
        (token_ids,) = await service.encode([prompt], param)
        del prompt  # it may have large arrays
    return await service.workers.run(lambda: _reply(service, body, token_ids))


def _chat_prompt(service: Service, body: TokenizeBody) -> Prompt:
    assert body.messages is not None  # as the caller knows
    messages = read_messages(body.messages, service.template, service.picture_rules)
    service.require_length(num_letters(messages), "messages", unit="characters")
    variables = template_variables(body.chat_template_kwargs, service.template_arguments)
    options: ChatOptions = {"chat_template_kwargs": variables}
    return service.llm.prepare_chat(messages, body.tools, **options).prompt


def _reply(service: Service, body: TokenizeBody, token_ids: list[int]) -> Response:
    texts = None
    if body.return_token_strs:
        texts = [service.token_bytes(token).decode("utf-8", "replace") for token in token_ids]
    reply = TokenizeReply(
        count=len(token_ids),
        max_model_len=service.llm.max_model_len,
        tokens=token_ids,
        token_strs=texts,
    )
    return json_response(reply.model_dump())
