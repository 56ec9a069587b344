"""``guided-spec generate``: one text, with a report of what speculation saved; or a batch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.status import Status
from rich.table import Table

from guided_spec.cli.batch import BatchOptions, run_batch
from guided_spec.cli.console import Json, Verbose, print_json, stderr, working
from guided_spec.cli.options import ModelOptions, Proposer, TextOptions, with_options
from guided_spec.errors import ConfigError
from guided_spec.types import SamplingParams

if TYPE_CHECKING:  # these load torch
    from guided_spec.engine.llm import LLM
    from guided_spec.engine.outputs import Completion


@dataclass(frozen=True, slots=True)
class _Run:
    """One finished generation under one proposer."""

    proposer: str
    completion: Completion

    def as_dict(self) -> dict[str, Any]:
        return {
            "proposer": self.proposer,
            "text": self.completion.text,
            "token_ids": self.completion.token_ids,
            "finish_reason": self.completion.finish_reason,
            "stats": self.completion.stats.as_dict(),
        }


@dataclass(slots=True)
class _Writer:
    """Writes a text to stdout as it comes, and says on stderr what is being waited for."""

    status: Status
    is_silent: bool = False
    has_written: bool = False

    def write(self, text: str) -> None:
        if not text:
            return
        if self.is_silent:
            self.status.update("writing the text")
            return
        self.status.stop()  # while it turns, stdout is taken for its console's
        typer.echo(text, nl=False)
        self.has_written = True

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """The end of the line; none where an error came before any text."""
        if self.has_written or (kind is None and not self.is_silent):
            typer.echo()


@with_options
def generate(
    asked: TextOptions,
    load: ModelOptions,
    proposer: Proposer = None,
    *,
    files: BatchOptions,
    lora: Annotated[str | None, typer.Option(help="LoRA adapter: folder or hub id.")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also run plain decoding.")] = False,
    as_json: Json = False,
    _verbose: Verbose = False,
) -> None:
    """Generate text that matches a grammar, by speculative decoding.

    The text goes to stdout while it is written, the report to stderr. Without --model a bundled
    model is used, of which one reads pictures.

    With --input it answers every line of a file. With a PROMPT such as "Translate {text}", lines
    are rows, and each name in braces is a column. Without one they are OpenAI's batch lines:
    {"custom_id", "method", "url", "body"}. Answers come in the order in which they are done. A
    line that cannot be answered gets its error as its answer, and the exit code is then 1.
    """
    if files.is_wanted:
        if compare:
            raise ConfigError("--compare", compare, "is for one text; leave it out")
        if asked.image:
            raise ConfigError("--image", str(asked.image[0]), "is for one text; leave it out")
        run_batch(files, asked, load, proposer, lora, as_json=as_json)
        return
    params, prompt = asked.params(), asked.message(asked.text())
    loras = None if lora is None else {lora: lora}
    params = replace(params, lora=lora)
    with working("loading the model") as status:
        llm = load.for_pictures(asked.image).load_for_texts(proposer=proposer, loras=loras)
        if not as_json:
            stderr().print(repr(llm), style="dim")
        writer = _Writer(status, is_silent=as_json)
        runs = [_generate(llm, prompt, params, writer)]
        if compare:
            status.start()  # the text has stopped it
            writer = _Writer(status, is_silent=True)
            runs.append(_generate(llm.with_proposer("none"), prompt, params, writer))
    for run in runs if as_json else ():
        print_json(run.as_dict())
    if not as_json:
        _report(runs)


def _generate(llm: LLM, prompt: Any, params: SamplingParams, writer: _Writer) -> _Run:
    """Run once; an error of the request is raised."""
    with llm:
        writer.status.update(f"reading the prompt ({llm.proposer})")
        llm.generate([prompt], SamplingParams(max_tokens=1))  # the first forward is never typical
        if params.grammar is not None:
            writer.status.update("compiling the grammar")
        with writer:
            for chunk in llm.stream([prompt], params):
                writer.write(chunk.text)
            completion = chunk.completion
            assert completion is not None  # the last chunk of a single request
            if completion.error is not None:
                raise completion.error
    return _Run(llm.proposer, completion)


def _report(runs: list[_Run]) -> None:
    table = Table("", *(run.proposer for run in runs))
    stats = [run.completion.stats for run in runs]
    table.add_row("finish reason", *(run.completion.finish_reason for run in runs))
    table.add_row("output tokens", *(str(s.output_tokens) for s in stats))
    table.add_row("target forwards", *(str(s.steps) for s in stats))
    table.add_row("tokens per forward", *(f"{s.acceptance_length:.2f}" for s in stats))
    table.add_row("drafted / accepted", *(f"{sum(s.drafted)} / {sum(s.accepted)}" for s in stats))
    table.add_row("forced by the grammar", *(str(s.forced_accepted) for s in stats))
    table.add_row("mask time", *(f"{s.mask_seconds * 1e3:.1f} ms" for s in stats))
    table.add_row("seconds", *(f"{s.seconds:.3f}" for s in stats))
    table.add_row("tokens per second", *(f"{s.tokens_per_second:.0f}" for s in stats))
    stderr().print(table)
    if len(runs) > 1:
        stderr().print(_comparison(*runs))


def _comparison(run: _Run, plain: _Run) -> str:
    same = "the same text" if run.completion.text == plain.completion.text else "another text"
    ours, theirs = run.completion.stats, plain.completion.stats
    forwards = theirs.steps - ours.steps
    seconds = theirs.seconds - ours.seconds
    return f"{same}; {forwards} forwards and {seconds:.3f} s saved"
