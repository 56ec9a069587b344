"""The engine's limits for grammars, its cache of them, and requests that choose their backend."""

from __future__ import annotations

from typing import Any

import pytest

from guided_spec.config import EngineConfig
from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError, GrammarCompileError
from guided_spec.grammar.backends.registry import GrammarBackendName
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm

GOOD = GrammarSpec.regex("[a-f]{3}")
LARGE = GrammarSpec.regex("|".join(f"{'x' * 40}{i}" for i in range(400)))  # a worker tries it out
BEYOND: list[tuple[GrammarLimits, GrammarSpec, str]] = [
    (GrammarLimits(source_bytes=20), GrammarSpec.regex("a" * 21), "source_bytes=20: 21"),
    (GrammarLimits(nesting=3), GrammarSpec.regex("((((a))))"), "nesting=3: 4"),
    (GrammarLimits(repetitions=9), GrammarSpec.regex("a{10}"), "repetitions=9: 10"),
    (GrammarLimits(alternatives=2), GrammarSpec.choice(["a", "b", "c"]), "alternatives=2: 3"),
    (GrammarLimits(compile_seconds=1e-4), LARGE, "compile_seconds=0.0001"),
    (GrammarLimits(compile_bytes=1), LARGE, "compile_bytes=1"),
]
OPEN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


def one(llm: LLM, grammar: GrammarSpec, **params: Any) -> Any:
    return llm.generate(
        "A", SamplingParams(max_tokens=60, grammar=grammar, **params), on_error="return"
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize(("limits", "spec", "message"), BEYOND)
def test_the_limits_of_an_llm_are_what_is_enforced(
    limits: GrammarLimits, spec: GrammarSpec, message: str
) -> None:
    with make_llm("llama", grammar_limits=limits) as llm:
        error = one(llm, spec).error
        assert isinstance(error, GrammarCompileError)
        assert message in str(error)
        assert one(llm, GOOD).finish_reason == "stop"
        assert llm.with_proposer("ngram").config.grammar_limits == limits


def test_without_limits_of_its_own_it_takes_the_defaults() -> None:
    with make_llm("llama") as llm:
        for _, spec, _ in BEYOND[:4]:
            assert one(llm, spec).error is None
        error = one(llm, GrammarSpec.regex("a" * (2**20 + 1))).error
        assert "source_bytes=1048576" in str(error)


def test_settings_of_the_wrong_kind() -> None:
    for wrong in (30, {"nesting": 3}, "small"):
        with pytest.raises(ConfigError, match="grammar_limits=.*GrammarLimits"):
            EngineConfig(grammar_limits=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="grammar_cache_bytes=0: must be at least 1"):
        EngineConfig(grammar_cache_bytes=0)


def test_the_cache_keeps_to_its_bytes() -> None:
    with make_llm("llama", grammar_cache_bytes=300_000) as llm:
        queue, seen = llm._grammars, set[int]()
        for size in range(1, 12):
            assert one(llm, GrammarSpec.regex(f"[a-f]{{{size}}}")).error is None
            seen.add(queue.cached_bytes)
            assert queue.cached_bytes <= queue.cache_bytes == 300_000
        assert max(seen) > 0


def test_requests_choose_their_backend_in_one_batch() -> None:
    """The open object tells the two apart: llguidance alone writes further keys."""
    spec = GrammarSpec.json_schema(OPEN, additional_properties="schema")
    names: tuple[GrammarBackendName | None, ...] = ("xgrammar", "llguidance", "auto", None)
    specs = [spec.with_backend(name) for name in names]
    params = [
        SamplingParams(max_tokens=24, temperature=1.0, seed=seed, grammar=s, complete=False)
        for s in specs
        for seed in range(6)
    ]
    for proposer, default in (("grammar_forced", "xgrammar"), ("ngram", "auto")):
        with make_llm("llama", proposer, grammar_backend=default, max_batch_size=8) as llm:
            outputs = llm.generate(["A"] * len(params), params, on_error="return")
            found = {s.backend: llm._grammars.submit(s).result() for s in specs}
            assert [output.error for output in outputs] == [None] * len(params)
            used = [getattr(found[name], "backend", "") for name in names]
            expected = "llguidance" if default == "auto" else "xgrammar"
            assert used == ["xgrammar", "llguidance", "llguidance", expected]
            assert {o.text for o in outputs[:6]} <= {'{"a": true}', '{"a": false}'}
            assert any("," in output.text for output in outputs[6:12])


@pytest.mark.slow
def test_a_backend_goes_with_a_marker_and_large_grammars() -> None:
    pytest.importorskip("llguidance")
    with make_llm("llama", "ngram", max_model_len=400) as llm:
        after = GOOD.with_backend("llguidance").after("<think>", reasoning_budget=3)
        output = llm.generate("A", SamplingParams(max_tokens=60, grammar=after), on_error="return")[
            0
        ]
        assert output.error is None
        assert len(output.text.partition("<think>")[2]) == 3
        large = GrammarSpec.choice([f"{'x' * 5}{i}" for i in range(600)])
        assert one(llm, large.with_backend("llguidance")).text.startswith("xxxxx")


def test_a_backend_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="backend='outlines'.*auto, llguidance, xgrammar; "):
        GOOD.with_backend("outlines")
