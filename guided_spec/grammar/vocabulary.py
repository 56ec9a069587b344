"""The bytes of every token id, and text as the tokenizer writes it in the middle of a text."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from guided_spec.errors import ModelError
from guided_spec.grammar.text.key_tokens import KeyTokens
from guided_spec.ops.mask_words import row_of

_LOG = logging.getLogger(__name__)


_LEAD = b"\xed"
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")  # encoded: no UTF-8 text holds these two bytes


class SplitSurrogates(NamedTuple):
    """Pairs of tokens between which a surrogate's encoding would be split.

    leads: the tokens that end with its first byte. others: int32 [W], the tokens that may follow
    one of these.
    """

    leads: frozenset[int]
    others: NDArray[np.int32]


@dataclass(frozen=True)
class Vocabulary:
    """A model's tokens as bytes. The text of a request is its tokens' bytes, one after another.

    token_bytes: V entries, V being the width of the model's logits. ``b""`` for every token that
        constrained text must not hold: added tokens (special or not), stop tokens, padding.
    stop_token_ids: the tokens that end a text, at least one.
    vocab_size: V.
    text_bytes: V entries, what each token shows in a text. As ``token_bytes``, plus the added
        tokens that are not special, such as ``</think>``: free text may hold them. Empty: a copy
        of ``token_bytes``.
    added_tokens: (name, id) of the tokenizer's added tokens, special or not.

    Raises ModelError when the lengths disagree or a stop token is missing or out of range.
    """

    token_bytes: tuple[bytes, ...]
    stop_token_ids: tuple[int, ...]
    vocab_size: int
    text_bytes: tuple[bytes, ...] = ()
    added_tokens: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if not self.text_bytes:
            object.__setattr__(self, "text_bytes", self.token_bytes)
        for name in ("token_bytes", "text_bytes"):
            if len(getattr(self, name)) != self.vocab_size:
                found = len(getattr(self, name))
                raise ModelError(
                    f"{name} has {found} entries for a vocabulary of {self.vocab_size}"
                )
        _check_stop_tokens(self.stop_token_ids, self.vocab_size)
        if any(map(_holds_surrogate, self.token_bytes)):
            kept = tuple(b"" if _holds_surrogate(data) else data for data in self.token_bytes)
            object.__setattr__(self, "token_bytes", kept)

    @classmethod
    def from_tokenizer(
        cls, tokenizer: Any, vocab_size: int, stop_token_ids: Sequence[int]
    ) -> Vocabulary:
        """Read a Hugging Face tokenizer.

        ``vocab_size`` is the width of the model's logits, which may differ from the tokenizer's
        own size: ids past the tokenizer are padding, ids past the logits can never be generated.
        Raises ModelError for a tokenizer of an unknown kind and for stop ids out of range.
        """
        stop = tuple(dict.fromkeys(stop_token_ids))
        _check_stop_tokens(stop, vocab_size)
        decoded = _decode_tokens(tokenizer, vocab_size, stop)
        token_bytes = list(decoded)
        text_bytes = list(decoded)
        names: list[tuple[str, int]] = []
        for token_id, added in tokenizer.added_tokens_decoder.items():
            if token_id < vocab_size:
                names.append((added.content, token_id))
                # The backend would let "<|im_end|>" stand inside a JSON string.
                token_bytes[token_id] = b""
                text_bytes[token_id] = b"" if added.special else added.content.encode()
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        for token_id in stop:
            if token_id not in special and decoded[token_id]:
                word = decoded[token_id].decode("utf-8", errors="replace")
                fix = "see whether eos_token_id of the model is right for this tokenizer"
                _LOG.warning("token %d ends texts, so none can hold %r: %s", token_id, word, fix)
            token_bytes[token_id] = text_bytes[token_id] = b""
        return cls(tuple(token_bytes), stop, vocab_size, tuple(text_bytes), tuple(names))

    def __getstate__(self) -> dict[str, Any]:
        """The fields: what was made of them is made again where it is needed."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self.text_bytes[i] for i in token_ids).decode("utf-8", errors="replace")

    @cached_property
    def without_bytes(self) -> frozenset[int]:
        """The tokens that spell nothing and do not end a text: none is part of constrained text."""
        empty = {token for token, data in enumerate(self.token_bytes) if not data}
        return frozenset(empty.difference(self.stop_token_ids))

    @cached_property
    def split_surrogates(self) -> SplitSurrogates:
        """Which tokens must not follow which, so that no surrogate is written."""
        tokens = range(self.vocab_size)
        ends = (token for token in tokens if self.token_bytes[token].endswith(_LEAD))
        begins = [t for t in tokens if b"\xa0" <= self.token_bytes[t][:1] <= b"\xbf"]
        return SplitSurrogates(frozenset(ends), ~row_of(begins, self.vocab_size))

    @cached_property
    def ids_by_bytes(self) -> dict[bytes, tuple[int, ...]]:
        """By the bytes they spell, tokens in ascending order; not those that spell nothing."""
        ids: dict[bytes, tuple[int, ...]] = {}
        for token_id, data in enumerate(self.token_bytes):
            if data:
                ids[data] = (*ids.get(data, ()), token_id)
        return ids

    @cached_property
    def key_tokens(self) -> KeyTokens:
        """Which tokens may end, spell or begin a key of a JSON object."""
        return KeyTokens(self.token_bytes, self.ids_by_bytes)

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.ids_by_bytes), default=0)

    @cached_property
    def single_byte_ids(self) -> NDArray[np.int64]:
        """[256]: for each byte the lowest id of a token that is this one byte, or -1."""
        ids = np.full(256, -1, dtype=np.int64)
        for token_id, data in enumerate(self.token_bytes):
            if len(data) == 1 and ids[data[0]] < 0:
                ids[data[0]] = token_id
        ids.flags.writeable = False
        return ids


def _holds_surrogate(data: bytes) -> bool:
    return _LEAD in data and _SURROGATE.search(data) is not None


def _decode_tokens(tokenizer: Any, vocab_size: int, stop: tuple[int, ...]) -> list[bytes]:
    import xgrammar  # only here: it loads transformers

    try:
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=vocab_size, stop_token_ids=list(stop)
        )
    except Exception as error:  # each kind of unreadable tokenizer fails in its own way
        kind = type(tokenizer).__name__
        raise ModelError(f"cannot read the tokens of a {kind}; load a fast tokenizer") from error
    return [bytes(data) for data in info.decoded_vocab]


def _check_stop_tokens(stop_token_ids: tuple[int, ...], vocab_size: int) -> None:
    if not stop_token_ids:
        fix = "name one as eos_token_id in the generation config"
        raise ModelError(f"no stop token, without which no text could end: {fix}")
    for token_id in stop_token_ids:
        if not 0 <= token_id < vocab_size:
            reason = f"stop token {token_id} is outside the model's vocabulary of {vocab_size}"
            fix = "correct eos_token_id in its configuration and generation config"
            raise ModelError(f"{reason}; {fix}")


class CanonicalTokens:
    """Splits text into tokens the way the tokenizer would write it in the middle of a text.

    encode: text to token ids, without special tokens around it. token_bytes: [V] the text of each.
    """

    # Some tokenizers put a space before a text; after an anchor they cannot.
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
