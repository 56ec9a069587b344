"""One model as the endpoints use it: who may be served, what they get, and what is counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Chunk
from guided_spec.engine.prompt import Prompt
from guided_spec.server.admission import Admission
from guided_spec.server.faults import ApiError, api_error
from guided_spec.server.metrics import Metrics, Tally
from guided_spec.server.settings import ServerSettings
from guided_spec.server.spans import current_span
from guided_spec.types import SamplingParams

__all__ = ["Service"]


class Service:
    """Shared by all requests of a server; used by one event loop."""

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.llm = llm
        self.settings = settings
        self.metrics = Metrics(lambda: llm.load)
        self.admission = Admission(llm.load.num_slots, settings.max_queue)
        self.started = int(time.time())
        template = llm.tokenizer.chat_template
        self.knows_developer = isinstance(template, str) and "developer" in template
        self._token_names = {token: name for name, token in llm.vocabulary.added_tokens}

    @property
    def model_name(self) -> str:
        """What answers call the model."""
        return self.settings.model_names[0]

    def require_model(self, name: str | None) -> None:
        """Raise ApiError, 404, for a model that is not served."""
        if name is not None and name not in self.settings.model_names:
            served = ", ".join(self.settings.model_names)
            message = f"the model {name!r:.80} is not served here; there is {served}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def max_tokens(self, wanted: int | None, param: str) -> int:
        """The output tokens of a sample that asks for so many. Raises ApiError."""
        limit = self.settings.max_output_tokens
        if limit is not None and wanted is not None and wanted > limit:
            message = f"{param}={wanted}: this server writes at most {limit}; ask for less"
            raise ApiError(400, message, code="invalid_value", param=param)
        return wanted or limit or self.llm.max_model_len

    def require_samples(self, num_samples: int) -> None:
        """Raise ApiError for a request of too many samples."""
        limit = self.settings.max_samples
        if num_samples > limit:
            message = f"the request asks for {num_samples} texts, and {limit} is the most"
            raise ApiError(400, message, code="invalid_value", param="n")

    def require_prompt(self, prompt_ids: Sequence[int], param: str) -> None:
        """Raise ApiError for a prompt that is too long. param: the argument that it came in."""
        limit = self.settings.max_prompt_tokens
        if limit is not None and len(prompt_ids) > limit:
            message = f"the prompt has {len(prompt_ids)} tokens, and this server takes {limit}"
            raise ApiError(400, message, code="context_length_exceeded", param=param)

    async def encode(self, prompts: Sequence[Any]) -> list[list[int]]:
        """The tokens of prompts, off the event loop. Raises PromptError and ApiError."""
        encoded = await asyncio.to_thread(lambda: [self.llm.encode(prompt) for prompt in prompts])
        for prompt_ids in encoded:
            self.require_prompt(prompt_ids, "prompt")
        return encoded

    async def chunks(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        param: str | None,
        tally: Tally,
        *,
        is_traced: bool,
    ) -> AsyncGenerator[Chunk, None]:
        """Generate, and count it. Closing it frees the slots.

        param: the argument that a grammar came in. is_traced: whether steps are recorded.
        Raises ApiError for a sample that fails.
        """
        current_span().tell_params(params)
        stream = self.llm.astream(list(prompts), params, on_error="return", trace=is_traced)
        try:
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    tally.count(chunk)
                    if chunk.completion is not None and chunk.completion.error is not None:
                        raise api_error(chunk.completion.error, param)
                    yield chunk
        finally:
            current_span().tell_outcome(self.model_name, tally)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token shows; its name where it shows nothing."""
        shown = self.llm.vocabulary.text_bytes[token_id]
        return shown or self._token_names.get(token_id, "").encode()

    def ends_text(self, token_id: int) -> bool:
        """Whether the token only says that the text is over."""
        return token_id in self.llm.vocabulary.stop_token_ids
