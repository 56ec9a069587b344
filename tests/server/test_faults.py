"""Errors of the library, as a client sees them."""

from __future__ import annotations

from guided_spec.errors import GrammarCompileError, GrammarWorkerError
from guided_spec.server.faults import api_error


def test_a_worker_that_was_killed_is_no_fault_of_the_client_s() -> None:
    found = api_error(GrammarWorkerError("killed"), "guided_json")
    assert (found.status, found.code, found.param) == (503, "grammar_worker", "guided_json")
    assert api_error(GrammarCompileError("broken")).status == 400
