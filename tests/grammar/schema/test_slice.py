"""Hundreds of schemas with instances: what is accepted is judged right, and texts are valid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schemas.corpus import load_cases
from benchmarks.schemas.enforced import summarize
from benchmarks.schemas.judge import Judge, SchemaVerdict, random_text
from guided_spec.errors import UnsatisfiableGrammarError, UnsupportedSchemaError
from guided_spec.grammar.backends.auto import AutoBackend
from guided_spec.grammar.schema.lower import lower
from guided_spec.grammar.spec import GrammarSpec
from tests.grammar.schema.test_lower import SCHEMAS, VALUES
from tests.masks.walks import BYTES, accepts
from tests.tiers import examples

DATA = Path(__file__).parent.parent.parent / "data"
FOLDERS = [DATA / "json_schema_test_suite", DATA / "bfcl"]
CASES = load_cases(FOLDERS)
BACKEND = AutoBackend(BYTES)
REFUSED = {
    "steps between numbers": {"multipleOf/2", "multipleOf/3"},
    "no positive spelling": {"not/8"},
    "what branches evaluate": {"unevaluatedItems/12", "unevaluatedProperties/12"}
    | {"unevaluatedProperties/34"},
}
NARROWER = {
    "the order of keys": {"allOf/0", "allOf/1", "const/1", "unevaluatedProperties/19"},
    "1.0 for 1": {*(f"const/{n}" for n in range(10, 14)), *(f"enum/{n}" for n in range(9, 13))}
    | {"type/0"},
    "numbers that are no integers": {"oneOf/0"},
    "control characters in keys": {"dependentRequired/3"},
    "keys beside those of a class of many ranges": {"patternProperties/5"},
    "items that stand together": {"maxContains/3", "minContains/2"},
    "what branches evaluate": {f"unevaluatedItems/{n}" for n in (8, 11, 14, 21, 22, 23, 24, 27)}
    | {f"unevaluatedProperties/{n}" for n in (11, 14, 15, 16, 17, 35, 39, 40)},
}


class ByteTokenizer:
    """One token a byte, as ``BYTES`` has them."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        return {"input_ids": list(text.encode())}


@pytest.fixture(scope="module")
def verdicts() -> list[SchemaVerdict]:
    judge = Judge(BACKEND, ByteTokenizer(), 3, {"additional_properties": "schema"})
    return [judge.judge(case) for case in CASES]


@pytest.fixture(scope="module")
def closed() -> list[SchemaVerdict]:
    judge = Judge(BACKEND, ByteTokenizer(), 3, {})
    return [judge.judge(case) for case in CASES]


def ids(groups: dict[str, set[str]]) -> set[str]:
    return set().union(*groups.values())


@pytest.mark.slow
def test_the_slice_is_large(verdicts: list[SchemaVerdict]) -> None:
    assert len(verdicts) > 350
    assert sum(len(case.instances) for case in CASES) > 1000


def test_every_text_is_valid(verdicts: list[SchemaVerdict]) -> None:
    assert not [verdict for verdict in verdicts if verdict.invalid_texts]
    ended = [verdict for verdict in verdicts if verdict.texts == 3]
    accepted = [verdict for verdict in verdicts if verdict.outcome == "accepted"]
    assert len(ended) == len(accepted)


def test_no_invalid_instance_is_accepted(verdicts: list[SchemaVerdict]) -> None:
    assert not [verdict for verdict in verdicts if verdict.false_accepts]


def test_every_refusal_is_a_known_one(verdicts: list[SchemaVerdict]) -> None:
    refused = {v.id for v in verdicts if v.outcome in ("unsupported", "failed")}
    assert refused == ids(REFUSED)


def test_what_is_said_to_admit_nothing_has_no_valid_instance(
    verdicts: list[SchemaVerdict],
) -> None:
    nothing = {verdict.id for verdict in verdicts if verdict.outcome == "unsatisfiable"}
    assert nothing
    cases = [case for case in CASES if case.id in nothing]
    assert not [case.id for case in cases if any(i.valid for i in case.instances)]


def test_every_valid_instance_is_accepted_but_for_known_causes(
    verdicts: list[SchemaVerdict],
) -> None:
    rejected = {verdict.id for verdict in verdicts if verdict.false_rejects}
    assert rejected == ids(NARROWER)
    assert len(rejected) < len(verdicts) / 10


@pytest.mark.slow
def test_closed_objects_lose_only_further_keys(
    verdicts: list[SchemaVerdict], closed: list[SchemaVerdict]
) -> None:
    assert [v.outcome for v in closed] == [v.outcome for v in verdicts]
    assert not [v for v in closed if v.false_accepts or v.invalid_texts]
    num_lost = 0
    for case, before, after in zip(CASES, verdicts, closed, strict=True):
        lost = set(after.false_rejects) - set(before.false_rejects)
        narrower = lower(case.schema, additional="closed").schema
        validator = jsonschema.Draft202012Validator(narrower)
        assert not [at for at in lost if validator.is_valid(case.instances[at].data)], case.id
        num_lost += len(lost)
    assert num_lost > 2


def test_the_summary_counts_the_verdicts(verdicts: list[SchemaVerdict]) -> None:
    report = summarize(verdicts)
    total = report["splits"][-1]
    assert total["schemas"] == len(verdicts)
    assert total["all right"] + len(report["exceptions"]) == len(verdicts)
    assert total["all right"] <= total["in order"] <= total["accepted"]
    assert total["invalid"] == total["false accepts"] == 0


@settings(max_examples=examples(150))
@given(
    SCHEMAS,
    st.lists(VALUES, min_size=1, max_size=8),
    st.integers(0, 2**32),
    st.sampled_from(["closed", "schema"]),
)
def test_grammars_of_drawn_schemas_admit_only_what_is_valid(
    schema: Any, values: list[Any], seed: int, additional: Any
) -> None:
    """The backends' own reading of what lowering makes of keywords in any combination."""
    try:
        grammar = BACKEND.compile(GrammarSpec.json_schema(schema, additional_properties=additional))
    except (UnsupportedSchemaError, UnsatisfiableGrammarError):
        return
    validator = jsonschema.Draft202012Validator(schema)
    for text in (random_text(grammar, BYTES, number) for number in range(seed, seed + 3)):
        assert text is None or validator.is_valid(json.loads(text)), (schema, text)
    for value in [*values, None, 1, "a", [], {}, {"a": 1}, {"a": "a", "b": 1}, [1, "a"]]:
        if accepts(grammar, json.dumps(value)):
            assert validator.is_valid(value), (schema, value)
