"""Log-probabilities of tokens, in the shapes of both endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from guided_spec.server.endpoints.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    LikelyToken,
    TokenLogprob,
)
from guided_spec.server.service import Service
from guided_spec.types import TokenLogprobs

__all__ = ["chat_logprobs", "completion_logprobs"]

_LEAST = -9999.0  # JSON has no -inf


def chat_logprobs(service: Service, tokens: Sequence[TokenLogprobs]) -> ChatLogprobs:
    """Of the tokens that are part of the text."""
    content = [
        TokenLogprob(
            **_likely(service, one.token_id, one.logprob).model_dump(),
            top_logprobs=[_likely(service, top.token_id, top.logprob) for top in one.top],
        )
        for one in tokens
        if not service.ends_text(one.token_id)
    ]
    return ChatLogprobs(content=content)


def _likely(service: Service, token_id: int, logprob: float) -> LikelyToken:
    data = service.token_bytes(token_id)
    text = data.decode("utf-8", errors="replace")
    return LikelyToken(token=text, bytes=list(data), logprob=max(logprob, _LEAST))


def completion_logprobs(
    service: Service, tokens: Sequence[TokenLogprobs], offset: int
) -> CompletionLogprobs:
    """Of the tokens that are part of the text. offset: characters of it before them."""
    found = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for one in tokens:
        if service.ends_text(one.token_id):
            continue
        text = _text(service, one.token_id)
        found.tokens.append(text)
        found.token_logprobs.append(max(one.logprob, _LEAST))
        tops = {_text(service, top.token_id): max(top.logprob, _LEAST) for top in one.top}
        found.top_logprobs.append(tops)
        found.text_offset.append(offset)
        offset += len(text)
    return found


def _text(service: Service, token_id: int) -> str:
    return service.token_bytes(token_id).decode("utf-8", errors="replace")
