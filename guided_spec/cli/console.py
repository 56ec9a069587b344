"""Where commands write: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from guided_spec.errors import GuidedSpecError

__all__ = ["failures_as_messages", "print_json", "stderr", "stdout"]


FILE_WIDTH = 160  # columns for a table that goes to a file or a pipe


def stdout() -> Console:
    """The console for results; text is neither wrapped nor coloured by its content."""
    width = None if sys.stdout.isatty() else FILE_WIDTH
    return Console(highlight=False, soft_wrap=True, markup=False, width=width)


def stderr() -> Console:
    """The console for reports, progress and errors."""
    width = None if sys.stderr.isatty() else FILE_WIDTH
    return Console(stderr=True, highlight=False, width=width)


def print_json(value: Any) -> None:
    """One JSON document on stdout, for machines."""
    typer.echo(json.dumps(value, ensure_ascii=False))


@contextmanager
def failures_as_messages() -> Iterator[None]:
    """A GuidedSpecError becomes its message on stderr, and its exit code the command's.

    Also hides the progress bars of transformers, which loads a small model faster than they draw.
    """
    disable_progress_bar()
    try:
        yield
    except GuidedSpecError as error:
        stderr().print(f"{type(error).__name__}: {error}", style="red", markup=False)
        raise typer.Exit(error.exit_code) from error
