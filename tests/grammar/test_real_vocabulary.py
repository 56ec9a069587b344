"""Budgets over a real vocabulary: real schemas, their valid instances, every wrapper of a matcher.

With tokens to spare a budget changes nothing; near its end rows and ``accept_token`` still agree.
"""

from __future__ import annotations

import gzip
import random
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from benchmarks.schemas.budgets import Document, Times, documents_of, follow
from benchmarks.schemas.corpus import load_cases
from guided_spec.errors import BudgetTooSmallError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.backends.llguidance import LLGuidanceBackend
from guided_spec.grammar.backends.registry import GRAMMAR_BACKENDS, register_grammar_backend
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.completion.endings import NEVER
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.protocol import GrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.markers import Markers
from guided_spec.grammar.text.state import TextState
from guided_spec.grammar.vocabulary import Vocabulary
from tests.grammar.completion.test_completion import check_agreement, legal
from tests.tiers import examples

DATA = Path(__file__).parents[1] / "data"
CASES = load_cases([DATA / "bfcl", DATA / "json_schema_test_suite"])
ITEMS = {"type": "object", "properties": {"id": {"type": "integer"}}}
LIST = {"type": "array", "items": ITEMS}
FAR = 500
WRAPPERS = ("plain", "marker", "guarded", "any order", "isolated")


@cache
def tokenizer() -> Any:
    data = gzip.decompress((DATA / "tokenizers" / "smollm2" / "tokenizer.json.gz").read_bytes())
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(data.decode()), eos_token="<|im_end|>"
    )


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.from_tokenizer(tokenizer(), len(tokenizer()), [tokenizer().eos_token_id])


@cache
def backend_of(wrapper: str) -> GrammarBackend:
    backend = BackendChoice("auto", vocabulary())
    if wrapper == "marker":
        return GrammarPipeline(backend, markers=Markers.from_tokenizer(vocabulary(), tokenizer()))
    if wrapper == "isolated":
        make = partial(BackendChoice, "auto")
        return GrammarPipeline(backend, GrammarLimits(), make=make, name="auto")
    return backend


@cache
def endings() -> EndingsCache:
    return EndingsCache(vocabulary())


@cache
def documents() -> list[Document]:
    cases = random.Random(0).sample(CASES, 120)
    return list(documents_of(cases, BackendChoice("auto", vocabulary()), tokenizer()))


@pytest.mark.slow
def test_the_tokenizer_is_a_real_one() -> None:
    assert len(tokenizer()) == 49_152
    assert len(documents()) > 60
    kinds = {type(document.compiled).__name__ for document in documents()}
    assert len(kinds) == 2, "both backends take part"


@pytest.mark.parametrize("text", ['[{"id": 1}, {"id": 2}, {"id": 3}]', "[]", '[{"id": -70}]'])
def test_a_list_of_objects(text: str) -> None:
    """Closing an object and going on with the next in one token: ``},``."""
    compiled = LLGuidanceBackend(vocabulary()).compile(GrammarSpec.json_schema(LIST))
    token_ids = [*tokenizer()(text)["input_ids"], tokenizer().eos_token_id]
    for spare in (FAR, 40, 3):
        document = Document(text, compiled, token_ids)
        assert follow(document, endings(), len(token_ids) + spare, Times()) == "whole"


@given(st.data())
@settings(max_examples=examples(60))
def test_with_tokens_to_spare_a_budget_changes_nothing(data: st.DataObject) -> None:
    document = data.draw(st.sampled_from(documents()))
    budget = len(document.token_ids) + data.draw(st.integers(FAR, 2 * FAR))
    # Where the way to the end is lost, the budget steps aside: no token is masked either.
    assert follow(document, endings(), budget, Times()) in ("whole", "lost"), document.name


@pytest.mark.slow
def test_nearly_every_document_has_a_known_end_all_along() -> None:
    outcomes = [
        follow(document, endings(), len(document.token_ids) + FAR, Times())
        for document in documents()
    ]
    assert outcomes.count("whole") >= 0.99 * len(outcomes)


@given(st.data())
@settings(max_examples=examples(60))
def test_near_its_end_rows_and_tokens_agree(data: st.DataObject) -> None:
    document = data.draw(st.sampled_from(documents()))
    budget = len(document.token_ids) + data.draw(st.integers(0, 70))
    outcome = follow(document, endings(), budget, Times())
    assert outcome in ("whole", "masked", "lost"), document.name


@pytest.mark.slow
@given(st.data(), st.sampled_from(WRAPPERS))
@settings(max_examples=examples(25))
def test_random_texts_end_in_time_behind_every_wrapper(data: st.DataObject, wrapper: str) -> None:
    case = data.draw(st.sampled_from(CASES[:40]))
    seed, slack = data.draw(st.integers(0, 2**20)), data.draw(st.integers(0, 90))
    spec = GrammarSpec.json_schema(case.schema)
    if wrapper == "any order":
        spec = replace(spec, key_order="any")
    if wrapper == "marker":
        spec = spec.after("</think>")
    walk(spec, wrapper, random.Random(seed), slack)


def walk(spec: GrammarSpec, wrapper: str, dice: random.Random, slack: int) -> None:
    compiled = compiled_of(spec, wrapper)
    known = endings().of(compiled)
    least = known.cost(known.start)
    if least >= NEVER:
        with pytest.raises(BudgetTooSmallError, match="no way"):
            endings().bound(compiled, 10**6, is_required=True)
        return
    budget = least + slack
    matcher = endings().bound(compiled, budget, is_required=True).new_matcher()
    plain = compiled.new_matcher()
    assert isinstance(matcher, TextState)
    for length in range(budget + 1):
        if matcher.is_terminated():
            break
        ours, all_legal = (sorted(legal(m, vocabulary().vocab_size)) for m in (matcher, plain))
        assert ours, "a dead end"
        assert set(ours) <= set(all_legal)
        check_agreement(matcher, set(ours), dice.sample(all_legal, min(6, len(all_legal))))
        token = dice.choice(ours)
        assert matcher.accept_token(token)
        assert plain.accept_token(token)
        assert length < budget or matcher.has_lost_end
    assert matcher.is_terminated() or matcher.has_lost_end


@cache
def compiled_of(spec: GrammarSpec, wrapper: str) -> Any:
    if wrapper != "guarded":
        return backend_of(wrapper).compile(spec)
    try:
        register_grammar_backend("hidden", hidden)
        backend = BackendChoice("auto", vocabulary())
        return backend.compile(spec.with_backend("hidden"))
    finally:
        GRAMMAR_BACKENDS.pop("hidden", None)


def hidden(words: Vocabulary) -> GrammarBackend:
    """llguidance as a backend that nobody here knows."""
    return Hidden(LLGuidanceBackend(words))


class Hidden:
    def __init__(self, backend: GrammarBackend) -> None:
        self.vocabulary = backend.vocabulary
        self._backend = backend

    def compile(self, spec: GrammarSpec) -> Any:
        return HiddenGrammar(self._backend.compile(spec))


class HiddenGrammar:
    excluded: frozenset[int] = frozenset()
    memory_size_bytes = 0

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def new_matcher(self) -> Any:
        return self._inner.new_matcher()

    def new_style_matcher(self) -> None:
        return None


@pytest.mark.slow
def test_most_documents_pass_the_end_of_their_budget() -> None:
    """Rows there hold what fits, as far as that was found: not all of it, but nearly."""
    outcomes = [
        follow(document, endings(), len(document.token_ids) + 6, Times())
        for document in documents()
    ]
    assert outcomes.count("whole") > 0.9 * len(outcomes)
    assert not {"disagrees", "other row"}.intersection(outcomes)
