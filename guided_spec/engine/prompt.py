"""Prompts of every kind the user may pass, as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from guided_spec.errors import PromptError

__all__ = ["Message", "Prompt", "PromptEncoder", "split_prompts", "text_ids"]

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
"""Text, token ids, or chat messages such as ``{"role": "user", "content": "..."}``."""


def split_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list of prompts.

    A list of ints is one prompt of token ids, a list of dicts is one chat.
    """
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        return [prompts]
    if prompts and all(isinstance(part, int | Mapping) for part in prompts):
        return [prompts]  # type: ignore[list-item]  # just checked
    return list(prompts)  # type: ignore[arg-type]


class PromptEncoder:
    """Turns prompts into token ids and refuses those that cannot run.

    tokenizer: a Hugging Face tokenizer. max_model_len: tokens a request may hold, the prompt and at
    least one generated token.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def encode(self, prompt: Prompt) -> list[int]:
        """At least one token id. Raises PromptError."""
        token_ids = self._token_ids(prompt)
        if not token_ids:
            bos = getattr(self._tokenizer, "bos_token_id", None)
            if bos is None:
                raise PromptError("prompt='': it has no tokens; pass at least one word")
            token_ids = [bos]
        if len(token_ids) >= self._max_model_len:
            raise PromptError(
                f"prompt has {len(token_ids)} tokens, but only {self._max_model_len - 1} fit "
                f"before the first generated one: shorten it, or raise max_model_len"
            )
        return token_ids

    def text(self, prompt: Prompt) -> str | None:
        """What the prompt reads: text as it is, a chat as its template renders it.

        None for token ids. Raises PromptError.
        """
        if isinstance(prompt, str):
            return prompt
        return self._render(prompt) if _is_chat(prompt) else None

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return text_ids(self._tokenizer, prompt)
        if not isinstance(prompt, Sequence):
            kind = type(prompt).__name__
            raise PromptError(f"prompt is a {kind}: pass a str, token ids or chat messages")
        if _is_chat(prompt):
            text = self._render(prompt)
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        return [self._checked(token) for token in prompt]

    def _render(self, messages: Sequence[Any]) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise PromptError("prompt is a chat, but the tokenizer has no chat template: pass text")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=True,
                tokenize=False,
            )
        except Exception as error:  # a template may raise anything
            raise PromptError(f"prompt: the chat template refused it: {error}") from error
        return text

    def _checked(self, token: Any) -> int:
        if isinstance(token, bool) or not isinstance(token, int):
            raise PromptError(f"prompt holds {token!r}: token ids must be ints")
        if not 0 <= token < self._vocab_size:
            raise PromptError(
                f"prompt holds token {token}: ids must be below the vocabulary's {self._vocab_size}"
            )
        return token


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text that begins a sequence, with what the tokenizer adds.

    It adds nothing to a text that begins with its beginning-of-text token, as a rendered chat does.
    """
    bos = getattr(tokenizer, "bos_token", None)
    has_bos = isinstance(bos, str) and bos != "" and text.startswith(bos)
    return list(tokenizer(text, add_special_tokens=not has_bos)["input_ids"])


def _is_chat(prompt: Sequence[Any]) -> bool:
    return bool(prompt) and all(isinstance(part, Mapping) for part in prompt)
