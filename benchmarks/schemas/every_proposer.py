"""Is every text valid, whoever drafts it? ``python -m benchmarks.schemas.every_proposer FILES``.

An engine over a model with random weights writes one text under each schema, once for each
proposer, and jsonschema validates it, formats included. Random weights try what no trained model
would; so that most texts end, tokens that close something are made more probable.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.schemas.corpus import SchemaCase, load_cases
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import RequestOutput
from guided_spec.errors import GrammarCompileError
from guided_spec.evaluate.measurement import is_valid
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.types import SamplingParams

WITHOUT_HEADS = (
    *("none", "ngram", "grammar_forced", "chain:grammar_forced+ngram"),
    *("suffix", "chain:grammar_forced+suffix"),
    *("draft_model", "chain:grammar_forced+draft_model"),
)
"""Every proposer without a head of its own, and the chains that are made of them."""
_CLOSING = frozenset(b'"]}')
_BIAS = 6.0
_PROMPT = "A text: "


class ProposerReport(NamedTuple):
    """One proposer over many schemas.

    refused: schemas that do not compile. texts: those with a whole text. cut: with one that did not
    end within the budget. failed: "id: error" of any
    other kind. invalid: "id: text" of texts that jsonschema rejects. drafted, accepted: tokens.
    """

    proposer: str
    schemas: int
    refused: int
    texts: int
    cut: int
    failed: tuple[str, ...]
    invalid: tuple[str, ...]
    drafted: int
    accepted: int


def main(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders of schemas with tests.")],
    proposers: Annotated[str, typer.Option(help="Names, by commas.")] = ",".join(WITHOUT_HEADS),
    limit: Annotated[int | None, typer.Option(help="Schemas of one split at most.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Of one text.")] = 160,
    seed: Annotated[int, typer.Option(help="Of the weights and of the texts.")] = 0,
) -> None:
    """A line for each proposer, and every text that is not valid; exit status 1 if there is one."""
    with failures_as_messages():
        cases = load_cases(paths, limit)
        model, draft = (_random(bundled_asset(name), seed) for name in ("target", "draft"))
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=seed, complete=False)
        options: dict[str, Any] = {"tokenizer": bundled_asset("target"), "draft": draft}
        reports = []
        for name in proposers.split(","):
            with LLM(model, name, **options) as llm:
                reports.append(write_with(llm, name, cases, params))
    stdout().print(_table(reports))
    for report in reports:
        for line in (*report.failed, *report.invalid):
            stdout().print(f"{report.proposer}: {line}", markup=False)
    raise typer.Exit(any(report.failed or report.invalid for report in reports))


def write_with(
    llm: LLM, name: str, cases: Sequence[SchemaCase], params: SamplingParams
) -> ProposerReport:
    """One text under each schema; ``params`` without a grammar and without biases."""
    specs = [GrammarSpec.json_schema(json.dumps(case.schema)) for case in cases]
    bias = _favour_closing(llm.vocabulary)
    asked = [replace(params, grammar=spec, logit_bias=bias) for spec in specs]
    outputs = llm.generate([_PROMPT] * len(specs), asked, on_error="return")
    kinds = Counter(map(_kind, outputs))
    written = list(zip(cases, specs, outputs, strict=True))
    return ProposerReport(
        name,
        len(cases),
        kinds["refused"],
        kinds["text"],
        kinds["cut"],
        tuple(f"{case.id}: {out.error!r}" for case, _, out in written if _kind(out) == "failed"),
        tuple(
            f"{case.id}: {out.text!r}"
            for case, spec, out in written
            if _kind(out) == "text" and not is_valid(out.text, spec)
        ),
        sum(sum(out.stats.drafted) for out in outputs),
        sum(sum(out.stats.accepted) for out in outputs),
    )


def _favour_closing(vocabulary: Vocabulary) -> dict[int, float]:
    """Biases for tokens of quotes and closing brackets, and for those that end the text."""
    closing = [
        token
        for token, data in enumerate(vocabulary.token_bytes)
        if data and _CLOSING.issuperset(data)
    ]
    return dict.fromkeys((*closing, *vocabulary.stop_token_ids), _BIAS)


def _kind(output: RequestOutput) -> str:
    match output.error:
        case None:
            return "text" if output.is_complete else "cut"
        case GrammarCompileError():
            return "refused"
    return "failed"


def _random(folder: str, seed: int) -> Any:
    """The architecture of a checkpoint with random weights."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()


def _table(reports: Sequence[ProposerReport]) -> Table:
    table = Table(*ProposerReport._fields)
    for report in reports:
        table.add_row(*(str(len(v) if isinstance(v, tuple) else v) for v in report))
    return table


if __name__ == "__main__":
    typer.run(main)
