"""Where commands write: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from guided_spec.cli.words import (
    grammar_option,
    log_as_spoken,
    option_names,
    running,
    said,
    told,
)
from guided_spec.errors import GuidedSpecError
from guided_spec.kinds import nearest_names

if TYPE_CHECKING:  # this loads torch
    from guided_spec.evaluate.measurement import Measurement

FILE_WIDTH = 160  # columns for a table that goes to a file or a pipe
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

# What typer raises for a bad command line: it exports the class below it only.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def stdout() -> Console:
    """The console for results; text is neither wrapped nor coloured by its content."""
    width = None if sys.stdout.isatty() else FILE_WIDTH
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False, width=width)


def stderr() -> Console:
    """The console for reports, progress and errors."""
    width = None if sys.stderr.isatty() else FILE_WIDTH
    return Console(stderr=True, highlight=False, markup=False, emoji=False, width=width)


def print_table(table: Table) -> None:
    """On stdout, fitted to a terminal."""
    stdout().print(table, soft_wrap=False)


def report_failures(found: Iterable[Measurement]) -> None:
    """Say on stderr how many requests failed, and why; raise ``typer.Exit`` with 1 if any did."""
    failed = [one for one in found if one.failed]
    for one in failed:
        counts = f"{one.failed} of {one.requests} requests failed"
        stderr().print(f"{one.name}: {counts}: {said(one.error)}")
    if failed:
        raise typer.Exit(1)


def print_json(value: Any) -> None:
    """One JSON document in one line on stdout, for machines."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def working(words: str) -> Status:
    """A spinner with ``words`` on stderr; none where that is no terminal, or has the log."""
    console = stderr()
    console.quiet = _logger().isEnabledFor(logging.INFO)
    return console.status(words)


@contextmanager
def failures_as_messages(
    options: Mapping[str, str] | None = None, *, as_json: bool = False
) -> Iterator[None]:
    """A GuidedSpecError becomes its message on stderr, and its exit code the command's.

    options: of the command, by the arguments that messages name.
    as_json: the message is JSON on stdout instead, ``{"error": {"type": ..., "message": ...}}``,
        and so is that of a bad command line.

    Also hides the progress bars of transformers, which loads a small model faster than they draw.
    """
    _hide_progress_bars()
    before = running.set(options or {})
    try:
        with log_as_spoken(logging.lastResort, running.get()):
            yield
    except GuidedSpecError as error:
        _print_error(error, told(error), as_json=as_json)
        raise typer.Exit(error.exit_code) from error
    except UsageError as error:
        given = vars(error)
        if "possibilities" in given:  # typer finds options that are far off, too
            known = {*option_names(given["ctx"].command).values()}
            given["possibilities"] = nearest_names(given["option_name"], known)
        if not as_json:
            raise  # typer prints it with the usage
        misuse = cast(typer.BadParameter, error)
        _print_error(misuse, misuse.format_message(), as_json=True)
        raise typer.Exit(misuse.exit_code) from error
    finally:
        grammar_option.set("")
        running.reset(before)


def _hide_progress_bars() -> None:
    """Without importing transformers: it reads the variable when it is imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if "transformers" in sys.modules:
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()


def _print_error(error: Exception, message: str, *, as_json: bool) -> None:
    name = type(error).__name__
    if as_json:
        print_json({"error": {"type": name, "message": message}})
    else:
        stderr().print(f"{name}: {message}", style="red")


def _logger() -> logging.Logger:
    return logging.getLogger("guided_spec")


@contextmanager
def _log_on_stderr(options: Mapping[str, str]) -> Iterator[None]:
    logger = _logger()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT, "%H:%M:%S"))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with log_as_spoken(handler, options):
            yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


def _show_log(context: typer.Context, wanted: bool) -> None:  # noqa: FBT001  # typer calls it so
    if wanted:
        context.with_resource(_log_on_stderr(option_names(context.command)))


# Options of every command. The second one does its work while it is read.
Json = Annotated[bool, typer.Option("--json", help="Print JSON, a line for each result.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", callback=_show_log, is_eager=True, help="Log to stderr."),
]
