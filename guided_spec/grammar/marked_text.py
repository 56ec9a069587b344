"""Texts in which added tokens are told apart from the same letters."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["MarkedText"]

_FIRST = 0xD800  # surrogates: no decoded text holds one, and no JSON string but as an escape
_MOST = 2048


class MarkedText:
    """Reads tokens as text, each added token that some literals name as one character.

    literals: what a format writes. Where ``<tool_call>`` is a token, the grammar takes that token
        as the beginning of a call and the letters as text, and so does who reads the text.

    Immutable; shared by requests.
    """

    def __init__(self, vocabulary: Vocabulary, literals: Iterable[str]) -> None:
        self._vocabulary = vocabulary
        self._ids = {name: token for name, token in vocabulary.added_tokens if name}
        for token_id in vocabulary.stop_token_ids:  # they end the text and are no part of it
            self._ids = {name: token for name, token in self._ids.items() if token != token_id}
        names = sorted(self._ids, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names))) if names else None
        found = {name for text in literals for name in self._find(text)}
        self._marks = {name: chr(_FIRST + at) for at, name in enumerate(sorted(found)[:_MOST])}
        self._by_id = {self._ids[name]: mark for name, mark in self._marks.items()}
        self._shown = {mark: name for name, mark in self._marks.items()}

    def mark(self, literal: str) -> str:
        """A literal as it stands in a text that is read: with a character for each token."""
        if self._names is None:
            return literal
        return self._names.sub(lambda found: self._marks.get(found[0], found[0]), literal)

    def read(self, token_ids: Sequence[int], visible: int | None = None) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD.

        visible: characters to read at most, of those that ``Vocabulary.decode`` shows.
        """
        pieces: list[str] = []
        data = bytearray()
        for token_id in token_ids:
            mark = self._by_id.get(token_id)
            if mark is None:
                data += self._vocabulary.text_bytes[token_id]
                continue
            pieces += [data.decode("utf-8", errors="replace"), mark]
            data.clear()
        text = "".join([*pieces, data.decode("utf-8", errors="replace")])
        return text if visible is None else self._cut(text, visible)

    def show(self, text: str) -> str:
        """A text that was read, with the tokens' names."""
        return "".join(self._shown.get(character, character) for character in text)

    def _find(self, literal: str) -> list[str]:
        return [] if self._names is None else self._names.findall(literal)

    def _cut(self, text: str, visible: int) -> str:
        for at, character in enumerate(text):
            name = self._shown.get(character)
            width = 1
            if name is not None:
                width = len(self._vocabulary.text_bytes[self._ids[name]].decode())
            if width > visible:
                return text[:at]
            visible -= width
        return text
