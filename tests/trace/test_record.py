"""What a trace says of its steps, and its JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.errors import ConfigError
from guided_spec.trace.record import Outcome, StepTrace, TokenTrace, from_json, to_json
from tests.trace.traces import make_step, make_token, make_trace

PROBS = st.none() | st.floats(0, 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)


@st.composite
def steps(draw: st.DrawFn) -> StepTrace:
    def token(outcome: Outcome) -> TokenTrace:
        return make_token(
            draw(TEXT),
            outcome,
            draft_prob=draw(PROBS),
            target_prob=draw(PROBS),
            allowed=draw(st.none() | st.integers(0, 2**31)),
            place=draw(st.none() | TEXT),
        )

    accepted = [token("accepted") for _ in range(draw(st.integers(0, 3)))]
    refused = [token("rejected")] * draw(st.integers(0, 1))
    unused = [token("unused") for _ in range(draw(st.integers(0, 2)))] if refused else []
    drawn = draw(st.sampled_from([None, token("replacement" if refused else "bonus")]))
    num_kept = draw(st.integers(0, len(accepted) + (drawn is not None)))
    return make_step([*accepted, *refused, *unused], drawn, num_kept)


@given(st.lists(steps(), max_size=4), st.lists(steps(), max_size=2))
def test_json_and_back(first: list[StepTrace], second: list[StepTrace]) -> None:
    traces = [make_trace(first), make_trace(second, proposer="none")]
    assert from_json(to_json(traces)) == traces
    assert from_json(to_json(traces, indent=2)) == traces


@given(st.lists(steps(), max_size=5))
def test_what_it_adds_up_to(made: list[StepTrace]) -> None:
    trace = make_trace(made)
    drafted, accepted = trace.drafted_at(), trace.accepted_at()
    assert len(drafted) == len(accepted) == max((len(step.drafted) for step in made), default=0)
    assert sum(drafted) == sum(len(step.drafted) for step in made)
    assert sum(accepted) == sum(
        token.outcome == "accepted" for step in made for token in step.drafted
    )
    assert all(a <= d for a, d in zip(accepted, drafted, strict=True))
    assert len(trace.token_ids) == sum(step.num_kept for step in made)


@pytest.mark.parametrize(
    "text", ["", "[", "{}", '[{"proposer": "none"}]', json.dumps([{"steps": 3}])]
)
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="pass what to_json wrote"):
        from_json(text)


def test_a_wrong_outcome_is_refused_with_its_place() -> None:
    step = make_step([make_token("a", "accepted")], None, 1)
    wrong: Any = json.loads(to_json([make_trace([step])]))
    wrong[0]["steps"][0]["drafted"][0]["outcome"] = "taken"
    with pytest.raises(ConfigError, match="0/steps/0/drafted/0/outcome"):
        from_json(json.dumps(wrong))
