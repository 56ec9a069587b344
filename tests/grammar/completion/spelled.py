"""A vocabulary that spells markers in many ways, and what a start means, parsed from scratch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np

from guided_spec.grammar.protocol import CompiledGrammar, GrammarMatcher
from guided_spec.grammar.text.markers import BYTES, Marker, Markers, symbols_of
from guided_spec.grammar.vocabulary import Vocabulary

_WORDS = ["".join(word) for length in (1, 2, 3) for word in product("ab", repeat=length)]
_TEXTS = (*(word.encode() for word in _WORDS), b"c", b"bc", b"cab", b" ", b"\n", "é".encode())
_RAW = (b"\xc3", b"\xa9")
HIDDEN, OTHER, EOS = (len(_TEXTS) + len(_RAW) + i for i in range(3))
"""Two special tokens that show no text, and the end of the text."""
SPELLED = Vocabulary(
    (*_TEXTS, *_RAW, b"", b"", b""),
    (EOS,),
    EOS + 1,
    added_tokens=(("<s>", HIDDEN), ("<t>", OTHER), ("</s>", EOS)),
)


def encode(text: str) -> list[int]:
    """Special tokens by name, else the longest token first."""
    token_ids = []
    while text:
        for name, token_id in SPELLED.added_tokens:
            if text.startswith(name):
                token_ids.append(token_id)
                text = text.removeprefix(name)
                break
        else:
            data = text.encode()
            best = max((t for t in _TEXTS if data.startswith(t)), key=len)
            token_ids.append(_TEXTS.index(best))
            text = data[len(best) :].decode()
    return token_ids


MARKERS = Markers(SPELLED, encode)


def token(text: str) -> int:
    """The token that is this text."""
    return _TEXTS.index(text.encode())


def splits(data: bytes) -> Iterator[list[int]]:
    """Every way to write ``data`` in tokens."""
    if not data:
        yield []
    for token_id, text in enumerate(SPELLED.token_bytes):
        if text and data.startswith(text):
            for rest in splits(data[len(text) :]):
                yield [token_id, *rest]


def boundary(marker: Marker, token_ids: Sequence[int]) -> int | None:
    """How many of the tokens are the free part: None while it goes on, -1 where one is illegal."""
    text: list[int] = []
    for count, token_id in enumerate(token_ids, 1):
        if token_id == EOS or not 0 <= token_id <= EOS:
            return -1
        shown = symbols_of(token_id, SPELLED)
        if shown[0] < BYTES or shown[0] in marker.symbols:
            text.extend(shown)
        for end in range(len(marker), len(text) + 1):
            if tuple(text[end - len(marker) : end]) == marker.symbols:
                return count if end == len(text) else -1
    return None


def legal(
    compiled: CompiledGrammar, marker: Marker, budget: int | None, token_ids: Sequence[int]
) -> frozenset[int]:
    """What may follow: the definition, by trying every token on the whole text."""
    free = boundary(marker, token_ids)
    if free is not None:
        matcher = compiled.new_matcher()
        assert all(matcher.accept_token(token_id) for token_id in token_ids[free:])
        return admitted(matcher) - compiled.excluded
    if budget is not None and len(token_ids) >= budget:
        return frozenset({marker.spelling[_begun(marker, token_ids)]})
    return frozenset(t for t in range(EOS + 1) if boundary(marker, [*token_ids, t]) != -1)


def _begun(marker: Marker, token_ids: Sequence[int]) -> int:
    """How many symbols of the marker the text ends with."""
    shown = [symbol for t in token_ids for symbol in symbols_of(t, SPELLED)]
    text = [symbol for symbol in shown if symbol < BYTES or symbol in marker.symbols]
    return max(n for n in range(len(marker)) if text[len(text) - n :] == list(marker.symbols[:n]))


def admitted(matcher: GrammarMatcher) -> frozenset[int]:
    """The tokens of the matcher's mask row."""
    bitmask = np.zeros((2, -(-SPELLED.vocab_size // 32)), dtype=np.int32)
    matcher.fill_next_token_bitmask(bitmask, 1)
    assert not bitmask[0].any()
    bits = np.unpackbits(bitmask[1].view(np.uint8), bitorder="little")
    return frozenset(np.flatnonzero(bits[: SPELLED.vocab_size]).tolist())
