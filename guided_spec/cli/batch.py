"""``guided-spec generate --input``: a file of requests, answered into another file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from guided_spec.cli.console import print_json, stderr, working
from guided_spec.cli.options import ModelOptions, TextOptions
from guided_spec.cli.words import told
from guided_spec.errors import ConfigError

if TYPE_CHECKING:
    from guided_spec.batch.run import Batch, Form, Summary

_STOPPED = 130  # as a shell says of what Ctrl-C has ended
_PACKAGES = ("fastapi", "prometheus_client", "starlette")


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """The files of a batch."""

    input: Annotated[
        Path | None,
        typer.Option(help="File of requests: .jsonl, .csv, .tsv or .parquet; needs --output."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(help="JSON Lines of results; run the same command to resume."),
    ] = None
    id_column: Annotated[
        str | None, typer.Option(help="Column to use as the id of each result. [row number]")
    ] = None
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Model name in requests; can be repeated.")
    ] = None

    @property
    def is_wanted(self) -> bool:
        """Whether there is a file to answer. Raises ConfigError for options that need one."""
        for field in fields(self):
            value = getattr(self, field.name)
            if self.input is None and value is not None:
                raise ConfigError(field.name, str(value), "needs a file to answer: give --input")
        return self.input is not None


def run_batch(
    files: BatchOptions,
    asked: TextOptions,
    load: ModelOptions,
    proposer: str | None,
    *,
    as_json: bool,
) -> None:
    """Answer what is left of a file. The exit code is 1 if a line could not be answered.

    Raises ConfigError.
    """
    if files.input is None or files.output is None:
        raise ConfigError("--output", None, "name the file that the answers go into")
    form = _form_of(files, asked, load)
    with working("reading the input"):
        from guided_spec.batch.run import Batch

        batch = Batch(files.input, files.output, form)
    with batch:
        try:
            _run(batch, load, proposer)
        except KeyboardInterrupt:
            _report(batch.summary, as_json=as_json)
            stderr().print("stopped: run the same command to resume")
            raise typer.Exit(_STOPPED) from None
        _report(batch.summary, as_json=as_json)
    if batch.summary.failed:
        raise typer.Exit(1)


def _run(batch: Batch, load: ModelOptions, proposer: str | None) -> None:
    if not batch.needs_model:
        batch.refuse_faults()
        return
    with working("loading the model"):
        llm = load.load_for_texts(proposer=proposer)
        from guided_spec.engine.rows.progress import ProgressBar

        stderr().print(repr(llm), style="dim")
    done = batch.summary.before
    with llm, ProgressBar(batch.summary.total, is_shown=None, unit="line", num_done=done) as bar:
        batch.run(llm, bar)


def _form_of(files: BatchOptions, asked: TextOptions, load: ModelOptions) -> Form:
    """What the lines of the input are: rows where there is a prompt, else requests."""
    model = load.model or "bundled"
    if asked.prompt is not None:
        from guided_spec.batch.rows import RowForm
        from guided_spec.engine.rows.template import PromptTemplate

        if files.served_model_name is not None:
            fix = "is for requests with a model of their own; leave it out, or the prompt"
            raise ConfigError("--served-model-name", files.served_model_name, fix)
        template = PromptTemplate(asked.text())
        return RowForm(model, template, asked.params(), asked.chat, files.id_column, told)
    for field in fields(asked):
        value = getattr(asked, field.name)
        if value != field.default:
            fix = "needs a PROMPT for the columns; requests have it in their bodies"
            raise ConfigError(field.name, str(value), fix)
    if files.id_column is not None:
        raise ConfigError("--id-column", files.id_column, "needs a PROMPT for the columns")
    try:
        from guided_spec.batch.requests import RequestForm
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _PACKAGES:
            raise
        fix = f"requests need {missing}: pip install 'guided-spec[batch]'"
        raise ConfigError("--input", str(files.input), fix) from None
    return RequestForm(model, tuple(files.served_model_name or [model]))


def _report(summary: Summary, *, as_json: bool) -> None:
    """Where the batch stands, in a line on stderr; as JSON on stdout."""
    if as_json:
        rate = {"tokens_per_second": summary.tokens_per_second}
        print_json(asdict(summary) | rate)
        return
    before = f", {summary.before} before" if summary.before else ""
    words = f"{summary.answered} of {summary.total} lines answered{before}, {summary.failed} failed"
    if summary.output_tokens:
        words += f"; {summary.output_tokens} tokens in {summary.seconds:.1f} s"
        words += f", {summary.tokens_per_second:.0f} a second"
    if summary.acceptance:
        words += f", {summary.acceptance:.0%} of drafts accepted"
    stderr().print(words)
