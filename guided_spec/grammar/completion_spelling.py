"""A vocabulary's tokens byte by byte, and texts written in as few of them as possible."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from guided_spec.grammar.completion_endings import NEVER
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["Spelling"]

_LONGEST = 24  # bytes of a token that a shortest end is written with
_MOST_SPELLED = 1 << 16


class Spelling:
    """One vocabulary, prepared to follow all its tokens at once through an automaton over bytes.

    ids: int64, the tokens with any bytes, the longest first. columns: entry i holds byte i of
    those that have one, uint8, in the order of ``ids``. longest: bytes of the longest token.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.vocab_size
        self.token_bytes = vocabulary.token_bytes
        self.stop_token_ids = np.array(vocabulary.stop_token_ids, dtype=np.int64)
        self.single_bytes = frozenset(np.flatnonzero(vocabulary.single_byte_ids >= 0).tolist())
        self._known = frozenset(data for data in self.token_bytes if data)
        self._num_tokens: dict[bytes, int] = {b"": 0}
        lengths = np.array([len(data) for data in self.token_bytes])
        order = np.argsort(-lengths, kind="stable")
        self.ids: NDArray[np.int64] = order[: int((lengths > 0).sum())].astype(np.int64)
        self.longest = int(lengths.max(initial=0))
        counts = [int((lengths > at).sum()) for at in range(self.longest)]
        texts = [self.token_bytes[token] for token in self.ids.tolist()]
        self.columns = [
            np.frombuffer(bytes(text[at] for text in texts[:count]), dtype=np.uint8)
            for at, count in enumerate(counts)
        ]

    def num_tokens(self, text: bytes) -> int:
        """The fewest tokens that write ``text``, of those of at most 24 bytes; else ``NEVER``."""
        known = self._num_tokens
        if text in known:
            return known[text]
        if len(known) > _MOST_SPELLED:
            self._num_tokens = known = {b"": 0}
        for start in range(len(text) - 1, -1, -1):
            rest = text[start:]
            if rest not in known:
                lengths = range(1, min(len(rest), _LONGEST) + 1)
                ways = [known[rest[n:]] for n in lengths if rest[:n] in self._known]
                known[rest] = min(NEVER, 1 + min(ways, default=NEVER))
        return known[text]
