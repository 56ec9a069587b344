"""Random texts of a compiled grammar: legal token after legal token until it ends."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np

from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.vocabulary import Vocabulary

EOS = 256
BYTES = Vocabulary((*(bytes([i]) for i in range(256)), b""), (EOS,), 257)
"""One token for every byte: the finest walk through a grammar."""

_STRUCTURE = frozenset(b'",:]}{[0123456789 ')
_CLOSING = b'"]}'


class Walk(NamedTuple):
    """data: the bytes so far. finished: whether the end was reached within ``limit`` bytes."""

    data: bytes
    finished: bool

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", errors="replace")


def walk(compiled: CompiledGrammar, seed: int, *, wander: int = 60, limit: int = 1500) -> Walk:
    """Choose freely for ``wander`` bytes, then whatever closes. Fails on a dead end."""
    dice = random.Random(seed)
    matcher = compiled.new_matcher()
    bitmask = np.zeros((1, 9), dtype=np.int32)
    data = bytearray()
    while len(data) < limit:
        matcher.fill_next_token_bitmask(bitmask)
        legal = [
            int(i) for i in np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))
        ]
        legal = [token for token in legal if token <= EOS]
        assert legal, f"a dead end after {bytes(data)!r}"
        token = _choose(legal, dice, hurry=len(data) > wander)
        assert matcher.accept_token(token)
        if token == EOS:
            assert matcher.is_terminated()
            return Walk(bytes(data), finished=True)
        data.append(token)
    return Walk(bytes(data), finished=False)


def accepts(compiled: CompiledGrammar, text: str | bytes) -> bool:
    """Whether ``text`` is a whole text of the grammar."""
    data = text.encode() if isinstance(text, str) else text
    matcher = compiled.new_matcher()
    return all(matcher.accept_token(byte) for byte in data) and matcher.accept_token(EOS)


def _choose(legal: list[int], dice: random.Random, *, hurry: bool) -> int:
    if EOS in legal and (hurry or dice.random() < 0.3 or legal == [EOS]):
        return EOS
    structure = [token for token in legal if token in _STRUCTURE]
    if hurry:
        structure = [token for token in _CLOSING if token in legal][:1] or structure
    if structure and (hurry or dice.random() < 0.35):
        return dice.choice(structure)
    return dice.choice([token for token in legal if token != EOS])
