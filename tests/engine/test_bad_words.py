"""What bad words and biases cost: bounded, read once, and never in a thread that all wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from guided_spec.engine.llm import LLM
from guided_spec.engine.prompt import PromptEncoder
from guided_spec.errors import ConfigError
from guided_spec.ops.sampling.adjust import RuleTable, TokenRules
from guided_spec.types import MAX_BAD_LETTERS, MAX_BAD_WORD, MAX_BAD_WORDS, SamplingParams
from tests.tiny_llm import make_llm

CPU = torch.device("cpu")


class LetterTokenizer:
    """A token a letter. calls: how often it was asked, and by which thread."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, texts: Sequence[str], **_options: Any) -> dict[str, list[list[int]]]:
        self.calls.append(threading.get_ident())
        return {"input_ids": [[ord(letter) for letter in text] for text in texts]}


class CountedTuple(tuple[Any, ...]):
    """Counts how often it is read."""

    reads = 0

    def __iter__(self) -> Iterator[Any]:
        self.reads += 1
        return super().__iter__()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a"] * (MAX_BAD_WORDS + 1), r"1025 of them, or more.*at most 1024"),
        (["a" * (MAX_BAD_WORD + 1)], r"65 letters.*at most 64"),
        ([[3] * (MAX_BAD_WORD + 1)], r"65 tokens.*at most 64"),
        (["a" * 60] * 274, rf"16440 letters.*at most {MAX_BAD_LETTERS}"),
    ],
    ids=["words", "letters", "tokens", "all-together"],
)
def test_more_are_refused(words: list[Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^bad_words=.*{told}"):
        SamplingParams(bad_words=words)
    assert SamplingParams(bad_words=words[:100] if len(words) > 1 else [words[0][:64]]).bad_words


def test_a_word_of_few_letters_and_many_tokens_is_refused() -> None:
    encoder = PromptEncoder(LetterTokenizer(), 200, 10)
    with pytest.raises(ConfigError, match="65 tokens"):  # with the space before it
        encoder.bad_words(SamplingParams(bad_words=["a" * MAX_BAD_WORD]))


def test_all_are_spelled_at_once() -> None:
    tokenizer = LetterTokenizer()
    words = [f"w{at}" for at in range(300)]
    found = PromptEncoder(tokenizer, 200, 10).bad_words(SamplingParams(bad_words=[*words, [7]]))
    assert len(tokenizer.calls) == 1
    spelled = [tuple(map(ord, text)) for word in words for text in (word, f" {word}")]
    assert found == (*spelled, (7,))


def test_an_event_loop_does_not_spell() -> None:
    tokenizer = LetterTokenizer()
    encoder = PromptEncoder(tokenizer, 200, 10)
    written, known = SamplingParams(bad_words=["ab"]), SamplingParams(bad_words=[[7]])
    refused = SamplingParams(bad_words=["\ud800"])
    asked = [written, known, written, refused]
    found = asyncio.run(encoder.bad_words_aside(asked))
    assert found == [encoder.bad_words(written), None, encoder.bad_words(written), None]
    assert tokenizer.calls[0] != threading.get_ident()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm("llama", "ngram") as made:
        yield made


def test_words_hold_in_every_way_of_asking(llm: LLM) -> None:
    free = llm.generate("A", SamplingParams(max_tokens=6))[0]
    word = llm.vocabulary.decode(free.token_ids[:1]).strip() or "e"
    params = SamplingParams(max_tokens=6, bad_words=[word, free.token_ids[1:3]])
    expected = llm.generate("A", params)[0].token_ids
    assert asyncio.run(llm.agenerate(["A", "A"], params))[1].token_ids == expected
    with pytest.raises(ConfigError, match="surrogate"):
        asyncio.run(llm.agenerate("A", SamplingParams(bad_words=["\ud800"])))


@pytest.mark.parametrize("field", ["logit_bias", "bad_words", "stop_ids"])
def test_batches_read_no_rule_again(field: str) -> None:
    """A batch changes when any request comes or goes."""
    params = SamplingParams(min_tokens=2, logit_bias={3: 1.0})
    counted = CountedTuple(
        {"logit_bias": params.logit_bias, "bad_words": ((1, 2),)}.get(field, [4])
    )
    if field == "logit_bias":
        object.__setattr__(params, field, counted)
        rules = TokenRules(params)
    else:
        rules = TokenRules(params, **{field: counted})
    first = RuleTable.stack([rules], 9, CPU)
    reads = counted.reads
    assert reads > 0
    second = RuleTable.stack([None, rules], 9, CPU)
    assert counted.reads == reads
    assert first is not None
    assert second is not None
    assert first.bias is not None
    assert second.bias is not None
    assert torch.equal(first.bias, second.bias)
