"""Hostile grammars, end to end: an error of ours or a right text, and the engine goes on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import RequestOutput
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.evaluate.measurement import is_valid
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.grammar.hostile_cases import CASES, NOT_GRAMMARS
from tests.tiny_llm import make_llm

NORMAL = SamplingParams(
    max_tokens=24,
    grammar=GrammarSpec.json_schema(
        {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    ),
)
# What ends a worker comes last: the next one takes seconds to start.
KINDS = sorted(
    {spec.kind for spec in CASES.values()}, key=lambda kind: (kind == "json_schema", kind)
)
LAST = "billion laughs"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    limits = GrammarLimits(compile_seconds=2.0, compile_bytes=2**30)
    options = {"grammar_limits": limits, "compile_threads": 1}  # one worker for all
    with make_llm("llama", "chain:grammar_forced+ngram", **options) as llm:
        yield llm


def test_there_are_many() -> None:
    assert len(CASES) >= 100
    assert set(KINDS) >= {"json_schema", "regex", "choice", "ebnf", "lark", "structural_tag"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_each_fails_alone_or_writes_what_it_allows(llm: LLM, kind: str) -> None:
    cases = {name: spec for name, spec in CASES.items() if spec.kind == kind}
    if LAST in cases:
        cases[LAST] = cases.pop(LAST)
    cases.pop("2,000 properties", None)  # seconds of work, and the compiler's tests have it
    complete = False if kind == "json_schema" else None  # llguidance's endings take seconds each
    params = [
        SamplingParams(max_tokens=40, grammar=spec, complete=complete) for spec in cases.values()
    ]
    *outputs, normal = llm.generate(["A"] * (len(cases) + 1), [*params, NORMAL], on_error="return")
    for (name, spec), output in zip(cases.items(), outputs, strict=True):
        check(name, spec, output)
    after = llm.generate(["A"], [NORMAL])[0]
    for output in (normal, after):
        assert output.finish_reason == "stop"
        assert output.text in ('{"a": "x"}', '{"a": "y"}')


def check(name: str, spec: GrammarSpec, output: RequestOutput) -> None:
    if output.error is not None:
        assert isinstance(output.error, GuidedSpecError), (name, output.error)
        assert 0 < len(str(output.error)) < 3_000, name
        assert output.text == "", name
    else:
        assert len(output.token_ids) <= 40, name
        assert output.finish_reason in ("stop", "length"), name
        if output.finish_reason == "stop":
            assert is_valid(output.text, spec), (name, output.text)


@pytest.mark.parametrize("name", NOT_GRAMMARS)
def test_what_is_no_grammar_is_refused_where_it_is_written(name: str) -> None:
    with pytest.raises(ConfigError):
        NOT_GRAMMARS[name]()
