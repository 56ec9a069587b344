"""Each job of the cookbook is short."""

from __future__ import annotations

from tests.docs.pages import ROOT, read_blocks

MOST_LINES = 5


def test_a_job_has_five_lines_at_most() -> None:
    shared, *jobs = read_blocks((ROOT / "docs" / "cookbook.md").read_text())
    assert "import" in shared.code
    lengths = {
        job.line: sum(bool(line.strip()) for line in job.code.splitlines())
        for job in jobs
        if job.language in ("python", "bash")
    }
    assert len(lengths) >= 12
    assert {line: count for line, count in lengths.items() if count > MOST_LINES} == {}
