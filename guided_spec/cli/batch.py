"""``guided-spec generate --input``: a file of requests, answered into another file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from guided_spec.cli.console import print_json, stderr, working
from guided_spec.cli.options import Adapters, ModelNames, ModelOptions, TextOptions, read_loras
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
    served_model_name: ModelNames = None
    lora_modules: Adapters = None

    @property
    def is_wanted(self) -> bool:
        """Whether there is a file to answer. Raises ConfigError for options that need one."""
        for field in fields(self):
            value = getattr(self, field.name)
            if self.input is None and value is not None:
                value = str(value) if isinstance(value, Path) else value
                raise ConfigError(field.name, value, "needs a file to answer: give --input")
        return self.input is not None


def run_batch(
    files: BatchOptions,
    asked: TextOptions,
    load: ModelOptions,
    proposer: str | None,
    lora: str | None,
    *,
    as_json: bool,
) -> None:
    """Answer what is left of a file. The exit code is 1 if a line could not be answered.

    lora: the adapter that answers all rows. Raises ConfigError.
    """
    if files.input is None or files.output is None:
        raise ConfigError("--output", None, "name the file that the answers go into")
    loras = _read_adapters(files, asked, load, lora)
    form = _form_of(files, asked, load, loras)
    with working("reading the input"):
        from guided_spec.batch.run import Batch

        batch = Batch(files.input, files.output, form)
    with batch:
        try:
            _run(batch, load, proposer, loras)
        except KeyboardInterrupt:
            _report(batch.summary, as_json=as_json)
            stderr().print("stopped: run the same command to resume")
            raise typer.Exit(_STOPPED) from None
        _report(batch.summary, as_json=as_json)
    if batch.summary.failed:
        raise typer.Exit(1)


def _run(batch: Batch, load: ModelOptions, proposer: str | None, loras: Mapping[str, str]) -> None:
    if not batch.needs_model:
        batch.refuse_faults()
        return
    with working("loading the model"):
        llm = load.load_for_texts(proposer=proposer, loras=loras or None)
        from guided_spec.engine.rows.progress import ProgressBar

        stderr().print(repr(llm), style="dim")
    done = batch.summary.before
    with llm, ProgressBar(batch.summary.total, is_shown=None, unit="line", num_done=done) as bar:
        batch.run(llm, bar)


def _read_adapters(
    files: BatchOptions, asked: TextOptions, load: ModelOptions, lora: str | None
) -> dict[str, str]:
    """Adapters by name: that of all rows, or those that requests may name. Raises ConfigError."""
    if asked.prompt is None and lora is not None:
        fix = "needs a PROMPT for the columns; requests name adapters of --lora-modules"
        raise ConfigError("--lora", lora, fix)
    if asked.prompt is None:
        return read_loras(files.lora_modules, _model_names(files, load))
    if files.lora_modules is not None:
        fix = "is for requests, each with a model; --lora is for all rows"
        raise ConfigError("--lora-modules", files.lora_modules, fix)
    return {} if lora is None else {lora: lora}


def _model_names(files: BatchOptions, load: ModelOptions) -> tuple[str, ...]:
    """What requests may call the model itself."""
    return tuple(files.served_model_name or [load.model or "bundled"])


def _form_of(
    files: BatchOptions, asked: TextOptions, load: ModelOptions, loras: Mapping[str, str]
) -> Form:
    """What the lines of the input are: rows where there is a prompt, else requests."""
    model = load.model or "bundled"
    if asked.prompt is not None:
        from guided_spec.batch.rows import RowForm
        from guided_spec.engine.rows.template import PromptTemplate

        if files.served_model_name is not None:
            fix = "is for requests with a model of their own; leave it out, or the prompt"
            raise ConfigError("--served-model-name", files.served_model_name, fix)
        template = PromptTemplate(asked.text())
        params = replace(asked.params(), lora=next(iter(loras), None))
        return RowForm(model, template, params, asked.chat, files.id_column, told)
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
    return RequestForm(model, _model_names(files, load), loras)


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
