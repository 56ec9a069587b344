"""Prompts of every kind the user may pass, as token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from guided_spec.engine.chats.messages import pictures_of, read_messages
from guided_spec.engine.chats.picture_reader import PictureReader
from guided_spec.engine.chats.pictures import PictureRules
from guided_spec.engine.chats.template import template_text
from guided_spec.errors import ConfigError, PromptError, PromptTooLongError
from guided_spec.models.pictures.picture import PicturePrompt, Sight
from guided_spec.ops.sampling.adjust import Words, spell_bad_words
from guided_spec.types import SamplingParams

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | NDArray[Any] | Tensor | Sequence[Message] | PicturePrompt
"""Text, token ids in a list or in an array of one dimension, or chat messages such as
``{"role": "user", "content": "..."}``; or what ``prepare_chat`` made of messages with pictures."""
Prompts = Prompt | Iterable[Prompt] | Mapping[str, Any]
"""One prompt, several in any iterable or as the rows of an array, or what a tokenizer returned: a
``BatchEncoding``, whose attention mask says what is padding."""

NO_VARIABLES: Mapping[str, Any] = {}
NO_SIGHT = Sight("pictures are not read here")
_TEXTS = (str, bytes, bytearray)
_QUIET = {"verbose": False}  # a tokenizer warns of long texts; those that do not fit are refused
_KINDS = "pass a str, a list of token ids, or a list of chat messages"


def split_prompts(prompts: Prompts) -> list[Prompt]:
    """One prompt or several, as a list of prompts.

    A list of ints is one prompt of token ids, a list of dicts is one chat. What is no prompt stands
    in the list as it is: ``PromptEncoder`` refuses it alone.
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return _unpadded(prompts)
    if isinstance(prompts, np.ndarray | Tensor):
        return list(prompts) if prompts.ndim == 2 or _holds_text(prompts) else [prompts]
    if isinstance(prompts, (*_TEXTS, Mapping)) or not isinstance(prompts, Iterable):
        return [prompts]  # type: ignore[list-item]  # the encoder looks at it
    listed: Any = list(prompts)
    if listed and all(isinstance(part, int | np.integer | Mapping) for part in listed):
        is_encoded = all(isinstance(part, Mapping) and "input_ids" in part for part in listed)
        if is_encoded:
            return [row for part in listed for row in _unpadded(part)]
        return [prompts if isinstance(prompts, Sequence) else listed]
    return list(listed)


def _holds_text(prompts: NDArray[Any] | Tensor) -> bool:
    return isinstance(prompts, np.ndarray) and prompts.ndim == 1 and prompts.dtype.kind in "OU"


def _unpadded(encoded: Mapping[str, Any]) -> list[Prompt]:
    """The rows of a ``BatchEncoding`` without their padding."""
    ids, mask = (_plain(encoded.get(name)) for name in ("input_ids", "attention_mask"))
    if ids and not isinstance(ids[0], list):
        ids, mask = [ids], None if mask is None else [mask]
    if mask is None:
        return list(ids)
    pairs = (zip(row, kept, strict=True) for row, kept in zip(ids, mask, strict=True))
    return [[token for token, is_kept in pair if is_kept] for pair in pairs]


def _plain(values: Any) -> Any:
    """Arrays as lists."""
    return values.tolist() if isinstance(values, np.ndarray | Tensor) else values


class ReadPrompt(NamedTuple):
    """token_ids: at least one. pictures: the same prompt with its pictures; None without any."""

    token_ids: list[int]
    pictures: PicturePrompt | None = None


class PromptEncoder:
    """Turns prompts into token ids and refuses those that cannot run.

    tokenizer: a Hugging Face tokenizer. max_model_len: tokens a request may hold, the prompt and at
    least one generated token. pictures: reads those of chats; None refuses them.
    """

    def __init__(
        self,
        tokenizer: Any,
        vocab_size: int,
        max_model_len: int,
        pictures: PictureReader | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len

    def encode(self, prompt: Prompt) -> list[int]:
        """At least one token id; of a picture one that stands for each. Raises PromptError."""
        return self.read(prompt).token_ids

    @property
    def picture_rules(self) -> PictureRules:
        """What messages may have of pictures."""
        return PictureRules(self.sight.refusal, videos=self.sight.videos)

    @property
    def pictures(self) -> PictureReader | None:
        """What reads them; None without one."""
        return self._pictures

    @property
    def processor(self) -> Any:
        """What reads pictures, of transformers; None without one."""
        return None if self._pictures is None else self._pictures.processor

    @property
    def sight(self) -> Sight:
        """Whether and how the model reads pictures."""
        return NO_SIGHT if self._pictures is None else self._pictures.sight

    def read(self, prompt: Prompt) -> ReadPrompt:
        """A prompt as the engine takes it. Raises PromptError, and ConfigError for messages."""
        if isinstance(prompt, PicturePrompt):
            if self._pictures is None or self.sight.refusal is not None:
                reason = f"this model reads text: {self.sight.refusal}"
                raise PromptError(f"prompt has pictures: {reason}; pass one without")
            self._pictures.require_read(prompt)
            token_ids, pictures = ReadPrompt(prompt.token_ids, prompt)
        elif _is_chat(prompt):
            read = self.read_chat(prompt)
            token_ids, pictures = self.encode_chat(self.render(read), read)
        else:
            token_ids, pictures = ReadPrompt(self._token_ids(prompt))
        if not token_ids:
            bos = getattr(self._tokenizer, "bos_token_id", None)
            if bos is None:
                raise PromptError("prompt='': it has no tokens; pass at least one word")
            token_ids = [bos]
        for token in self.sight.placeholders if pictures is None else ():
            if token in token_ids:
                at, fix = token_ids.index(token), "pass messages with pictures to chat"
                fix += ", and the prompt of prepare_chat to generate"
                raise PromptError(f"prompt holds token {token} at {at}, a picture's place: {fix}")
        self._require_short(token_ids)
        return ReadPrompt(token_ids, pictures)

    def _require_short(self, token_ids: Sequence[int]) -> None:
        if len(token_ids) >= self._max_model_len:
            raise PromptTooLongError(
                f"prompt has {len(token_ids)} tokens, but only {self._max_model_len - 1} fit "
                f"before the first generated one: shorten it, or raise max_model_len"
            )

    def bad_words(self, params: SamplingParams) -> Words:
        """The token sequences that ``params.bad_words`` stand for. Raises ConfigError."""
        return spell_bad_words(params, self._tokenizer, self._vocab_size)

    async def bad_words_aside(self, params: Sequence[SamplingParams]) -> list[Words | None]:
        """``bad_words`` of each, from other threads: many strings take tens of milliseconds.

        None of those without strings, and of those that are refused: who spells them says why.
        """
        found: dict[int, Words | None] = {}
        for one in params:
            if id(one) not in found and any(isinstance(word, str) for word in one.bad_words):
                with suppress(ConfigError):
                    found[id(one)] = await asyncio.to_thread(self.bad_words, one)
        return [found.get(id(one)) for one in params]

    def text(self, prompt: Prompt) -> str | None:
        """What the prompt reads: text as it is, a chat as its template renders it.

        None for token ids. Raises PromptError.
        """
        if isinstance(prompt, str):
            return prompt
        return self.render(prompt) if _is_chat(prompt) else None

    def encode_chat(self, text: str, messages: Sequence[Any]) -> ReadPrompt:
        """A rendered chat, with the pictures of its messages as read. Raises PromptError."""
        pictures = pictures_of(messages)
        if not pictures:
            return ReadPrompt(self.encode_rendered(text))
        assert self._pictures is not None, "messages of others are read without pictures"
        found = self._pictures.encode(_readable(text), pictures)
        return ReadPrompt(found.token_ids, found)

    def encode_rendered(self, text: str) -> list[int]:
        """The tokens of a rendered chat, to which nothing is added. Raises PromptError."""
        options = {"add_special_tokens": False, **_QUIET}
        return list(self._tokenizer(_readable(text), **options)["input_ids"])

    def render(self, messages: Sequence[Any], /, **variables: Any) -> str:
        """A chat as its template renders it. variables: what the template knows besides.

        Raises PromptError, and ConfigError for messages with other fields than it knows.
        """
        read = self.read_chat(messages, variables)
        try:
            text: str = self._tokenizer.apply_chat_template(
                read,
                **{"add_generation_prompt": True, **variables, "tokenize": False},
            )
        except Exception as error:  # a template may raise anything
            raise PromptError(f"prompt: the chat template refused it: {error}") from error
        return text

    def read_chat(
        self, messages: Sequence[Any], variables: Mapping[str, Any] = NO_VARIABLES
    ) -> list[dict[str, Any]]:
        """Messages as ``read_messages`` has them, for the template that ``variables`` name.

        Raises PromptError and ConfigError.
        """
        if not _is_chat(messages):
            raise PromptError(f"messages hold no chat but {messages!r:.80}: pass a list of dicts")
        template = template_text(self._tokenizer, variables)
        if not template:
            raise PromptError(
                "prompt is a chat, but the tokenizer has no chat template: take a model for chats, "
                'pass text to generate, or pass chat_template_kwargs={"chat_template": ...} to chat'
            )
        return read_messages(messages, template, self.picture_rules)

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return text_ids(self._tokenizer, _readable(prompt))
        if isinstance(prompt, np.ndarray | Tensor) and prompt.ndim == 1:
            prompt = prompt.tolist()
        if isinstance(prompt, _TEXTS) or not isinstance(prompt, Sequence):
            raise PromptError(f"prompt is of type {type(prompt).__name__}: {_KINDS}")
        return [self._checked(at, token) for at, token in enumerate(prompt)]

    def _checked(self, at: int, token: Any) -> int:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            kind = type(token).__name__
            raise PromptError(f"prompt holds {token!r} of type {kind} at {at}: token ids are ints")
        if not 0 <= token < self._vocab_size:
            raise PromptError(
                f"prompt holds token {token} at {at}: ids go from 0 to {self._vocab_size - 1}"
            )
        return int(token)


def text_ids(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text that begins a sequence, with what the tokenizer adds.

    It adds nothing to a text that begins with its beginning-of-text token, as a rendered chat does.
    """
    bos = getattr(tokenizer, "bos_token", None)
    has_bos = isinstance(bos, str) and bos != "" and text.startswith(bos)
    return list(tokenizer(text, add_special_tokens=not has_bos, **_QUIET)["input_ids"])


def _readable(text: str) -> str:
    """The text itself. Raises PromptError for one that has no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"prompt holds {text[error.start]!r} at character {error.start}, half of a "
            "surrogate pair, which no tokenizer can read: replace it, or decode the text anew"
        ) from error
    return text


def _is_chat(prompt: Any) -> TypeGuard[Sequence[Message]]:
    is_filled = isinstance(prompt, Sequence) and bool(prompt)
    return is_filled and all(isinstance(part, Mapping) for part in prompt)
