"""Where commands write: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console

from guided_spec.errors import GuidedSpecError

__all__ = ["failures_as_messages", "print_json", "stderr", "stdout"]


def stdout() -> Console:
    """The console for results; text is never wrapped or coloured by its content."""
    return Console(highlight=False, soft_wrap=True, markup=False)


def stderr() -> Console:
    """The console for reports, progress and errors."""
    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON document on stdout, for machines."""
    typer.echo(json.dumps(value, ensure_ascii=False))


@contextmanager
def failures_as_messages() -> Iterator[None]:
    """A GuidedSpecError becomes its message on stderr and exit code 1."""
    try:
        yield
    except GuidedSpecError as error:
        stderr().print(f"{type(error).__name__}: {error}", style="red", markup=False)
        raise typer.Exit(1) from error
