"""A vocabulary's tokens as a search for the end of a text sees them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["SearchTokens"]

_CLOSING = frozenset(b"\"']})>")
_JSON_STRUCTURE = frozenset(b'"\\[]{}')
_FEW = 64  # legal tokens that are ranked one by one
_HEAD = 1024  # tokens of the order that are looked at first: nearly always enough


class SearchTokens:
    """Made once for a vocabulary: that sorts its tokens.

    is_plain: bool [V], tokens that open and close nothing in a JSON text, wherever they stand.
    is_whole: bool [V], tokens that hold no part of a character.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        data = vocabulary.token_bytes[: vocabulary.vocab_size]
        closes = [_CLOSING.issuperset(text) for text in data]

        def rank(token: int, *, few: bool) -> tuple[bool, bool, bool, bool, int, int]:
            text, closing = data[token], closes[token]
            size = -len(text) if closing or few else len(text)
            quotes = closing and text.startswith(b'"')
            return (not quotes, not closing, text != b"0", text.isspace(), size, token)

        tokens = range(vocabulary.vocab_size)
        self.is_plain = np.array([_JSON_STRUCTURE.isdisjoint(text) for text in data])
        self.is_whole = np.array([_is_utf8(text) for text in data])
        self._of_many = np.array(sorted(tokens, key=lambda token: rank(token, few=False)))
        self._rank_of_few = np.empty(vocabulary.vocab_size, dtype=np.int64)
        by_rank = sorted(tokens, key=lambda token: rank(token, few=True))
        self._rank_of_few[by_rank] = np.arange(vocabulary.vocab_size)

    def first(self, is_legal: NDArray[np.bool_], count: int) -> list[int]:
        """The ``count`` tokens of ``is_legal``, bool [V], to try first; all if there are fewer.

        Closing tokens, those that begin with a quote before all: brackets close no string. Then
        "0", then what is not blank. Among the closing tokens, and where few tokens are legal,
        longer ones come first; else shorter ones, of equals the lower id.
        """
        if np.count_nonzero(is_legal) <= _FEW:
            legal = np.flatnonzero(is_legal)
            few: list[int] = legal[np.argsort(self._rank_of_few[legal])][:count].tolist()
            return few
        found = self._of_many[:0]
        for part in (self._of_many[:_HEAD], self._of_many):
            found = part[is_legal[part]][:count]
            if len(found) == count:
                break
        many: list[int] = found.tolist()
        return many


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
