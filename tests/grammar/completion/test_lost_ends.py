# ruff: noqa: ARG002 - stand-ins have the signatures of what they stand for
"""A budget that cannot be kept steps aside; with ``complete=True`` it ends its own request."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from guided_spec.errors import BudgetTooSmallError, GrammarStateError
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.completion.completion import CompletingGrammar, EndingsCache
from guided_spec.grammar.pipeline import GrammarCompileQueue, GrammarPipeline
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.row_filter import Probe
from guided_spec.grammar.text.state import new_text
from guided_spec.masks.constraint import Constraint
from guided_spec.ops.mask_words import full_row
from guided_spec.types import SamplingParams
from tests.grammar.completion.test_completion import VOCABULARY, legal
from tests.tiny_llm import make_llm

SIZE = VOCABULARY.vocab_size
LETTERS = XGrammarBackend(VOCABULARY).compile(GrammarSpec.regex("[a-z]{3,}"))
TEXT = list(b"abcdef")


class Forgetful:
    """Endings that know none behind ``known`` tokens, and refuse the token ``refused``."""

    is_exact = is_filling_up = False
    memory_size_bytes = 0
    vocab_size = SIZE
    start: Any = 0

    def __init__(self, known: int = 99, refused: int = -1) -> None:
        self._known, self._refused = known, refused

    def cost(self, state: int) -> int:
        return 1

    def stride(self, state: int, remaining: int) -> int:
        return 1

    def after(self, state: int, token_ids: Sequence[int], probe: Probe) -> int | None:
        return state + 1 if state < self._known else None

    def is_free(self, state: int, remaining: int) -> bool:
        return False

    def row(
        self, state: int, remaining: int, probe: Probe, legal: NDArray[np.int32] | None = None
    ) -> NDArray[np.int32]:
        return full_row(SIZE)

    def admits(self, state: int, token_id: int, remaining: int, probe: Probe) -> bool:
        return token_id != self._refused


@pytest.mark.parametrize("commit", ["commit", "commit_ahead"])
def test_a_lost_way_costs_the_budget_and_not_the_request(commit: str) -> None:
    grammar = CompletingGrammar(LETTERS, Forgetful(known=2), 50)
    constraint = Constraint(grammar, VOCABULARY.stop_token_ids)
    for count, token in enumerate(TEXT, 1):
        assert getattr(constraint, commit)([token]) == [token]
        assert constraint.catch_up() is None
        assert constraint.has_lost_end == (count > 2)
        plain = LETTERS.new_matcher()
        assert all(map(plain.accept_token, TEXT[:count]))
        assert legal(constraint.fork().text, SIZE) == legal(plain, SIZE)
    assert constraint.resyncs == 0


@pytest.mark.parametrize("commit", ["commit", "commit_ahead"])
def test_where_texts_must_be_whole_it_is_an_error(commit: str) -> None:
    grammar = CompletingGrammar(LETTERS, Forgetful(known=2), 50, is_required=True)
    constraint = Constraint(grammar, VOCABULARY.stop_token_ids)
    take = getattr(constraint, commit)
    take(TEXT[:2])
    with pytest.raises(GrammarStateError, match="after output token 3; complete=True requires"):  # noqa: PT012
        take(TEXT[2:3])
        failure = constraint.catch_up()
        assert failure is not None
        raise failure
    assert constraint.committed == TEXT[:3]


def test_a_token_that_the_budget_refuses_against_its_row_costs_a_resync(
    caplog: pytest.LogCaptureFixture,
) -> None:
    constraint = Constraint(CompletingGrammar(LETTERS, Forgetful(refused=ord("d")), 50))
    assert constraint.has_budget
    for token in TEXT:
        assert token in legal(constraint.fork().text, SIZE)
        assert constraint.commit([token]) == [token]
    assert (constraint.resyncs, constraint.has_lost_end) == (1, True)
    assert constraint.compiled is LETTERS
    assert not constraint.has_budget
    assert "the budget refuses token 100, which its row allowed" in caplog.text
    with pytest.raises(GrammarStateError, match="refuses token 48 at output position 6"):
        constraint.commit([ord("0")])


def test_a_request_without_a_known_end_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from guided_spec.grammar.completion import completion

    monkeypatch.setattr(completion, "SearchEndings", lambda *_: Unending())
    monkeypatch.setattr(EndingsCache, "_by_rules", lambda *_: None)
    spec = GrammarSpec.regex("[a-z]{40}")
    with make_llm("llama") as llm:
        params = [
            SamplingParams(max_tokens=5, grammar=spec),
            SamplingParams(max_tokens=5, grammar=spec, complete=True),
        ]
        aside, insists = llm.generate(["A"] * 2, params, on_error="return")
    assert (aside.finish_reason, len(aside.token_ids), aside.stats.ends_lost) == ("length", 5, 1)
    assert isinstance(insists.error, BudgetTooSmallError)
    assert "no way to end" in str(insists.error)


class Unending(Forgetful):
    def cost(self, state: int) -> int:
        return int(np.iinfo(np.int32).max)


def test_endings_live_as_long_as_their_grammar() -> None:
    cache = EndingsCache(VOCABULARY)
    compiled = XGrammarBackend(VOCABULARY).compile(GrammarSpec.regex("[a-f]{2,9}"))
    endings = weakref.ref(cache.of(compiled))
    assert cache.size_of(compiled) > 0
    gc.collect()
    assert endings() is cache.of(compiled)
    del compiled
    gc.collect()
    assert endings() is None


def test_what_hangs_on_grammars_keeps_to_the_bound_as_it_grows() -> None:
    cache = EndingsCache(VOCABULARY)
    backend = GrammarPipeline(XGrammarBackend(VOCABULARY), endings=cache)
    bound = 600_000
    alive: list[weakref.ref[Any]] = []
    queue = GrammarCompileQueue(backend, cache_bytes=bound, size_of_more=cache.size_of)
    try:
        for number in range(12):
            grammar = queue.submit(GrammarSpec.regex(f"[a-z]{{9,{20 + number}}}")).result()
            before = cache.size_of(grammar)
            state, endings = cache.of(grammar).start, cache.of(grammar)
            for token in b"abcdefghijklmnopqrst":
                endings.row(state, 99, new_text(grammar).without_budget())
                state = endings.after(state, (token,), new_text(grammar).without_budget())
            assert cache.size_of(grammar) > before
            assert queue.cached_bytes <= bound  # though nothing was asked for since it grew
            alive.append(weakref.ref(grammar))
            del grammar, endings, state
        queue.submit(GrammarSpec.regex("x")).result()
        gc.collect()
        kept = [found for ref in alive if (found := ref()) is not None]
        assert 0 < len(kept) < 12
        assert sum(map(cache.size_of, kept)) <= queue.cached_bytes <= bound
    finally:
        queue.close()
