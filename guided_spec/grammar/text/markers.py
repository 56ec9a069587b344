"""Markers in a text, where reasoning ends and a constraint begins: free text, then a grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.grammar.spec import GrammarSpec, Start
from guided_spec.grammar.text.parts import TextParts, new_parts
from guided_spec.grammar.text.state import TextState, WrappedGrammar
from guided_spec.grammar.tools.reasoning import DEFAULT_MARKERS
from guided_spec.grammar.vocabulary import CanonicalTokens, Vocabulary
from guided_spec.ops.mask_words import row_of

BYTES = 256
"""Symbols below are bytes of the text; ``BYTES + t`` is token t, which shows no text."""


def symbols_of(token_id: int, vocabulary: Vocabulary) -> Sequence[int]:
    """What a token adds to a text: the bytes it shows, or itself if it shows none."""
    return vocabulary.text_bytes[token_id] or (BYTES + token_id,)


class Marker:
    """A sequence of symbols to find, as a Knuth-Morris-Pratt automaton over tokens.

    symbols: what to find. Text matches however it is split into tokens. Tokens that show no text
        match where the marker holds them, and change nothing elsewhere.
    encode: text to token ids, the way the tokenizer writes it; it gives ``spelling``.

    State n means that the last symbols are the first n of the marker; ``len(marker)`` is the end.
    In a state before it, a token is refused if it ends the text, or if the marker would end inside
    of it: what comes after the marker belongs to the constraint, in tokens of its own. A single
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
        """The state after a token; None where it is refused."""
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

        From state 0 it is the tokenizer's own spelling of the marker. A marker that was begun with
        other tokens is completed in the tokenizer's spelling of the rest.
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
        """The tokens of the text, or the one special token, that come next in the marker."""
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
        holds = "holds none that is known" if self._chat_template else "is not there to name one"
        raise GrammarCompileError(
            f"after() names no marker, and the chat template {holds} ({known}); name the text that "
            "ends the reasoning, as in after('</think>')"
        )

    def find(self, start: Start) -> Marker:
        """The automaton of ``start``'s marker.

        Raises GrammarCompileError when the model family has none, when the marker holds a token
        that ends the text or that does not exist, and when the vocabulary cannot write it.
        """
        return self._find(self.default if start.marker is None else start.marker)

    def bind(self, spec: GrammarSpec, prompt_ids: Sequence[int]) -> GrammarSpec:
        """The spec to use after a prompt: without its start if the prompt ends with the marker.

        Chat templates end so when reasoning is switched off. Whitespace after the marker counts as
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


@dataclass(frozen=True, eq=False)  # without slots, which leave no room for weak references
class AfterGrammar(WrappedGrammar):
    """A compiled grammar that binds after ``marker``; immutable, shared by requests.

    budget: free tokens at most before the marker is written; None for any number.
    excluded: empty, since free text may hold every token. Its texts refuse the inner grammar's.
    """

    marker: Marker
    budget: int | None = None
    excluded: frozenset[int] = frozenset()

    def new_parts(self) -> TextParts:
        """Those of the inner grammar, after free text."""
        inner = new_parts(self.inner)
        return inner._replace(preamble=FreeText(self.marker, self.budget))

    def new_style_matcher(self) -> GrammarMatcher | None:
        """A matcher with the inner grammar's style after the marker; None if it has none."""
        style = self.inner.new_style_matcher()
        if style is None:
            return None
        parts = TextParts(lambda: style, self.inner.excluded)
        return TextState.begin(parts._replace(preamble=FreeText(self.marker, self.budget)))


class FreeText(NamedTuple):
    """Free text up to a marker, see ``Preamble``. budget: as of an ``AfterGrammar``."""

    marker: Marker
    budget: int | None

    @property
    def end(self) -> int:
        """The state after the marker."""
        return len(self.marker)

    def after(self, state: int, token_id: int, num_tokens: int) -> int | None:
        """The state after a token; None where it is refused. num_tokens: before it."""
        if self._is_spent(num_tokens) and token_id != self.marker.spelling[state]:
            return None
        return self.marker.step(state, token_id)

    def row(self, state: int, num_tokens: int) -> NDArray[np.int32]:
        """int32 [W]: the tokens that may come next. Read only."""
        if self._is_spent(num_tokens):
            return self.marker.only(self.marker.spelling[state])
        return self.marker.row(state)

    def _is_spent(self, num_tokens: int) -> bool:
        return self.budget is not None and num_tokens >= self.budget
