"""The tables of ``bench gpu``: all their figures, within 80 columns."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table

from guided_spec.bench.gpu_end_to_end import DocumentRun
from guided_spec.bench.gpu_plugins import PluginRun
from guided_spec.bench.gpu_report import document_table, plugin_table, step_table
from guided_spec.bench.gpu_steps import StepTime
from guided_spec.bench.measurement import Measurement

NAME = "chain:grammar_forced+draft_model"
MEASURED = Measurement(NAME, 256, 0, 65536, 12.5, 20000, drafted=123456, accepted=98765)


def printed(table: Table) -> str:
    stream = io.StringIO()
    Console(file=stream, width=80, markup=False).print(table)
    assert max(map(len, stream.getvalue().splitlines())) <= 80
    return stream.getvalue()


def test_steps() -> None:
    figures: dict[str, Any] = {"median_ms": 1234.56, "p90_ms": 2345.67, "mean_ms": 1345.78}
    off = StepTime(NAME, 5, 256, 0.7, grammar=False, **figures, tokens=5.43, drafted=12.34)
    on = StepTime(NAME, 5, 256, 0.7, grammar=True, median_ms=1300.01, problem="a long story " * 10)
    text = printed(step_table([off, on]))
    for figure in ("1234.56", "2345.67", "1345.78", "5.43", "12.34", "1300.01", "+5.3%", "0.7"):
        assert figure in text
    assert f"{NAME}, 256, 0.7: a long story" in text


def test_documents() -> None:
    run = DocumentRun(NAME, 256, 0.7, MEASURED)
    refused = DocumentRun("vllm none", 1, 0.0, None, "refused [all]")
    text = printed(document_table([run, refused]))
    for figure in ("5243", "3.28", "123456", "98765", "100%"):
        assert figure in text
    assert "vllm none, 1, 0: refused [all]" in text
    text = printed(plugin_table([PluginRun(run, 20480, 240, {})]))
    for figure in ("20480", "80%", "5.82", "100%", "240/256"):
        assert figure in text
