"""Models that run one text at a time: their texts, what they keep of them, and their engines."""

from __future__ import annotations

import copy
import logging
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec import GrammarSpec, SamplingParams
from guided_spec.errors import ModelError
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.stock.slots import SlotInputs
from guided_spec.models.text_lm import MOST_UNREAD, TextLM
from tests.models.speculation import Row, generate_alone, prefill, prompts_of, speculate
from tests.models.tiny import build
from tests.tiers import examples
from tests.tiny_llm import make_llm

NAMES = ["zamba", "llama4_scaled", "rwkv"]  # the last takes no cache
PROMPTS = ["The name is Ada. ", "Bob: ", "An error, and the age: "]
GRAMMARS: list[Any] = [
    GrammarSpec.json_schema(
        {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
    ),
    GrammarSpec.regex("[a-f]{3,20}"),
    None,
]


def text_lm(name: str, num_slots: int = 4, max_length: int = 90) -> TextLM:
    lm = make_causal_lm(build(name), num_slots=num_slots, max_length=max_length)
    assert isinstance(lm, TextLM)
    return lm


@pytest.mark.every_case
@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_speculative_batch_gives_what_generate_gives(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        lm = text_lm(name)
    assert "It runs one text at a time instead" in caplog.text
    prompts = prompts_of([5, 17, 1], lm.vocab_size, 0)
    expected = [generate_alone(lm.model, prompt, 25) for prompt in prompts]
    rows = [Row(s, p, e) for s, p, e in zip([3, 0, 2], prompts, expected, strict=True)]
    prefill(lm, rows)
    source = random.Random(0)
    while running := [row for row in rows if not row.is_done]:
        speculate(lm, running, source)
    assert [row.tokens[: len(row.expected)] for row in rows] == expected


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name", ["zamba", "mamba", "jamba", "rwkv", "nemotron_h", "kimi_linear", "llama"]
)
def test_half_precision_runs_in_the_same_form(name: str, dtype: torch.dtype) -> None:
    """The trial tells rounding from a form that is wrong for a few kinds of forwards only."""
    forms = []
    half: Any = copy.deepcopy(build(name))
    for model in (build(name), half.to(dtype)):
        for num_slots in (1, 3):
            lm = make_causal_lm(model, num_slots=num_slots, max_length=90)
            forms.append((lm.runs_as, lm.feeding if isinstance(lm, TextLM) else None))
    assert len(set(forms)) == 1


@settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=12))
@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_are_not_kept_leave_no_trace(name: str, steps: list[tuple[int, int]]) -> None:
    """Each step feeds some tokens and keeps fewer; then the next token's scores are compared."""
    lm = text_lm(name, num_slots=1)
    source, kept = random.Random(len(steps)), list[int]()
    for fed, staying in [(3, 3), *steps]:
        tokens = [source.randrange(lm.vocab_size) for _ in range(fed)]
        lm.forward(SlotInputs(torch.tensor([tokens]), [0], [len(kept)], [fed]), logits="none")
        lm.commit([min(staying, fed)], [fed])
        kept += tokens[:staying]
    last = SlotInputs(torch.tensor([[7]]), [0], [len(kept)], [1])
    found = lm.forward(last, logits="last").logits
    model: Any = lm.model
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([[*kept, 7]]), use_cache=False).logits[:, -1:]
    assert found is not None
    # transformers' step of one token rounds otherwise than its chunks; scores are about 5.
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


def test_many_tokens_that_are_read_again_are_read_once() -> None:
    """A text whose drafts are always refused does not grow what each forward reads."""
    lm = text_lm("zamba", num_slots=1)
    for kept in range(3 * MOST_UNREAD):
        lm.forward(SlotInputs(torch.tensor([[1, 2]]), [0], [kept], [2]), logits="none")
        lm.commit([1], [2])
        (text,) = lm.save_states([0])
        assert len(text.unread) <= MOST_UNREAD + 1


def test_copies_and_saved_states_go_on_by_themselves() -> None:
    lm = text_lm("zamba")
    lm.forward(SlotInputs(torch.tensor([[1, 2, 3]]), [0], [0], [3]), logits="none")
    lm.commit([3], [3])
    lm.copy_slot(0, [2, 3], 3)
    saved = lm.save_states([0])
    first = SlotInputs(torch.tensor([[9, 8]]), [0], [3], [2])
    before = lm.forward(first).logits
    lm.commit([2], [2])
    lm.load_states([0], saved)
    for slot in (2, 0, 3):
        found = lm.forward(first._replace(slots=[slot])).logits
        torch.testing.assert_close(found, before)
        lm.commit([2], [2])


def test_hidden_states_are_those_of_the_tokens_fed() -> None:
    lm, model = text_lm("llama4_scaled"), build("llama4_scaled")
    ids = prompts_of([9], lm.vocab_size, 1)[0]
    lm.forward(SlotInputs(torch.tensor([ids[:4]]), [1], [0], [4]), logits="none")
    lm.commit([3], [4])  # one is read again
    rest = SlotInputs(torch.tensor([ids[3:]]), [1], [3], [6])
    found = lm.forward(rest, logits="none", hidden_layers=(1, -1))
    assert found.logits is None
    assert found.hidden_states is not None
    with torch.inference_mode():
        own: Any = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    expected = torch.cat([own.hidden_states[1], own.hidden_states[-1]], -1)[:, 3:]
    torch.testing.assert_close(found.hidden_states, expected, atol=1e-4, rtol=1e-3)


def test_memory_of_a_token_and_of_a_text() -> None:
    """Twice: before a forward, and behind it."""
    lm = text_lm("zamba")
    assert lm.kv_bytes_per_token == 2 * 2 * (2 * 2 * 16 * 4)  # keys and values of two layers
    assert lm.state_bytes_per_slot > 2 * 2 * (64 * 16 * 4)  # of the two others


@pytest.mark.parametrize("proposer", ["ngram", "chain:grammar_forced+suffix", "draft_model"])
@pytest.mark.parametrize("name", ["zamba", "llama4_scaled", "rwkv"])
def test_speculation_writes_the_texts_of_plain_decoding(name: str, proposer: str) -> None:
    model = build(name, vocab_size=403)
    draft = copy.deepcopy(model) if proposer == "draft_model" else None
    params = [SamplingParams(max_tokens=24, grammar=grammar) for grammar in GRAMMARS]
    with make_llm(model, max_batch_size=2) as plain, make_llm(model, proposer, draft) as llm:
        expected = plain.generate(PROMPTS, params)
        found = llm.generate(PROMPTS, params)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]
        if proposer == "draft_model":
            assert sum(one.stats.steps for one in found) < sum(one.stats.steps for one in expected)
        choices = llm.choose(PROMPTS[0], ["cat", "dog", "cats"])
        assert sum(choices.probabilities.values()) == pytest.approx(1, abs=1e-4)


def test_a_model_that_looks_ahead_is_refused_with_the_reason_against_slots() -> None:
    class Ahead(type(build("zamba"))):  # type: ignore[misc]
        def forward(self, input_ids: Any, **options: Any) -> Any:
            options["input_ids"] = input_ids
            if options.get("use_cache") is False:
                options["input_ids"] = input_ids.flip(-1)
            return super().forward(**options)

    model = copy.copy(build("zamba"))
    model.__class__ = Ahead
    with pytest.raises(ModelError, match="of a kind whose rule is not known; one text"):
        make_causal_lm(model, num_slots=1, max_length=20)
