"""``guided-spec generate``: one text, with a report of what speculation saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from guided_spec.cli.console import failures_as_messages, print_json, stderr, stdout
from guided_spec.cli.grammar import grammar_from_options, starting_after
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.engine.profile import profiling
from guided_spec.types import SamplingParams

__all__ = ["generate"]


@dataclass(frozen=True, slots=True)
class _Run:
    """One finished generation under one proposer."""

    proposer: str
    completion: Completion


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    schema: Annotated[Path | None, typer.Option(help="JSON schema file.")] = None,
    regex: Annotated[str | None, typer.Option(help="Regular expression.")] = None,
    choice: Annotated[list[str] | None, typer.Option(help="One option; repeat it.")] = None,
    grammar: Annotated[Path | None, typer.Option(help="EBNF file, or a .lark file.")] = None,
    after: Annotated[str | None, typer.Option(help="Free text up to this marker.")] = None,
    model: Annotated[str | None, typer.Option(help="Hub id or folder.")] = None,
    proposer: Annotated[str | None, typer.Option(help="See `guided-spec proposers`.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Hub id or folder.")] = None,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all tokens.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps all tokens.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="For repeatable sampling.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; repeat it.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")] = None,
    chat: Annotated[bool, typer.Option(help="Send the prompt as a chat message.")] = False,
    compare: Annotated[bool, typer.Option(help="Run plain decoding too.")] = False,
    profile: Annotated[Path | None, typer.Option(help="Write a timeline: Chrome trace.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Generate text that matches a grammar, by speculative decoding.

    The text goes to stdout, the report to stderr. Without --model the bundled model is used.
    """
    with failures_as_messages():
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=seed,
            stop=stop or (),
            grammar=starting_after(grammar_from_options(schema, regex, choice, grammar), after),
        )
        llm = _load(model, proposer, num_draft_tokens, draft_model, device, dtype)
        runs = _run(llm, _prompt(prompt, chat=chat), params, with_plain=compare, trace=profile)
        _report_json(runs) if as_json else _report(runs)


def _load(
    model: str | None,
    proposer: str | None,
    num_draft_tokens: int,
    draft: str | None,
    device: str | None,
    dtype: str | None,
) -> LLM:
    load: dict[str, Any] = {"device": device, "dtype": dtype}
    load = {name: value for name, value in load.items() if value is not None}
    return LLM(model, proposer, num_draft_tokens, draft=draft, **load)


def _prompt(text: str, *, chat: bool) -> str | list[dict[str, str]]:
    return [{"role": "user", "content": text}] if chat else text


def _run(
    llm: LLM, prompt: Any, params: SamplingParams, *, with_plain: bool, trace: Path | None
) -> list[_Run]:
    runs = [_generate(llm, prompt, params, trace)]
    if with_plain:
        runs.append(_generate(llm.with_proposer("none"), prompt, params))
    return runs


def _generate(llm: LLM, prompt: Any, params: SamplingParams, trace: Path | None = None) -> _Run:
    """Run once, with a progress bar on stderr; an error of the request is raised."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = stderr()
    hidden = not console.is_terminal
    with llm, Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        llm.generate([prompt], SamplingParams(max_tokens=1))  # the first forward is never typical
        task = progress.add_task(llm.proposer, total=None)
        with profiling(trace):
            for chunk in llm.stream([prompt], params):
                progress.update(task, advance=len(chunk.text))
    completion = chunk.completion
    assert completion is not None  # the last chunk of a single request
    if completion.error is not None:
        raise completion.error
    return _Run(llm.proposer, completion)


def _report(runs: list[_Run]) -> None:
    stdout().print(runs[0].completion.text)
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


def _report_json(runs: list[_Run]) -> None:
    print_json({run.proposer: _as_dict(run.completion) for run in runs})


def _as_dict(completion: Completion) -> dict[str, Any]:
    stats = completion.stats
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stats": stats.as_dict(),
    }
