"""Text that grows token by token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["TextDecoder"]


class TextDecoder:
    """Turns one request's tokens into text, holding a character back until all its bytes are in.

    The pieces returned, joined, are ``vocabulary.decode`` of all tokens fed.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._text_bytes = vocabulary.text_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Append tokens and return the text they complete; bytes that are no UTF-8 give U+FFFD."""
        return self._decoder.decode(b"".join(self._text_bytes[i] for i in token_ids))

    def flush(self) -> str:
        """End the text: whatever was held back, as U+FFFD. The decoder may then be used anew."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
