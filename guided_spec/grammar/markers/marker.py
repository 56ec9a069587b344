"""The end of free text: an automaton that finds a marker in tokens, added ones included."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.rows import row_of
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = [
    "BYTES",
    "MarkedReader",
    "MarkedText",
    "Marker",
    "begun_length",
    "symbols_of",
]

BYTES = 256
"""Symbols below are bytes of the text; ``BYTES + t`` is token t, which shows no text."""


def begun_length(text: str, literal: str) -> int:
    """How many characters at the end of a text may be the beginning of a literal."""
    for length in range(min(len(literal) - 1, len(text)), 0, -1):
        if text.endswith(literal[:length]):
            return length
    return 0


def symbols_of(token_id: int, vocabulary: Vocabulary) -> Sequence[int]:
    """What a token adds to a text: the bytes it shows, or itself if it shows none."""
    return vocabulary.text_bytes[token_id] or (BYTES + token_id,)


class Marker:
    """A sequence of symbols to find, as a Knuth-Morris-Pratt automaton over tokens.

    symbols: what to find. Text counts however it is split into tokens. Tokens that show no text
        count where the marker holds them, and change nothing elsewhere.
    encode: text to token ids, the way the tokenizer writes it; it gives ``spelling``.

    State n means that the last symbols are the first n of the marker; ``len(marker)`` is the end.
    In a state before it, a token is refused if it ends the text, or if the marker would end inside
    of it: what stands behind the marker belongs to the constraint, in tokens of its own. A single
    byte is never refused, so the marker can always be reached.

    Immutable but for its cache of rows; shared by requests. Raises GrammarCompileError for a marker
    that the vocabulary cannot write.
    """

    def __init__(
        self, symbols: Sequence[int], vocabulary: Vocabulary, encode: Callable[[bytes], list[int]]
    ) -> None:
        self.symbols = tuple(symbols)
        self._vocabulary = vocabulary
        self._encode = encode
        self._borders = _borders(self.symbols)
        self._held = frozenset(symbols)
        self._stops = frozenset(vocabulary.stop_token_ids)
        self._overshooting = self._find_overshooting()
        self._rows: dict[int, NDArray[np.int32]] = {}
        self.spelling = self._spell()

    def __len__(self) -> int:
        return len(self.symbols)

    def step(self, state: int, token_id: int) -> int | None:
        """The state behind a token; None where it is refused."""
        if not 0 <= token_id < self._vocabulary.vocab_size or token_id in self._stops:
            return None
        symbols = symbols_of(token_id, self._vocabulary)
        if symbols[0] >= BYTES and symbols[0] not in self._held:
            return state
        for symbol in symbols:
            if state == len(self.symbols):
                return None
            state = self._advance(state, symbol)
        return state

    def row(self, state: int) -> NDArray[np.int32]:
        """int32 [W]: the tokens that ``step`` takes in a state. Read only."""
        row = self._rows.get(state)
        if row is None:
            refused = {*self._stops, *self._overshooting[0]}
            border = state
            while border > 0:
                refused.update(self._overshooting[border])
                border = self._borders[border]
            row = ~row_of(sorted(refused), self._vocabulary.vocab_size)
            row.flags.writeable = False
            row = self._rows.setdefault(state, row)
        return row

    def only(self, token_id: int) -> NDArray[np.int32]:
        """int32 [W]: a row that admits one token."""
        return row_of([token_id], self._vocabulary.vocab_size)

    def _advance(self, state: int, symbol: int) -> int:
        while state > 0 and self.symbols[state] != symbol:
            state = self._borders[state]
        return state + (self.symbols[state] == symbol)

    def _find_overshooting(self) -> list[list[int]]:
        """Entry n > 0: tokens that begin with what follows the first n symbols, and go on.

        Entry 0: tokens that hold the whole marker before their own end. So the tokens of a state,
        of its borders and of 0 are those inside of which the marker would end.
        """
        length = len(self.symbols)
        found: list[list[int]] = [[] for _ in range(length)]
        first = length  # of the bytes at the marker's end
        while first > 0 and self.symbols[first - 1] < BYTES:
            first -= 1
        tail = bytes(self.symbols[first:])
        if not tail:
            return found
        for token_id, data in enumerate(self._vocabulary.text_bytes):
            if data.find(tail[-1], 0, len(data) - 1) < 0:  # nearly all tokens
                continue
            if first == 0 and data.find(tail, 0, len(data) - 1) >= 0:
                found[0].append(token_id)
            for state in range(max(first, 1), length):
                rest = tail[state - first :]
                if len(data) > len(rest) and data.startswith(rest):
                    found[state].append(token_id)
        return found

    def _spell(self) -> tuple[int, ...]:
        """[len(marker)]: in each state the token that leads on to the marker's end.

        From state 0 it is the tokenizer's own spelling of the marker, and what was begun in another
        way is completed in the tokenizer's spelling of the rest.
        """
        spelling = [-1] * len(self.symbols)
        for start in range(len(self.symbols)):
            state = start
            for token_id in self._tokens_from(start):
                if spelling[state] >= 0:
                    break  # from here on it is spelled already
                spelling[state] = token_id
                state += len(symbols_of(token_id, self._vocabulary))
        return tuple(spelling)

    def _tokens_from(self, start: int) -> Iterator[int]:
        """The tokens of the text, or the one special token, that the marker goes on with."""
        if self.symbols[start] >= BYTES:
            yield self.symbols[start] - BYTES
            return
        end = start
        while end < len(self.symbols) and self.symbols[end] < BYTES:
            end += 1
        text = bytes(self.symbols[start:end])
        tokens = self._encode(text)
        texts = [self._vocabulary.text_bytes[token] for token in tokens]
        if not tokens or not all(texts) or b"".join(texts) != text:
            tokens = [self._longest_prefix(text)]  # text that begins inside a character, say
        yield from tokens

    def _longest_prefix(self, text: bytes) -> int:
        found, longest = -1, 0
        for token_id, data in enumerate(self._vocabulary.text_bytes):
            if len(data) > longest and text.startswith(data):
                found, longest = token_id, len(data)
        if found < 0:
            shown = text.decode("utf-8", errors="replace")
            raise GrammarCompileError(
                f"no token of the vocabulary writes {shown!r} of the marker; choose another marker"
            )
        return found


def _borders(symbols: tuple[int, ...]) -> tuple[int, ...]:
    """Entry n: the longest proper prefix of the first n symbols that is also their suffix."""
    borders = [0, 0]
    for symbol in symbols[1:]:
        border = borders[-1]
        while border > 0 and symbols[border] != symbol:
            border = borders[border]
        borders.append(border + (symbols[border] == symbol))
    return tuple(borders)


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

    def reader(self) -> MarkedReader:
        """Reads one text as its tokens come."""
        return MarkedReader(self._vocabulary.text_bytes, self._by_id)

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


class MarkedReader:
    """``MarkedText.read`` of tokens that come one after another.

    A character is held back until all its bytes are in. text_bytes: of each token. marks: the
    characters of the tokens that are marks.
    """

    def __init__(self, text_bytes: Sequence[bytes], marks: Mapping[int, str]) -> None:
        self._text_bytes = text_bytes
        self._marks = marks
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Append tokens, and return the text that they complete."""
        pieces: list[str] = []
        for token_id in token_ids:
            mark = self._marks.get(token_id)
            if mark is None:
                pieces.append(self._decoder.decode(self._text_bytes[token_id]))
            else:
                pieces += [self._decoder.decode(b"", final=True), mark]
        return "".join(pieces)
