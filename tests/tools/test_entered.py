"""The tool that counts the files which a step goes through sees those, and no others."""

from __future__ import annotations

from guided_spec.core import from_propose
from guided_spec.proposers.ngram import NGram
from tests.toys import toy_context
from tools.entered import engine_steps, entered, head_reader, take_step


def test_a_step_enters_the_step_and_its_own_proposer() -> None:
    proposer = from_propose(NGram(toy_context()))
    files = entered(lambda: take_step(proposer))
    assert len(files) == len(set(files))
    assert {"step.py", "proposers/ngram.py", "ops/sampling/verify.py"} < set(files)
    assert "proposers/suffix.py" not in files
    assert entered(lambda: None) == []


def test_hidden_states_come_from_the_target_to_the_head_without_being_loaded() -> None:
    files = entered(head_reader())
    assert files[0] == "engine/target/line_target.py"
    assert {"models/line_lm.py", "proposers/learned_head.py", "models/heads/eagle.py"} < set(files)
    assert "models/loading.py" not in files


def test_a_step_of_an_engine_is_traced_from_the_plan_to_the_commit() -> None:
    found = engine_steps("ngram")
    assert {"engine/engine.py", "step.py", "proposers/ngram.py", "masks/constraint.py"} < {
        *found.files
    }
    assert len(found.files) <= found.changes < found.calls
