"""``guided-spec check``: does a schema compile, and what would be enforced of it?"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from guided_spec.cli.console import failures_as_messages, print_json
from guided_spec.cli.grammar import read_text
from guided_spec.engine.setup import bundled_asset

__all__ = ["check"]


def check(
    schema: Annotated[Path, typer.Argument(help="JSON schema file.")],
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder of a model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Compile a schema and say what would be enforced; exit code 1 if it is not all of it."""
    with failures_as_messages():
        text = read_text("SCHEMA", schema)
        started = time.perf_counter()
        error = _compile(text, tokenizer or bundled_asset("target"))
        seconds = time.perf_counter() - started
    report = {
        "compiles": error is None,
        "error": None if error is None else f"{type(error).__name__}: {error}",
        "seconds": seconds,
        "not_enforced": [finding._asdict() for finding in _findings(text)],
    }
    print_json(report) if as_json else _print(report)
    if error is not None:
        raise typer.Exit(1)
