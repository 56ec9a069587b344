"""Constrained texts end whole within ``max_tokens``, and speculation does not change their law."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache

import pytest
import torch

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.errors import BudgetTooSmallError, ConfigError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion import rule_endings as completion_states
from guided_spec.grammar.completion.completion import CompletingGrammar, EndingsCache
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.state import probe
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, near_copy
from tests.toys import chi_square_p_value

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 1},
        "age": {"type": "integer"},
        "boss": {"$ref": "#"},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
SPECS = (
    GrammarSpec.json_schema(PERSON),
    GrammarSpec.json_schema(PERSON, any_whitespace=True),
    GrammarSpec.json_object(),
    GrammarSpec.regex(r"[\w ]*\.(yes|no){2,}"),
    GrammarSpec.ebnf('root ::= "(" (root | [a-z])* ")"'),
    GrammarSpec.json_schema(PERSON).after("<think>"),
    GrammarSpec.json_schema(PERSON).after("the end:", reasoning_budget=20),
)
PROPOSERS = ("none", "ngram", "grammar_forced", "draft_model", "chain:grammar_forced+draft_model")
PROMPTS = ("A", "The name of the cat is", '{"name": ')
RUNS = 84  # of each proposer
EXACT = GrammarSpec.regex("[ab]*c|d[a-z]{3}e*")
EXACT_BUDGET, NUM_SEEDS = 4, 2000


def least_of(llm: LLM, spec: GrammarSpec) -> int:
    """The smallest ``max_tokens`` that the engine takes."""
    error = one(llm, SamplingParams(max_tokens=1, grammar=spec, complete=True)).error
    assert isinstance(error, BudgetTooSmallError)
    assert error.least is not None
    return error.least


def one(llm: LLM, params: SamplingParams, prompt: str = "A") -> Completion:
    return llm.generate(prompt, params, on_error="return")[0].completions[0]


@pytest.mark.slow
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_every_text_is_whole(proposer: str) -> None:
    dice = random.Random(proposer)
    with make_llm("llama", proposer, near_copy("llama"), max_batch_size=60) as llm:
        least = {spec: least_of(llm, spec) for spec in SPECS}
        params = []
        for run in range(RUNS):
            spec = SPECS[run % len(SPECS)]
            budget = least[spec] + dice.randrange(51)
            heat = dice.choice((0.0, 1.0, 1.5))
            params.append(
                SamplingParams(max_tokens=budget, temperature=heat, seed=run, grammar=spec)
            )
        prompts = [dice.choice(PROMPTS) for _ in params]
        outputs = llm.generate(prompts, params, on_error="return")
        at_the_end = 0
        for param, output in zip(params, outputs, strict=True):
            completion = output.completions[0]
            assert completion.error is None
            assert completion.is_complete
            by = "length" if completion.stats.steered else "stop"
            assert completion.finish_reason == by
            assert len(completion.token_ids) <= param.max_tokens
            assert_valid(llm, param.grammar, completion.token_ids)
            at_the_end += len(completion.token_ids) == param.max_tokens
    assert at_the_end > RUNS / 4  # budgets that mattered


def assert_valid(llm: LLM, spec: GrammarSpec | None, token_ids: list[int]) -> None:
    """By a matcher that knows of no budget."""
    assert spec is not None
    matcher = llm._grammars.submit(spec).result().new_matcher()  # with the markers of this model
    assert all(matcher.accept_token(token) for token in token_ids)
    assert matcher.is_terminated()


@pytest.mark.slow
@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_budgets_do_not_let_proposers_change_a_text(verifier: str) -> None:
    """Greedy under either verifier, and sampled under coupled verification: the same tokens."""
    heats = (0.0,) if verifier == "rejection" else (0.0, 1.0)
    params = [
        SamplingParams(max_tokens=budget, temperature=heat, seed=budget, grammar=spec)
        for spec in SPECS[:4]
        for heat in heats
        for budget in (24, 29, 41)
    ]
    texts = {}
    for proposer in ("none", *PROPOSERS[2:]):
        options = {"verifier": verifier, "max_batch_size": 12}
        with make_llm("llama", proposer, near_copy("llama"), **options) as llm:
            outputs = llm.generate(["The age"] * len(params), params)
            texts[proposer] = [output.completions[0].token_ids for output in outputs]
    assert all(found == texts["none"] for found in texts.values())


def test_far_budgets_change_nothing() -> None:
    schema = {"type": "array", "items": {"enum": ["cat", 3, None]}, "maxItems": 3}
    specs = (GrammarSpec.json_schema(schema), GrammarSpec.regex("[a-f]{3,9}"))
    with make_llm("llama", "chain:grammar_forced+ngram", max_batch_size=30) as llm:
        for spec in specs:
            found = []
            for complete in (None, False):
                params = [
                    SamplingParams(
                        max_tokens=120, temperature=1.0, seed=seed, grammar=spec, complete=complete
                    )
                    for seed in range(30)
                ]
                found.append(llm.generate(["A"] * 30, params))
            for whole, cut in zip(*found, strict=True):
                assert cut.finish_reason == "stop"
                assert whole.completions[0].token_ids == cut.completions[0].token_ids


@pytest.mark.slow
def test_a_grammar_that_is_used_for_long_keeps_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of its texts grows with each of them, and begins anew in time."""
    monkeypatch.setattr(completion_states, "_MOST_STATES", 160)
    spec = GrammarSpec.regex("([a-z]{1,3} ){2,90}")
    with make_llm("llama", "ngram", max_batch_size=4) as llm:
        compiled = llm._grammars.submit(spec).result()
        assert llm._endings is not None
        endings = llm._endings.of(compiled)
        letter, space = (int(llm.vocabulary.single_byte_ids[byte]) for byte in b"a ")
        state = endings.start
        while not endings.is_filling_up:
            state = endings.after(state, (letter, space), probe(compiled.new_matcher()))
            assert state is not None
        assert llm._endings.of(compiled) is not endings
        params = [
            SamplingParams(max_tokens=40, temperature=1.5, seed=seed, grammar=spec)
            for seed in range(4)
        ]
        outputs = llm.generate(["A"] * 4, params)
    assert all(output.is_complete for output in outputs)


def test_without_it_texts_are_cut() -> None:
    spec = GrammarSpec.regex("[a-z]{40}")
    with make_llm("llama") as llm:
        cut = one(llm, SamplingParams(max_tokens=5, grammar=spec, complete=False))
        assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)
        least = least_of(llm, spec)
        assert 5 < least <= 41
        refused = one(llm, SamplingParams(max_tokens=least - 1, grammar=spec))
        assert refused.finish_reason == "error"
        assert not refused.token_ids
        assert f"at least {least}" in str(refused.error)
        whole = one(llm, SamplingParams(max_tokens=least, grammar=spec))
        assert (whole.finish_reason, len(whole.text)) == ("stop", 40)


def test_the_context_is_a_budget_too() -> None:
    with make_llm("llama", max_model_len=40) as llm:
        spec = GrammarSpec.json_schema(PERSON)
        for seed in range(8):
            params = SamplingParams(max_tokens=400, temperature=1.5, seed=seed, grammar=spec)
            assert one(llm, params).is_complete


def test_free_text_has_no_end_to_reach() -> None:
    with pytest.raises(ConfigError, match="grammar"):
        SamplingParams(complete=True)


@cache
def exact_law() -> dict[tuple[int, ...], float]:
    """The probability of every text of ``EXACT`` in so many tokens, from the model's own logits."""
    with make_llm("llama") as llm:
        compiled = XGrammarBackend(llm.vocabulary).compile(EXACT)
        grammar = CompletingGrammar(
            compiled, EndingsCache(llm.vocabulary).of(compiled), EXACT_BUDGET
        )
        prompt, law = llm.encode("A"), dict[tuple[int, ...], float]()
        texts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        while texts:
            text, mass = texts.pop()
            matcher = grammar.new_matcher()
            assert all(matcher.accept_token(token) for token in text)
            if matcher.is_terminated():
                law[text] = mass
                continue
            row = torch.zeros(1, num_mask_words(llm.vocabulary.vocab_size), dtype=torch.int32)
            matcher.fill_next_token_bitmask(row, 0)
            legal = unpack_bitmask(row, llm.vocabulary.vocab_size)[0]
            with torch.inference_mode():
                logits = llm.model(torch.tensor([prompt + list(text)])).logits[0, -1].double()
            probs = logits.masked_fill(~legal, -torch.inf).softmax(-1).tolist()
            texts.extend(((*text, t), mass * p) for t, p in enumerate(probs) if p > 0)
    return law


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["none", "draft_model", "chain:grammar_forced+draft_model"])
def test_the_law_of_whole_texts_under_a_budget(proposer: str) -> None:
    law = exact_law()
    options = {"max_batch_size": 100, "max_model_len": 24, "num_draft_tokens": 3}
    with make_llm("llama", proposer, near_copy("llama", 0.05), **options) as llm:
        params = SamplingParams(
            temperature=1.0, seed=0, n=NUM_SEEDS, grammar=EXACT, max_tokens=EXACT_BUDGET
        )
        group = llm.generate("A", params)[0].completions
    counts = Counter(tuple(completion.token_ids) for completion in group)
    assert set(counts) <= set(law)
    observed = torch.tensor([float(counts[text]) for text in law])
    expected = torch.tensor(list(law.values()), dtype=torch.float64)
    assert int((expected * NUM_SEEDS > 10).sum()) > 10
    assert chi_square_p_value(observed, expected) > 1e-6


def test_a_text_that_may_not_end_in_time_is_cut_off() -> None:
    """Its budget would leave nothing but the stop token at the last one, and that is banned."""
    spec = GrammarSpec.regex("[a-z]{1,100}")
    with make_llm("llama", "ngram") as llm:
        by_length = {
            complete: one(
                llm, SamplingParams(max_tokens=5, min_tokens=5, grammar=spec, complete=complete)
            )
            for complete in (None, False)
        }
        context = SamplingParams(
            max_tokens=400, min_tokens=300, grammar=GrammarSpec.regex("[a-z]*")
        )
        by_context = one(llm, context)
        assert len(by_context.token_ids) == llm.max_model_len - len(llm.encode("A"))
    assert by_length[None].token_ids == by_length[False].token_ids
    assert [text.finish_reason for text in (*by_length.values(), by_context)] == ["length"] * 3
    assert by_length[None].stats.ends_lost == 1


def test_a_whole_text_is_longer_than_its_least_tokens() -> None:
    spec = GrammarSpec.regex("[a-z]{1,100}")
    with pytest.raises(ConfigError, match=r"min_tokens.* below max_tokens"):
        SamplingParams(max_tokens=5, min_tokens=5, grammar=spec, complete=True)
    with make_llm("llama") as llm:
        text = one(llm, SamplingParams(max_tokens=5, min_tokens=4, grammar=spec, complete=True))
    assert text.is_complete
    assert len(text.token_ids) == 5
