"""The benchmark of training gives every variant the same work."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.training import VARIANTS, main

TOY = ["--shape", "toy", "--length", "32", "--documents", "2", "--draft-vocab-size", "64"]
TOY += ["--steps", "1", "--device", "cpu"]


@pytest.mark.slow
def test_eagle3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "found.json"
    names = ["ours", "ours:dense", "ours:recompute", "speculators", "speculators:head"]
    results = main([*TOY, "--output", str(output), "--variants", *names])
    assert set(names) < set(VARIANTS["eagle3"])
    has_theirs = find_spec("speculators") is not None
    assert [result.variant for result in results] == names[: 5 if has_theirs else 3]
    if not has_theirs:
        assert "speculators:head: speculators is not installed" in capsys.readouterr().out
    for result in results:
        # speculators also drafts from the end of a document into the next one of its row.
        error = 0.02 if result.variant.startswith("speculators") else 1e-5
        assert result.first_loss == pytest.approx(results[0].first_loss, rel=error)
        assert result.tokens_per_second > 0
        assert result.peak_bytes is None
    written = json.loads(output.read_text())["results"]
    assert [row["variant"] for row in written] == [result.variant for result in results]


@pytest.mark.slow
def test_dflash() -> None:
    """Anchors are drawn anew by each trainer, and speculators averages what ours adds up."""
    names = ["ours", "ours:recompute", "speculators"]
    options = ["--algorithm", "dflash", "--ttt-steps", "3", "--anchors", "20"]
    results = main([*TOY, *options, "--variants", *names])
    assert len(results) == (3 if find_spec("speculators") is not None else 2)
    assert results[0].first_loss == pytest.approx(results[1].first_loss, rel=1e-5)
    for result in results[2:]:
        assert 3 * result.first_loss == pytest.approx(results[0].first_loss, rel=0.1)


def test_dflash_of_specforge(capsys: pytest.CaptureFixture[str]) -> None:
    """Its loss is of the document's tokens, among all; it averages what ours adds up."""
    options = ["--algorithm", "dflash", "--ttt-steps", "3", "--anchors", "20"]
    assert main([*TOY, *options, "--variants", "specforge"]) == []
    assert "specforge: it has no dflash with --loss kl" in capsys.readouterr().out
    options += ["--loss", "token_cross_entropy"]
    assert main([*TOY, *options, "--variants", "specforge", "speculators"]) == []
    found = capsys.readouterr().out
    assert "specforge: it scores all tokens: pass --draft-vocab-size 512" in found
    assert "speculators: it has no dflash with --loss token_cross_entropy" in found
    results = main([*TOY, *options, "--draft-vocab-size", "512", "--variants", "ours", "specforge"])
    assert [result.variant for result in results][0] == "ours"
    for result in results[1:]:
        assert 3 * result.first_loss == pytest.approx(results[0].first_loss, rel=0.1)
