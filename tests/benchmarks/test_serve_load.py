"""Clients of a server that is started for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks import serve_load
from guided_spec.engine.setup import bundled_asset
from guided_spec.errors import GuidedSpecError
from guided_spec.evaluate.workload import load_workload


@pytest.mark.slow
def test_documents_are_streamed_and_judged() -> None:
    items = load_workload(Path(bundled_asset("heldout.jsonl")), 6)
    with serve_load.served(["--proposer", "ngram", "--served-model-name", serve_load.NAME]) as url:
        found = asyncio.run(serve_load.stream_all(url, items, serve_load.Load(3, 0.5, 200)))
    assert found.requests >= 3
    assert not found.faults
    assert found.tokens >= 2 * found.requests
    assert len(found.first) == found.requests
    cells = serve_load._cells(found)
    assert cells[:2] == [str(found.requests), "0"]


def test_a_server_that_does_not_start() -> None:
    with (
        pytest.raises(GuidedSpecError, match="--proposer none2 did not come up"),
        serve_load.served(["--proposer", "none2"]),
    ):
        pass
