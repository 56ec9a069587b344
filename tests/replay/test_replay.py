"""The recorded cases give again what was recorded, and the comparison notices what changed."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from guided_spec.proposers import PROPOSERS
from tests.replay.cases import CASES, Case
from tests.replay.record import (
    MISSING,
    TOLERANCE,
    CaseRecord,
    Difference,
    Fingerprint,
    RequestRecord,
    first_difference,
    path_of,
)
from tests.replay.recorder import record_case


def params_of(cases: tuple[Case, ...]) -> list[object]:
    """The cases as parameters of a test, those that are not quick marked slow."""
    return [
        pytest.param(case, id=case.name, marks=() if case.is_quick else pytest.mark.slow)
        for case in cases
    ]


@cache
def recorded(name: str) -> CaseRecord:
    return CaseRecord.from_json(path_of(name).read_text("utf-8"))


def complaint(name: str, difference: Difference) -> str:
    """What is not as recorded, and what to do about it."""
    return (
        f"case {name}, {difference}. If the change is wanted, record anew by "
        f"`python -m tests.replay --only {name}`, and commit the changed records by themselves: "
        "changed values are reviewed."
    )


@pytest.mark.every_case
@pytest.mark.parametrize("case", params_of(CASES))
def test_as_recorded(case: Case) -> None:
    difference = first_difference(recorded(case.name), record_case(case))
    if difference is not None:
        pytest.fail(complaint(case.name, difference))


def test_every_case_has_a_record_and_no_record_is_left_over() -> None:
    names = [case.name for case in CASES]
    assert len({*names}) == len(names)
    found = {path.stem for path in path_of("none").parent.iterdir()}
    assert found == {*names}


def test_every_proposer_of_the_package_has_a_case() -> None:
    named = {name for case in CASES for name in re.split("[:+]", case.proposer)}
    own = {name for name, factory in PROPOSERS.items() if str(factory).startswith("guided_spec.")}
    assert named >= own


def test_a_record_is_read_as_it_was_written() -> None:
    for case in CASES:
        text = path_of(case.name).read_text("utf-8")
        assert CaseRecord.from_json(text).to_json() == text


def third() -> RequestRecord:
    """Of the case that the tests below alter."""
    return recorded("budgets").requests[2]


def with_third(other: RequestRecord) -> CaseRecord:
    """The record of that case, with another one in the third one's place."""
    record = recorded("budgets")
    return replace(record, requests=[*record.requests[:2], other, *record.requests[3:]])


def with_step(at: int, **values: Any) -> CaseRecord:
    """The same, with other values in one of the third one's steps."""
    steps = [*third().steps]
    steps[at] = replace(steps[at], **values)
    return with_third(replace(third(), steps=steps))


THIRD = "wave 0, prompt 2, sample 0"


def test_another_token_is_noticed_where_it_is() -> None:
    draft = third().steps[2].draft
    found = first_difference(recorded("budgets"), with_step(2, draft=[draft[0], 402, *draft[2:]]))
    where = f"{THIRD}, step 2, draft[1]"
    assert found == Difference(where, draft[1], 402)
    message = complaint("budgets", found)
    assert message.startswith(f"case budgets, {where}: {draft[1]} was recorded, 402 was found. ")
    assert "python -m tests.replay --only budgets" in message


def test_another_mask_is_noticed_where_it_is() -> None:
    masks = (third().steps[1].masks or "").split()
    altered = with_step(1, masks=" ".join([*masks[:-1], "0" * 8]))
    where = f"{THIRD}, step 1, masks[{len(masks) - 1}]"
    expected = Difference(where, masks[-1], "0" * 8)
    assert first_difference(recorded("budgets"), altered) == expected


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"text": "other"}, "text"),
        ({"finish_reason": "stop"}, "finish_reason"),
        ({"stats": {}}, ""),
    ],
)
def test_another_text_or_counter_is_noticed(values: dict[str, Any], name: str) -> None:
    found = first_difference(recorded("budgets"), with_third(replace(third(), **values)))
    assert found is not None
    assert found.where == f"{THIRD}, {name or 'stats, accepted'}"


def test_a_missing_step_is_noticed() -> None:
    shorter = with_third(replace(third(), steps=third().steps[:-1]))
    last = len(third().steps) - 1
    expected = Difference(f"{THIRD}, step {last}", third().steps[last], MISSING)
    assert first_difference(recorded("budgets"), shorter) == expected


@pytest.mark.parametrize("is_same_machine", [True, False])
def test_log_probabilities_are_exact_only_on_the_same_machine(*, is_same_machine: bool) -> None:
    record, logprobs = recorded("budgets"), third().logprobs
    assert logprobs is not None
    there = record.fingerprint if is_same_machine else Fingerprint("another", "another")
    for distance, is_noticed in ((TOLERANCE / 2, is_same_machine), (TOLERANCE * 2, True)):
        other = replace(third(), logprobs=[*logprobs[:-1], logprobs[-1] - distance])
        found = first_difference(record, replace(with_third(other), fingerprint=there))
        assert (found is not None) == is_noticed
        assert found is None or found.where == f"{THIRD}, logprobs[{len(logprobs) - 1}]"
