"""How many real JSON schemas are enforced in full: ``python -m benchmarks.schemas.enforced FILES``.

Every schema is compiled, its instances are judged, and a model with random weights writes texts
under it, which jsonschema then validates, formats included. An instance is judged as text, with
``", "`` and ``": "`` between values and its keys in its own order, token by token.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.schemas.corpus import load_cases
from benchmarks.schemas.judge import Judge, SchemaVerdict
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.grammar.pipeline import GrammarPipeline
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.tokenizer import load_tokenizer

_SECONDS = 30.0  # for one compile
_COLUMNS = (
    *("split", "schemas", "accepted", "unsatisfiable", "unsupported", "failed", "all right"),
    *(
        "in order",
        "false accepts",
        "false rejects",
        "texts",
        "invalid",
        "compile p50 s",
        "p99",
        "max",
    ),
)


def main(  # noqa: PLR0913 - the options of a command
    paths: Annotated[list[Path], typer.Argument(help="Files or folders of schemas with tests.")],
    backend: Annotated[
        str, typer.Option(help="xgrammar, llguidance, auto or a registered one.")
    ] = "auto",
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder of a model.")] = None,
    limit: Annotated[int | None, typer.Option(help="Schemas of one split at most.")] = None,
    walks: Annotated[int, typer.Option(help="Random texts of each schema.")] = 5,
    key_order: Annotated[str, typer.Option(help="schema, or any: see GrammarSpec.")] = "schema",
    additional_properties: Annotated[
        str, typer.Option(help="closed, or schema: see GrammarSpec.")
    ] = "closed",
    output: Annotated[Path | None, typer.Option(help="JSON with every exception.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write a verdict for each schema.")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Such verdicts; exits with 1 where one is another now.")
    ] = None,
) -> None:
    """A table with a line for every split; ``--output`` names each schema that is not right."""
    with failures_as_messages():
        cases = load_cases(paths, limit)
        loaded = load_tokenizer(tokenizer or bundled_asset("target"))
        stop = 0 if loaded.eos_token_id is None else loaded.eos_token_id
        vocabulary = Vocabulary.from_tokenizer(loaded, len(loaded), [stop])
        limits = GrammarLimits(compile_seconds=_SECONDS)
        isolated = GrammarPipeline.of(backend, vocabulary, limits)
        try:
            settings = {"key_order": key_order, "additional_properties": additional_properties}
            judge = Judge(isolated, loaded, walks, settings)
            verdicts = [judge.judge(case) for case in cases]
        finally:
            isolated.close()
    report = summarize(verdicts)
    stdout().print(_table(report["splits"]))
    if output is not None:
        output.write_text(json.dumps(report, indent=1, ensure_ascii=False), encoding="utf-8")
    _keep(words_of(verdicts), record, compare)


def _keep(words: dict[str, str], record: Path | None, compare: Path | None) -> None:
    if record is not None:
        record.write_text(json.dumps(words, indent=0) + "\n", encoding="utf-8")
    if compare is not None:
        changed = differences(json.loads(compare.read_text(encoding="utf-8")), words)
        for line in changed:
            stdout().print(line, highlight=False)
        if changed:
            raise typer.Exit(1)


def words_of(verdicts: Sequence[SchemaVerdict]) -> dict[str, str]:
    """Of each schema by its split and id: what became of it, in a word or two."""
    return {f"{verdict.split}/{verdict.id}": verdict.word for verdict in verdicts}


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """A line for each schema that has another verdict than before, or is in one of them alone."""
    names = dict.fromkeys([*before, *now])
    return [
        f"{name}: {before.get(name, 'not there')}, now {now.get(name, 'not there')}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def summarize(verdicts: Sequence[SchemaVerdict]) -> dict[str, Any]:
    """``splits``: a record for each and one for all; ``exceptions``: what is not right, and why."""
    splits: dict[str, list[SchemaVerdict]] = {}
    for verdict in verdicts:
        splits.setdefault(verdict.split, []).append(verdict)
    rows = [_row(name, group) for name, group in splits.items()]
    if len(rows) > 1:
        rows.append(_row("all", verdicts))
    exceptions = [verdict._asdict() for verdict in verdicts if not verdict.is_right]
    return {"splits": rows, "exceptions": exceptions}


def _row(name: str, verdicts: Sequence[SchemaVerdict]) -> dict[str, Any]:
    outcomes = [verdict.outcome for verdict in verdicts]
    times = sorted(verdict.seconds for verdict in verdicts)
    return {
        "split": name,
        "schemas": len(verdicts),
        **{
            kind: outcomes.count(kind)
            for kind in ("accepted", "unsatisfiable", "unsupported", "failed")
        },
        "all right": sum(verdict.is_right for verdict in verdicts),
        "in order": sum(verdict.is_right_in_order for verdict in verdicts),
        "false accepts": sum(len(verdict.false_accepts) for verdict in verdicts),
        "false rejects": sum(len(verdict.false_rejects) for verdict in verdicts),
        "texts": sum(verdict.texts for verdict in verdicts),
        "invalid": sum(len(verdict.invalid_texts) for verdict in verdicts),
        "compile p50 s": statistics.median(times),
        "p99": times[min(len(times) - 1, int(0.99 * len(times)))],
        "max": times[-1],
    }


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(*_COLUMNS)
    for row in rows:
        values = (row[name] for name in _COLUMNS)
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in values))
    return table


if __name__ == "__main__":
    typer.run(main)
