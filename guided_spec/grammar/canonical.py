"""Text as the tokens in which the tokenizer writes it in the middle of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

__all__ = ["CanonicalTokens"]


class CanonicalTokens:
    """Splits text into tokens the way the tokenizer would write it in the middle of a text.

    encode: text to token ids, without special tokens around it. token_bytes: [V] the text of each.
    """

    # Some tokenizers put a space before a text; behind an anchor they cannot.
    ANCHORS = ("", "\n", "a", '"')

    def __init__(self, encode: Callable[[str], list[int]], token_bytes: Sequence[bytes]) -> None:
        self._encode = encode
        self._token_bytes = token_bytes
        self.split = lru_cache(maxsize=4096)(self._split)

    def _split(self, data: bytes) -> list[int]:
        if not data:
            return []
        text = data.decode("utf-8", errors="ignore")  # a character cut at the end is left out
        for anchor in self.ANCHORS:
            tokens = self._suffix(self._encode(anchor + text), text.encode())
            if tokens is not None:
                return tokens
        return []

    def _suffix(self, tokens: list[int], data: bytes) -> list[int] | None:
        length = 0
        for start in range(len(tokens), -1, -1):
            if length == len(data):
                found = tokens[start:]
                spelled = b"".join(self._token_bytes[token] for token in found)
                return found if spelled == data else None
            if start > 0:
                length += len(self._token_bytes[tokens[start - 1]])
        return None
