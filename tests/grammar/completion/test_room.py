"""The budget of a text is what its output may still hold: the prompt takes no part of it."""

from __future__ import annotations

import pytest

from guided_spec.errors import BudgetTooSmallError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.guide import GuidedText
from guided_spec.types import SamplingParams
from tests.masks.walks import BYTES

ROOM = 8
LETTERS = GrammarSpec.regex("[a-z]{2,90}[.]")


@pytest.fixture(scope="module")
def compiled() -> CompiledGrammar:
    return XGrammarBackend(BYTES).compile(LETTERS)


@pytest.mark.every_case
@pytest.mark.parametrize("by_context", [False, True], ids=["max_tokens", "the context"])
@pytest.mark.parametrize("prompt_length", [1, 5, 30])
def test_a_text_that_goes_on_as_long_as_it_may_is_whole(
    compiled: CompiledGrammar, prompt_length: int, *, by_context: bool
) -> None:
    params = SamplingParams(max_tokens=400 if by_context else ROOM, grammar=LETTERS)
    length = prompt_length + ROOM if by_context else 1000
    prompt = [ord("x")] * prompt_length
    text = GuidedText.begin(prompt, params, BYTES, max_length=length, seed=0)
    text.bind(compiled, EndingsCache(BYTES))
    assert text.constraint is not None
    fork, written = text.constraint.fork(), 0
    while fork.text.accept_token(ord("a")):
        written += 1
    assert written == ROOM - len(".") - 1  # and the end-of-text token
    assert fork.text.accept_token(ord("."))
    assert fork.text.accept_token(BYTES.stop_token_ids[0])


SHORTEST = {
    "regex": (GrammarSpec.regex("([a-z]-){3,9}[.]"), b"a-a-a-."),
    "key": (
        GrammarSpec.json_schema(
            {
                "type": "object",
                "properties": {"a": {"type": "string", "minLength": 3, "maxLength": 9}},
                "required": ["a"],
            }
        ),
        b'{"a": "aaa"}',
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize("name", SHORTEST)
def test_what_has_to_be_repeated_counts_each_time(name: str) -> None:
    spec, text = SHORTEST[name]
    compiled = XGrammarBackend(BYTES).compile(spec)
    cache, least = EndingsCache(BYTES), len(text) + 1
    with pytest.raises(BudgetTooSmallError) as caught:
        cache.bound(compiled, least - 1, is_required=False)
    assert caught.value.least == least
    matcher = cache.bound(compiled, least, is_required=True).new_matcher()
    assert all(matcher.accept_token(byte) for byte in text)
    assert matcher.accept_token(BYTES.stop_token_ids[0])
