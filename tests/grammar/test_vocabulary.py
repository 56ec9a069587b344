from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from guided_spec.engine.request import TextDecoder
from guided_spec.errors import ModelError
from guided_spec.grammar.vocabulary import Vocabulary
from tests.masks.walks import BYTES

CORPUS = ['{"name": "Zoë", "n": [1, 2]}', "hello world, hello words", "你好 🎉\n\t"] * 4
TEXT = ' {"name": "Zoë 🎉"}\n你好 hello'


def byte_level() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    inner.train_from_iterator(CORPUS, trainer)
    return _with_added_tokens(inner)


def byte_fallback() -> PreTrainedTokenizerFast:
    pieces = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "h", "e", "l", "o", "he", "▁he"]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = [("h", "e"), ("▁", "he")]
    inner = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return _with_added_tokens(inner)


def _with_added_tokens(inner: Tokenizer) -> PreTrainedTokenizerFast:
    inner.add_special_tokens([AddedToken("<|end|>", special=True)])
    inner.add_tokens([AddedToken("</think>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|end|>")


TOKENIZERS = {"byte_level": byte_level(), "byte_fallback": byte_fallback()}


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]


def test_the_bytes_of_a_text_are_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer) + 7, [tokenizer.eos_token_id])
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert vocabulary.decode(ids) == TEXT
    assert vocabulary.vocab_size == len(vocabulary.token_bytes) == len(tokenizer) + 7
    assert vocabulary.token_bytes[-7:] == (b"",) * 7


def test_added_tokens_never_stand_in_constrained_text(tokenizer: PreTrainedTokenizerFast) -> None:
    added = tokenizer.get_added_vocab()
    end, think = added["<|end|>"], added["</think>"]
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [end])
    assert vocabulary.token_bytes[end] == vocabulary.token_bytes[think] == b""
    assert vocabulary.decode([think, end]) == "</think>"


def test_an_end_that_is_a_word_is_told(
    tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as the default of a model's configuration, with a tokenizer from elsewhere."""
    end = tokenizer.get_vocab()["<|end|>"]
    Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [end])
    assert not caplog.messages
    word = tokenizer.get_vocab()["h"]
    Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [word, end])
    (said,) = caplog.messages
    assert said.startswith(f"token {word} ends texts, so none can hold 'h': see whether")


def test_ids_past_the_logits_are_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = Vocabulary.from_tokenizer(tokenizer, 100, [5, 5, 3])
    assert len(vocabulary.token_bytes) == 100
    assert vocabulary.stop_token_ids == (5, 3)
    assert vocabulary.token_bytes[5] == b""


def test_single_byte_ids(tokenizer: PreTrainedTokenizerFast) -> None:
    vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    ids = vocabulary.single_byte_ids
    assert [vocabulary.token_bytes[i] for i in ids] == [bytes([b]) for b in range(256)]
    assert not ids.flags.writeable
    sparse = Vocabulary((b"b", b"ab", b"b", b""), (3,), 4)
    assert np.flatnonzero(sparse.single_byte_ids >= 0).tolist() == [ord("b")]
    assert sparse.single_byte_ids[ord("b")] == 0


@pytest.mark.parametrize("stop", [[], [-1], [257], [0, 999]])
def test_stop_tokens_must_exist(stop: list[int]) -> None:
    with pytest.raises(ModelError, match="stop"):
        Vocabulary(BYTES.token_bytes, tuple(stop), 257)
    with pytest.raises(ModelError, match="stop"):
        Vocabulary.from_tokenizer(TOKENIZERS["byte_level"], 257, stop)


def test_lengths_must_agree() -> None:
    with pytest.raises(ModelError, match="token_bytes has 2 entries"):
        Vocabulary((b"a", b""), (1,), 3)


def test_an_unknown_kind_of_tokenizer_is_refused() -> None:
    with pytest.raises(ModelError, match="object"):
        Vocabulary.from_tokenizer(object(), 10, [1])


@given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
def test_pieces_of_text_add_up(data: bytes, cuts: list[int]) -> None:
    decoder = TextDecoder(BYTES)
    ends = [*sorted(cuts), len(data)]
    starts = [0, *ends]
    pieces = [decoder.feed(data[a:b]) for a, b in zip(starts, ends, strict=False)]
    assert "".join([*pieces, decoder.flush()]) == BYTES.decode(data)
    assert decoder.flush() == ""


def test_a_character_comes_out_whole() -> None:
    decoder = TextDecoder(BYTES)
    assert [decoder.feed([byte]) for byte in "a🎉".encode()] == ["a", "", "", "", "🎉"]
