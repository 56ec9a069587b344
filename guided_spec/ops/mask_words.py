"""How wide a token bitmask is. Grammars are compiled where torch is not loaded: this needs none."""

from __future__ import annotations

__all__ = ["BITS", "num_mask_words"]

BITS = 32
"""Of a word."""


def num_mask_words(vocab_size: int) -> int:
    """W, the number of int32 words that hold ``vocab_size`` bits."""
    return -(-vocab_size // BITS)
