"""Every finished text satisfies its grammar, whatever model, proposer, grammar and seed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.errors import BudgetTooSmallError, GrammarCompileError
from guided_spec.grammar.backends.auto import AutoBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.strategies import regexes, schemas
from tests.tiers import examples
from tests.tiny_llm import make_llm, near_copy

PROPOSERS = (
    "none",
    "ngram",
    "grammar_forced",
    "draft_model",
    "chain:grammar_forced+ngram",
    "chain:grammar_forced+draft_model",
)
FEW = settings(max_examples=examples(10), suppress_health_check=list(HealthCheck))

# Keywords in any combination: many such schemas are unsupported or admit nothing.
ANY_KEYWORDS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "array", "string", "integer", "number", "boolean"]),
        "enum": st.lists(st.integers(-9, 9) | st.none() | st.just("a"), min_size=1, max_size=3),
        "minLength": st.integers(0, 5),
        "maxLength": st.integers(0, 9),
        "minimum": st.integers(-300, 300),
        "exclusiveMaximum": st.integers(-300, 300),
        "multipleOf": st.sampled_from([2, 5, 0.5]),
        "pattern": st.sampled_from(["^a+$", "b", "^[0-9]{2}$"]),
        "minItems": st.integers(0, 2),
        "uniqueItems": st.booleans(),
        "items": st.sampled_from([{"type": "integer", "maximum": 9}, {"const": "x"}, False]),
        "properties": st.sampled_from([{"a": {"type": "boolean"}}, {"a": False, "b": {}}]),
        "required": st.sampled_from([["a"], ["b"], ["a", "b"], ["z"]]),
        "additionalProperties": st.sampled_from([False, {"type": "integer", "maximum": 9}]),
        "minProperties": st.integers(0, 2),
        "not": st.sampled_from([{"type": "null"}, {"const": 3}]),
    },
)


@pytest.fixture(scope="module", params=PROPOSERS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with make_llm("llama", request.param, near_copy("llama"), max_batch_size=10) as llm:
        yield llm


def specs() -> st.SearchStrategy[GrammarSpec]:
    json_specs = st.builds(
        lambda schema, free: GrammarSpec.json_schema(schema, any_whitespace=free),
        schemas(),
        st.booleans(),
    )
    return json_specs | regexes().map(GrammarSpec.regex)


def satisfies(text: str, spec: GrammarSpec) -> bool:
    """Judged by jsonschema and re, which share nothing with the grammar engine."""
    if spec.kind == "regex":
        return re.fullmatch(spec.source, text) is not None
    validator = jsonschema.Draft202012Validator
    checker = validator(json.loads(spec.source), format_checker=validator.FORMAT_CHECKER)
    return checker.is_valid(json.loads(text))


def is_prefix(llm: LLM, completion: Completion, spec: GrammarSpec) -> bool:
    """Replayed on a fresh matcher, which is not at its end yet."""
    matcher = AutoBackend(llm.vocabulary).compile(spec).new_matcher()
    accepted = all(matcher.accept_token(token) for token in completion.token_ids)
    return accepted and not matcher.is_terminated()


def shortest(llm: LLM, refusal: BudgetTooSmallError, spec: GrammarSpec) -> Completion:
    """What is written with the tokens that the refusal asks for."""
    assert refusal.least is not None
    assert refusal.least > refusal.max_tokens
    params = SamplingParams(max_tokens=refusal.least, grammar=spec)
    return llm.generate(["A"], params)[0].completions[0]


def check(llm: LLM, completion: Completion, spec: GrammarSpec) -> None:
    if isinstance(completion.error, BudgetTooSmallError):
        assert completion.text == ""
        completion = shortest(llm, completion.error, spec)
    assert completion.error is None, spec
    if completion.finish_reason == "stop":
        assert completion.is_complete
        assert completion.token_ids[-1] in llm.vocabulary.stop_token_ids
    if completion.is_complete:
        assert satisfies(completion.text, spec), (spec, completion.text)
    else:
        assert completion.finish_reason == "length"
        assert is_prefix(llm, completion, spec), (spec, completion.text)


@pytest.mark.slow
@FEW
@given(drawn=st.lists(specs(), min_size=5, max_size=5), seed=st.integers(0, 2**63 - 1))
def test_every_output_satisfies_its_grammar(llm: LLM, drawn: list[GrammarSpec], seed: int) -> None:
    """Each grammar greedily and sampled, all in one batch."""
    requests = [
        (spec, SamplingParams(max_tokens=32, temperature=temperature, seed=seed, grammar=spec))
        for spec in drawn
        for temperature in (0.0, 1.0)
    ]
    prompts = ["a cat "[: 1 + i % 6] for i in range(len(requests))]
    outputs = llm.generate(prompts, [params for _, params in requests], on_error="return")
    for (spec, _), output in zip(requests, outputs, strict=True):
        check(llm, output.completions[0], spec)


@pytest.mark.slow
@FEW
@given(drawn=st.lists(ANY_KEYWORDS, min_size=6, max_size=6), seed=st.integers(0, 99))
def test_any_keywords_are_obeyed_or_refused(llm: LLM, drawn: list[Any], seed: int) -> None:
    found = [GrammarSpec.json_schema(schema) for schema in drawn]
    params = [SamplingParams(max_tokens=24, temperature=1.0, seed=seed, grammar=s) for s in found]
    outputs = llm.generate(["A"] * len(found), params, on_error="return")
    for spec, output in zip(found, outputs, strict=True):
        if isinstance(output.error, GrammarCompileError):
            assert output.text == ""
        else:
            check(llm, output.completions[0], spec)


def test_most_of_the_judged_texts_are_whole(llm: LLM) -> None:
    """The properties above are not about prefixes only."""
    sources = ["[a-z]{2,6}", "x+y?", "(?:ab|cd){1,3}", r"\d\d", "[^a]b", ".{3}"]
    params = [SamplingParams(max_tokens=32, grammar=GrammarSpec.regex(s)) for s in sources]
    outputs = llm.generate(["A"] * len(params), params)
    assert sum(output.is_complete for output in outputs) >= len(sources) - 1
