"""Markers of one tokenizer: which one a ``Start`` means, and prompts that end with it already."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.markers.marker import BYTES, Marker, symbols_of
from guided_spec.grammar.spec import GrammarSpec, Start
from guided_spec.grammar.vocabulary import CanonicalTokens, Vocabulary

__all__ = ["DEFAULT_MARKERS", "FINAL_CHANNEL", "Markers"]

FINAL_CHANNEL = "<|channel|>final<|message|>"
"""What begins gpt-oss's answer."""

DEFAULT_MARKERS = (
    "</think>",  # Qwen, DeepSeek, GLM, MiniMax, Kimi, Hunyuan, Nemotron
    "[/THINK]",  # Magistral
    FINAL_CHANNEL,  # gpt-oss
    "</seed:think>",  # Seed-OSS
    "<|END_THINKING|>",  # Command A Reasoning
    "</thought>",  # EXAONE Deep
    "\u25c1/think\u25b7",  # Kimi-VL
)
"""How model families end their reasoning; the first one that the chat template holds counts."""

_WHITESPACE = frozenset(b" \t\n\v\f\r")


class Markers:
    """Resolves markers for one vocabulary; thread-safe.

    encode: text to token ids, without special tokens around it.
    chat_template: where the model family's own marker is looked for.
    """

    def __init__(
        self, vocabulary: Vocabulary, encode: Callable[[str], list[int]], chat_template: str = ""
    ) -> None:
        self._vocabulary = vocabulary
        self._chat_template = chat_template
        self._tokens = CanonicalTokens(encode, vocabulary.text_bytes)
        self._find = lru_cache(maxsize=64)(self._make)

    @classmethod
    def from_tokenizer(cls, vocabulary: Vocabulary, tokenizer: Any) -> Markers:
        """Of a Hugging Face tokenizer."""
        template = getattr(tokenizer, "chat_template", None) or ""
        if not isinstance(template, str):  # several by name
            template = "\n".join(map(str, template.values()))

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        return cls(vocabulary, encode, template)

    @cached_property
    def default(self) -> str:
        """The model family's own marker. Raises GrammarCompileError where none is known."""
        for marker in DEFAULT_MARKERS:
            if marker in self._chat_template:
                return marker
        known = ", ".join(DEFAULT_MARKERS)
        raise GrammarCompileError(
            f"no marker: the chat template holds none of {known}; name it: after(marker)"
        )

    def find(self, start: Start) -> Marker:
        """The automaton of ``start``'s marker.

        Raises GrammarCompileError when the model family has none, when the marker holds a token
        that ends the text or that does not exist, and when the vocabulary cannot write it.
        """
        return self._find(self.default if start.marker is None else start.marker)

    def bind(self, spec: GrammarSpec, prompt_ids: Sequence[int]) -> GrammarSpec:
        """The spec to use behind a prompt: without its start if the prompt ends with the marker.

        Chat templates end so when reasoning is switched off. Whitespace behind the marker counts as
        part of it. Raises GrammarCompileError, see ``find``.
        """
        if spec.start is None:
            return spec
        wanted = self.find(spec.start).symbols
        tail = self._tail(prompt_ids, len(wanted))
        while len(tail) >= len(wanted):
            if tuple(tail[-len(wanted) :]) == wanted:
                return replace(spec, start=None)
            if tail.pop() not in _WHITESPACE:
                break
        return spec

    def _tail(self, prompt_ids: Sequence[int], length: int) -> list[int]:
        """The prompt's last symbols: at least ``length`` before the whitespace at its end."""
        tail: list[int] = []
        missing = length
        for token_id in reversed(prompt_ids):
            symbols = list(symbols_of(token_id, self._vocabulary))
            tail[:0] = symbols
            while missing == length and symbols and symbols[-1] in _WHITESPACE:
                symbols.pop()
            missing -= len(symbols)
            if missing <= 0:
                break
        return tail

    def _make(self, marker: str | tuple[int, ...]) -> Marker:
        symbols = self._parse(marker) if isinstance(marker, str) else self._shown(marker)
        for token_id in self._vocabulary.stop_token_ids:
            if BYTES + token_id in symbols:
                reason = f"the marker {marker!r} holds token {token_id}, which ends the text"
                raise GrammarCompileError(f"{reason}; choose a marker before it")
        return Marker(symbols, self._vocabulary, self._tokens.split)

    def _parse(self, text: str) -> list[int]:
        """Special tokens by their names, bytes between them."""
        hidden = {
            name: token
            for name, token in self._vocabulary.added_tokens
            if not self._vocabulary.text_bytes[token]
        }
        names = sorted(map(re.escape, hidden), key=len, reverse=True)
        parts = re.split(f"({'|'.join(names)})", text) if names else [text]
        symbols: list[int] = []
        for part in parts:
            symbols.extend([BYTES + hidden[part]] if part in hidden else _utf8(part))
        return symbols

    def _shown(self, token_ids: Sequence[int]) -> list[int]:
        outside = [token for token in token_ids if token >= self._vocabulary.vocab_size]
        if outside:
            size = self._vocabulary.vocab_size
            reason = f"the marker holds token {outside[0]}, but the vocabulary has {size}"
            raise GrammarCompileError(f"{reason}; pass ids below that")
        return [symbol for token in token_ids for symbol in symbols_of(token, self._vocabulary)]


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise GrammarCompileError(f"the marker {text!r} is not text: {error}") from error
