"""``guided-spec trace``: one text, and a page that shows every step of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from guided_spec.cli.console import Json, Verbose, print_json, stderr, stdout, working
from guided_spec.cli.options import (
    ModelOptions,
    Proposer,
    TextOptions,
    require_writable,
    with_options,
    write_text,
)
from guided_spec.errors import ConfigError
from guided_spec.types import SamplingParams

if TYPE_CHECKING:  # these load torch
    from guided_spec.engine.llm import LLM
    from guided_spec.trace.record import Trace

DEFAULT_OUTPUT = Path("trace.html")
Output = Annotated[
    list[Path] | None,
    typer.Option("--output", "-o", help="A .html page or .json; can be repeated. [trace.html]"),
]
Compare = Annotated[
    str | None, typer.Option(help="A second proposer to compare with; or NAME=DRAFT.")
]
WARM_UP = 16  # tokens that are written, and forgotten, before the clock counts


@with_options
def trace(
    asked: TextOptions,
    load: ModelOptions,
    proposer: Proposer = None,
    compare: Compare = None,
    output: Output = None,
    as_json: Json = False,
    _verbose: Verbose = False,
) -> None:
    """Show what speculation did with one text: every draft token, and why it stayed or not.

    Writes one page that needs no network, and says on stdout where it is. Without --model the
    bundled model is used.
    """
    outputs = output or ([] if as_json else [DEFAULT_OUTPUT])
    _check(outputs)
    params, text = asked.params(), asked.text()
    prompt = asked.message(text)
    with working("loading the model"):
        llm = load.for_pictures(asked.image).load(proposer=proposer)
        traces = [_trace(llm, prompt, params)]
        if compare is not None:
            name, _, draft = compare.partition("=")
            traces.append(_trace(llm.with_proposer(name, draft or None), prompt, params))
    _write(outputs, traces, text, asked.image or ())
    for one in traces if as_json else ():
        print_json(asdict(one))
    if not as_json:
        _report(traces, outputs)


def _check(outputs: Sequence[Path]) -> None:
    """Before anything is loaded. Raises ConfigError for a file that could not be written."""
    for path in outputs:
        if path.suffix not in (".html", ".json"):
            raise ConfigError("--output", str(path), "must end in .html or .json")
        require_writable("--output", path)


def _trace(llm: LLM, prompt: Any, params: SamplingParams) -> Trace:
    """Run once; an error of the request is raised."""
    short = replace(params, max_tokens=min(params.max_tokens, WARM_UP), complete=False)
    with llm:
        llm.generate([prompt], short)
        (output,) = llm.generate([prompt], params, trace=True)
    if output.error is not None:
        raise output.error
    assert output.trace is not None  # it was asked for
    return output.trace


def _write(
    outputs: Sequence[Path], traces: Sequence[Trace], prompt: str, images: Sequence[Path]
) -> None:
    from guided_spec.engine.chats.pictures import OpenPicture
    from guided_spec.trace.page import render_page
    from guided_spec.trace.record import to_json

    for path in outputs:
        if path.suffix == ".html":
            pictures = [OpenPicture.of("--image", one.read_bytes()).image() for one in images]
            text = render_page(traces, prompt=prompt, pictures=pictures)
        else:
            text = to_json(traces, indent=2) + "\n"
        write_text("--output", path, text)


def _report(traces: Sequence[Trace], outputs: Sequence[Path]) -> None:
    for one in traces:
        tokens, steps = len(one.token_ids), len(one.steps)
        drafted, accepted = sum(one.drafted_at()), sum(one.accepted_at())
        sums = f"{tokens} tokens in {steps} forwards; {accepted} of {drafted} draft tokens accepted"
        stderr().print(f"{one.proposer}: {sums}")
    for path in outputs:
        stdout().print(str(path))
