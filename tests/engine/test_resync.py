"""A matcher that loses its place is made anew; where that does not help, its request ends alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from guided_spec import step
from guided_spec.core import DecodeBatch
from guided_spec.engine.outputs import Completion
from guided_spec.errors import GrammarStateError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.state import TextState
from guided_spec.masks.constraint import Constraint
from guided_spec.step import Committed
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, near_copy, tiny_tokenizer

PROPOSERS = ("none", "draft_model", "chain:grammar_forced+draft_model")
PROMPTS = ["The name of the cat", "a1", "on and on"]
SPECS = [
    GrammarSpec.choice(["a cat", "a dog", "a caterpillar"]),
    # Only the first token fits at the start: a matcher that forgot the text refuses any other.
    GrammarSpec.regex("1[a-f]2[g-m]3[n-z]4[A-F]5[G-M]6[N-Z]"),
    None,
]
PARAMS = [SamplingParams(max_tokens=24, grammar=spec, logprobs=0) for spec in SPECS]
BROKEN = 1  # the request whose matcher breaks


def forget(constraint: Constraint) -> None:
    rewind(constraint._original)


def forget_fork(constraint: Constraint) -> None:
    constraint._fork.rollback_to(0)
    rewind(constraint._fork.text)


def rewind(text: TextState) -> None:
    """The library's matcher is at the start again, and nobody knows."""
    assert text.own_matcher is not None
    text.own_matcher.rollback(len(text.token_ids))


def change_grammar(constraint: Constraint) -> None:
    """Nor does a new matcher agree with the text."""
    with make_llm("llama") as llm:
        constraint.compiled = llm._grammars.submit(GrammarSpec.regex("[A-Z]+")).result()
    forget(constraint)


def run(proposer: str) -> list[Completion]:
    """K is small, so that there are commits to break; matchers beside a table would read later."""
    options: dict[str, Any] = {"num_draft_tokens": 2, "grammar_tables": "off"}
    with make_llm("llama", proposer, near_copy("llama"), **options) as llm:
        llm.compile(spec for spec in SPECS if spec is not None)  # so that all start together
        return [output.completions[0] for output in llm.generate(PROMPTS, PARAMS)]


def break_at(
    monkeypatch: pytest.MonkeyPatch, commits: Sequence[int], how: Callable[[Constraint], None]
) -> None:
    """Break the matcher of the regular expression's request before these of its commits."""
    commit_row = step._commit_row
    seen: list[Constraint] = []

    def breaking(batch: DecodeBatch, request: int, *row: Any) -> Committed:
        constraint = batch.constraints[request]
        if constraint is not None and constraint.compiled.new_matcher().accept_token(TEN):
            seen.append(constraint)
            if len(seen) in commits:
                how(constraint)
        return commit_row(batch, request, *row)

    monkeypatch.setattr(step, "_commit_row", breaking)


def tokens(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.text, completion.finish_reason


(TEN,) = tiny_tokenizer()("1")["input_ids"]  # no choice begins with it


@pytest.mark.parametrize("how", [forget, forget_fork])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_matcher_that_forgets_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, proposer: str, how: Callable[[Constraint], None]
) -> None:
    expected = run(proposer)
    break_at(monkeypatch, (2, 3), how)
    found = run(proposer)
    assert [tokens(c) for c in found] == [tokens(c) for c in expected]
    # Where nothing is drafted nobody asks the fork.
    resyncs = 0 if proposer == "none" and how is forget_fork else 2
    assert [c.stats.resyncs for c in found] == [0, resyncs, 0]
    assert [c.stats.resyncs for c in expected] == [0, 0, 0]
    assert found[BROKEN].stats.as_dict()["resyncs"] == resyncs


@pytest.mark.parametrize("proposer", PROPOSERS)
def test_a_request_that_cannot_be_rebuilt_ends_alone(
    monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    expected = run(proposer)
    break_at(monkeypatch, (2,), change_grammar)
    found = run(proposer)
    broken = found.pop(BROKEN)
    whole = expected.pop(BROKEN)
    assert [tokens(c) for c in found] == [tokens(c) for c in expected]
    assert broken.finish_reason == "error"
    assert isinstance(broken.error, GrammarStateError)
    assert f"token {whole.token_ids[0]} at output position 0" in str(broken.error)
    kept = len(broken.token_ids)
    assert 0 < kept < len(whole.token_ids)
    assert broken.token_ids == whole.token_ids[:kept]
    assert whole.text.startswith(broken.text)
    assert [one.token_id for one in broken.logprobs or ()] == broken.token_ids


def test_the_original_reads_a_text_before_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ends by a stop string, which the step knows nothing of."""
    params = [replace(p, stop=("2",)) for p in PARAMS]
    with make_llm("llama", "none") as llm:
        assert llm.generate(PROMPTS, params, on_error="return")[BROKEN].finish_reason == "stop"
    break_at(monkeypatch, (3,), change_grammar)
    with make_llm("llama", "none") as llm:
        found = llm.generate(PROMPTS, params, on_error="return")
    assert [output.error is not None for output in found] == [False, True, False]
    assert isinstance(found[BROKEN].error, GrammarStateError)
