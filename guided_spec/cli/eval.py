"""``guided-spec eval``: how long a draft is accepted, by source, with and without grammars."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.box import SIMPLE
from rich.table import Column, Table

from guided_spec.cli.console import Json, Verbose, print_table, report_failures, stderr, working
from guided_spec.cli.options import ModelOptions, ReportOptions, proposer_list, with_options
from guided_spec.cli.words import told
from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.evaluate.plots import acceptance_figures
from guided_spec.types import SamplingParams

if TYPE_CHECKING:  # these load torch
    from guided_spec.engine.llm import LLM
    from guided_spec.evaluate.acceptance import Acceptance

SHOWN = 8  # positions in a table
UNTRAINED = "untrained"  # as a proposer: the head of the draft with fresh weights


@with_options
def evaluate(
    data: Annotated[list[str], typer.Option(help="Same as guided-spec train; can be repeated.")],
    load: ModelOptions,
    reports: ReportOptions,
    proposers: Annotated[
        str | None,
        typer.Option(
            help="Names, comma-separated; NAME=DRAFT for a draft of its own. By default "
            "none, ngram, untrained where --draft is a head, and auto."
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Measure a vLLM server that runs --model: http://host:8000/v1."),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Concurrent requests.")] = 8,
    limit: Annotated[int, typer.Option(min=1, help="Prompts per source.")] = 64,
    as_json: Json = False,
    _verbose: Verbose = False,
) -> None:
    """Measure how many draft tokens are accepted, position by position.

    The target answers the prompts of the data, under their grammars and without. The exit code is 1
    if a request failed.
    """
    asked = _Asked(data, limit, batch_size, reports.params())
    found = _measure(asked, load, proposers) if url is None else _ask(asked, load, proposers, url)
    report = [acceptance.as_dict() for acceptance in found]
    reports.keep(report, acceptance_figures, as_json=as_json)
    if not as_json:
        print_table(_table(found))
    report_failures(one.measurement for one in found)


class _Asked(NamedTuple):
    """Where prompts are from, how many of each, how many decode together, and how."""

    data: list[str]
    limit: int
    batch_size: int
    params: SamplingParams


def _measure(asked: _Asked, load: ModelOptions, proposers: str | None) -> list[Acceptance]:
    from guided_spec.engine.prompt import PromptEncoder
    from guided_spec.evaluate.acceptance import measure_acceptance, read_asked
    from guided_spec.training.data.records import check_sources

    check_sources(asked.data)
    named = None if proposers is None else proposer_list(proposers, others=(UNTRAINED,))
    with working("loading the model"):
        llm = load.load(proposer="none", max_batch_size=load.max_batch_size or asked.batch_size)
    with llm:
        encoder = PromptEncoder(llm.tokenizer, llm.vocabulary.vocab_size, llm.max_model_len)
        prompts = read_asked(asked.data, encoder, limit=asked.limit)
        llm.close()  # its thread would share the cores with those that are measured
        results = []
        for proposer in named or _default_proposers(llm, load.draft):
            name, _, draft = proposer.partition("=")
            stderr().print(f"running {name}")
            with _opened(llm, name, draft or load.draft) as opened:
                label = UNTRAINED if name == UNTRAINED else None
                results += measure_acceptance(opened, prompts, asked.params, name=label)
    return results


def _default_proposers(llm: LLM, draft: str | None) -> list[str]:
    from guided_spec.bundled import BUNDLED

    if draft in (None, BUNDLED):  # the proposer names which of the bundled ones it is
        return ["none", "ngram", "auto"]
    try:
        with _opened(llm, UNTRAINED, draft) as opened:
            opened.close()
    except GuidedSpecError as error:  # better reported now than after the other measurements
        stderr().print(f"the untrained draft is not measured: {told(error)}")
        return ["none", "ngram", "auto"]
    return ["none", "ngram", UNTRAINED, "auto"]


@contextmanager
def _opened(llm: LLM, name: str, draft: str | None) -> Iterator[LLM]:
    """Another LLM on the same weights; the untrained head is written for as long as it is used."""
    from guided_spec.evaluate.acceptance import write_untrained
    from guided_spec.proposers import takes_draft

    if name != UNTRAINED:
        own = draft if takes_draft(name) else None
        yield llm.with_proposer(name, own, drafting="always")
        return
    with TemporaryDirectory() as folder:
        written = write_untrained(draft, llm.model, Path(folder))
        yield llm.with_proposer("auto", str(written), drafting="always")


def _ask(asked: _Asked, load: ModelOptions, proposers: str | None, url: str) -> list[Acceptance]:
    from guided_spec.engine.prompt import PromptEncoder
    from guided_spec.evaluate.acceptance import measure_server, read_asked
    from guided_spec.models.tokenizer import load_tokenizer
    from guided_spec.training.data.endpoint import Endpoint
    from guided_spec.training.data.records import check_sources

    for option, value in (("proposers", proposers), ("draft", load.draft)):
        if value is not None:
            fix = "is the server's own, and cannot be chosen here: leave it out"
            raise ConfigError(option, value, fix)
    if load.model is None:
        raise ConfigError("model", None, "name what the server runs: its tokenizer is needed here")
    check_sources(asked.data)
    tokenizer = load_tokenizer(load.model, trust_remote_code=load.trust_remote_code)
    encoder = PromptEncoder(tokenizer, len(tokenizer), sys.maxsize)
    prompts = read_asked(asked.data, encoder, limit=asked.limit)
    with Endpoint(url, tokenizer, option="url", at_once=asked.batch_size) as endpoint:
        return measure_server(endpoint, prompts, asked.params)


def _table(found: list[Acceptance]) -> Table:
    heads = ("tokens\n/forward", "accepted, % of drafts\nby position", "valid")
    table = Table("proposer", "source", "grammars", *(Column(h) for h in heads), box=SIMPLE)
    for source, grammars, measured in found:
        shares = zip(measured.drafted_at[:SHOWN], measured.accepted_at, strict=False)
        table.add_row(
            measured.name,
            source,
            "yes" if grammars else "no",
            f"{measured.acceptance_length:.2f}",
            " ".join(f"{100 * accepted / drafted:.0f}" for drafted, accepted in shares if drafted),
            measured.percent_valid if grammars else "",
        )
    return table
