"""The largest and smallest parameters that a request may have end and change no other request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError
from guided_spec.types import MAX_BAD_WORD, MAX_COUNT, MAX_SEED, SamplingParams
from tests.tiers import examples
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy

BYSTANDERS = [
    SamplingParams(max_tokens=12, temperature=0.8, seed=1, grammar={"type": "integer"}),
    SamplingParams(max_tokens=8, temperature=0.8, seed=2, top_k=3, frequency_penalty=0.5),
]
PROMPTS = ["a number: ", "on and on "]
TOKENS = st.integers(0, VOCAB_SIZE - 1)
COUNTS = st.sampled_from([1, 2, MAX_COUNT - 1, MAX_COUNT])
EXTREMES: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 5e-324, 1e-30, 100.0, 100]),
    "top_k": st.sampled_from([-1, 1, VOCAB_SIZE, 2**31, 2**62, 2**63, 2**200]),
    "top_p": st.sampled_from([5e-324, 1e-30, 1.0, 1]),
    "min_p": st.sampled_from([0.0, 5e-324, 1.0, 1]),
    "seed": st.sampled_from([0, MAX_SEED, None]),
    "max_tokens": COUNTS,
    "min_tokens": COUNTS,
    "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-1e9, 1e9, 5e-324, -float("inf")])),
    "stop_token_ids": st.lists(st.sampled_from([0, VOCAB_SIZE - 1, MAX_COUNT]), max_size=3),
    "allowed_token_ids": st.lists(TOKENS, min_size=1, max_size=2) | st.none(),
    "bad_words": st.lists(st.lists(TOKENS, min_size=1, max_size=MAX_BAD_WORD), max_size=2),
    "stop": st.lists(st.text(min_size=1, max_size=300), max_size=3),
    "repetition_penalty": st.sampled_from([0.01, 100.0]),
    "frequency_penalty": st.sampled_from([-2.0, 2.0]),
    "presence_penalty": st.sampled_from([-2, 2]),
    "logprobs": st.sampled_from([0, 20]),
    "grammar": st.sampled_from([None, {"type": "boolean"}]),
    "draft_policy": st.sampled_from([None, "mask", "validate"]),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    options: dict[str, Any] = {"max_model_len": 48, "verifier": "coupled"}
    with make_llm("llama", "chain:ngram+draft_model", near_copy("llama"), **options) as made:
        yield made


@settings(max_examples=examples(30))
@given(fields=st.fixed_dictionaries({}, optional=EXTREMES))
def test_bystanders_write_the_same(llm: LLM, fields: dict[str, Any]) -> None:
    try:
        extreme = SamplingParams(**fields)
    except ConfigError:
        return  # two of them do not go together
    expected = [one.text for one in llm.generate(PROMPTS, BYSTANDERS)]
    outputs = llm.generate([*PROMPTS, "b"], [*BYSTANDERS, extreme], on_error="return")
    assert [one.error for one in outputs[:2]] == [None, None]
    assert [one.text for one in outputs[:2]] == expected


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "n"])
def test_counts_have_a_bound(name: str) -> None:
    def made(value: int) -> SamplingParams:
        fields: dict[str, Any] = {"max_tokens": MAX_COUNT, name: value}
        return SamplingParams(**fields)

    assert getattr(made(MAX_COUNT), name) == MAX_COUNT
    fix = f"must be between . and {MAX_COUNT}"
    for value in (MAX_COUNT + 1, 2**63, 2**200):
        with pytest.raises(ConfigError, match=f"^{name}={value}: {fix}"):
            made(value)


def test_more_than_every_token_is_every_token() -> None:
    assert SamplingParams(top_k=2**63).top_k == MAX_COUNT
