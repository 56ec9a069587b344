"""The hunt for inputs in short, and the inputs it has found: each was another error, or a hang."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guided_spec.grammar.spec import GrammarSpec
from tests.fuzz.examine import Examiner, FuzzFailureError
from tests.fuzz.inputs import texts
from tests.fuzz.schemas import adversarial, of_metaschema, values
from tests.fuzz.targets import TARGETS
from tests.masks.walks import accepts
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore")  # what such patterns and schemas bring about

FEW = settings(max_examples=examples(15), suppress_health_check=list(HealthCheck))
FOUND = [
    ("regex", "[[:alpha:]]"),
    ("regex", "((a*)*)*b"),
    ("regex", "(?:a?){300}"),
    ("lark", "\ud800a"),
    ("lark", 'start: "\ud800"'),
    ("tag", '{"type":"structural_tag","format":{"type":"triggered_tags","tags":[{}]}}'),
    ("tag", '{"type":"structural_tag","format":{"type":"triggered_tags","triggers":3}}'),
    (
        "tag",
        '{"type":"structural_tag","format":{"type":"triggered_tags","triggers":["<tool_call>"],'
        '"tags":[{"content":{"type":"any_text"},"end":"</f>"}]}}',
    ),
    ("schema", '{"type": "string", "pattern": "^5}$", "format": "date"}'),
    ("schema", '{"type": "string", "format": "uri", "minLength": 1, "maxLength": 40}'),
]


@pytest.fixture(name="examiner", scope="module")
def _examiner() -> Iterator[Examiner]:
    examiner = Examiner(("xgrammar", "llguidance", "auto"))
    yield examiner
    examiner.close()


@pytest.mark.parametrize("target", TARGETS)
@FEW
@given(data=st.data())
def test_any_text_ends_in_an_error_of_ours_or_a_grammar(
    examiner: Examiner, target: str, data: st.DataObject
) -> None:
    examiner.text(TARGETS[target], data.draw(texts(TARGETS[target])))


@FEW
@given(
    schema=adversarial() | st.deferred(of_metaschema),  # which takes seconds to build
    others=st.lists(values(), max_size=3),
    seed=st.integers(0, 99),
)
def test_any_schema_is_refused_or_enforced(
    examiner: Examiner, schema: Any, others: list[Any], seed: int
) -> None:
    examiner.spec(GrammarSpec.json_schema(json.dumps(schema)), seed, others)


@pytest.mark.parametrize(("target", "text"), FOUND)
def test_what_was_found(examiner: Examiner, target: str, text: str) -> None:
    examiner.text(TARGETS[target], text)


def test_what_the_examiner_notices(examiner: Examiner) -> None:
    """A grammar that admits more than its schema would not pass."""
    loose = GrammarSpec.json_schema({"type": "integer", "not": {"multipleOf": 2}})
    with pytest.raises(FuzzFailureError, match="wrote|admits"):
        _judge_as(examiner, loose, GrammarSpec.json_schema({"type": "integer"}))
    wrong = GrammarSpec.regex("[ab]{2}")
    with pytest.raises(FuzzFailureError, match="wrote"):
        _judge_as(examiner, wrong, GrammarSpec.regex("[ab]{3}"))


def _judge_as(examiner: Examiner, promised: GrammarSpec, compiled: GrammarSpec) -> None:
    grammar = examiner.backends["xgrammar"].compile(compiled)
    for seed in range(5):
        examiner.judge("xgrammar", promised, grammar, seed)


@pytest.mark.parametrize("name", ["uri", "email", "hostname", "json-pointer", "duration", "date"])
def test_a_format_keeps_to_a_length(examiner: Examiner, name: str) -> None:
    """Unchecked before, beside maxLength; now short strings of the format."""
    schema = {"type": "string", "format": name, "maxLength": 12}
    grammar = examiner.backends["xgrammar"].compile(GrammarSpec.json_schema(schema))
    assert not accepts(grammar, '"no such string at all"')
    assert not accepts(grammar, '"\\"')
    for seed in range(10):
        examiner.judge("xgrammar", GrammarSpec.json_schema(schema), grammar, seed)
