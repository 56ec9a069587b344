"""A bench report's plots hold its figures."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.plots import read_figure
from guided_spec.cli.main import app
from guided_spec.errors import ConfigError
from guided_spec.evaluate.measurement import Measurement
from guided_spec.evaluate.plots import (
    Origin,
    bench_figures,
    draw_all,
    training_figures,
)
from tests.benchmarks.test_plots import description, texts

ORIGIN = Origin("guided-spec bench", "none", "none", "2026-11-23")
PLAIN = Measurement("none", 4, 0, 100, 2.0, 100, mask_microseconds=3.0)
NGRAM = replace(
    PLAIN,
    name="ngram",
    seconds=1.0,
    drafted_at=(50, 40),
    accepted_at=(25,),
    mask_microseconds=4.25,
)
CHAIN = replace(NGRAM, name="chain:a+b", drafted_at=(9,) * 40, accepted_at=(9,) * 40)
BASELINE = Measurement("transformers", 4, 0, 100, 4.0, 100)


def rows(*measurements: Measurement) -> list[dict[str, Any]]:
    """As they come back from JSON."""
    found: list[dict[str, Any]] = json.loads(json.dumps([m.as_dict() for m in measurements]))
    return found


def test_each_figure_holds_what_was_measured() -> None:
    figures = bench_figures(rows(PLAIN, BASELINE, NGRAM, CHAIN), ORIGIN)
    speed, acceptance = figures["tokens_per_second"], figures["acceptance_by_position"]
    assert speed.series == {
        "none": [50.0],
        "transformers": [25.0],
        "ngram": [100.0],
        "chain:a+b": [100.0],
    }
    assert speed.highlight == ["ngram", "chain:a+b"]
    assert acceptance.series["ngram"] == [50.0, 0.0] + [None] * 14
    assert acceptance.series["chain:a+b"] == [100.0] * 16
    assert "the first 16 of 40 positions" in acceptance.note
    masks = figures["mask_cost"].series
    assert masks == {"none": [3.0], "ngram": [4.2], "chain:a+b": [4.2]}
    assert {figure.commands[0] for figure in figures.values()} == {"guided-spec bench"}


def test_a_proposer_that_was_measured_twice() -> None:
    figures = bench_figures(rows(NGRAM, NGRAM), ORIGIN)
    assert [*figures["tokens_per_second"].series] == ["ngram", "ngram (2)"]


def test_each_batch_size_has_a_panel() -> None:
    eight = [replace(one, batch_size=8, seconds=one.seconds / 2) for one in (PLAIN, NGRAM)]
    figures = bench_figures(rows(PLAIN, BASELINE, NGRAM, *eight), ORIGIN)
    speed = figures["tokens_per_second"]
    assert (speed.x, speed.ticks) == ("requests at a time", ["1", "8"])
    assert speed.series == {
        "none": [50.0, 100.0],
        "transformers": [25.0, None],  # where one request decodes at a time, and no other
        "ngram": [100.0, 200.0],
    }
    assert figures["tokens_per_forward"].series["ngram"] == [1.0, 1.0]
    assert [*figures["acceptance_by_position"].series] == ["ngram"]


def test_what_was_not_measured_has_no_figure() -> None:
    known = [*bench_figures(rows(BASELINE), ORIGIN)]
    assert known == ["tokens_per_second", "tokens_per_forward"]


@pytest.mark.parametrize("report", [[{"name": "none"}], [3], ["none"]])
def test_another_report_is_refused(report: Any) -> None:
    with pytest.raises(ConfigError, match="must be what guided-spec bench --output wrote"):
        bench_figures(report, ORIGIN)


def test_they_are_drawn(tmp_path: Path) -> None:
    report = rows(PLAIN, NGRAM, CHAIN)
    paths = draw_all(bench_figures(report, ORIGIN), tmp_path / "new" / "plots")
    assert [path.name for path in paths] == [
        f"{name}.svg" for name in bench_figures(report, ORIGIN)
    ]
    speed, _, acceptance, _ = paths
    assert read_figure(speed.with_suffix(".json")) == bench_figures(report, ORIGIN)[speed.stem]
    assert {"Tokens per second", "ngram", "100"} <= texts(speed)
    assert description(acceptance)["series"]["ngram"][:3] == [50.0, 0.0, None]
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--plot"):
        draw_all(bench_figures(report, ORIGIN), tmp_path / "file")


@pytest.mark.slow
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "w.jsonl").write_text('{"prompt": "aaaa", "regex": "a{9}"}\n')
    arguments = ["bench", "--workload", str(tmp_path / "w.jsonl"), "--proposers", "ngram", "--json"]
    arguments += ["--plot", str(tmp_path / "plots"), "--batch-size", "1,2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    measured = [json.loads(line) for line in result.stdout.splitlines()]
    assert sum(measured[-1]["drafted_at"]) == measured[-1]["drafted"] > 0
    assert [row["batch_size"] for row in measured] == [1, 1, 1, 2, 2]
    plots = sorted(path.name for path in (tmp_path / "plots").glob("*.svg"))
    known = ("acceptance_by_position", "mask_cost", "tokens_per_forward", "tokens_per_second")
    assert plots == [f"{name}.svg" for name in known]
    assert all(name in result.stderr for name in plots)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 1
    assert "guided-spec[plots]" in refused.stdout  # an error is JSON too


def test_a_log_is_drawn_in_few_points() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 1.0 / step} for step in range(1, 101)]
    lines += [{"step": step, "heldout_loss": 2.0} for step in (50, 100)]
    figure = training_figures(lines, ORIGIN)["loss"]
    assert figure.ticks == [str(step) for step in range(5, 101, 5)]
    assert figure.series["training"][0] == pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 5)
    held_out = dict(zip(figure.ticks, figure.series["held out"], strict=True))
    assert {tick for tick, value in held_out.items() if value is not None} == {"50", "100"}
    assert [*training_figures(lines[:1], ORIGIN)] == ["loss"]
