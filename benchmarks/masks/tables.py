"""What tables of schemas cost and save: ``python -m benchmarks.masks.tables FILES``.

Every schema is compiled, its table is made, and both are walked along the same random texts: rows
are compared and timed, on the matcher and on the table.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.table import Table

from benchmarks.schemas.corpus import SchemaCase, load_cases
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.errors import GrammarError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.completion.spelling import Spelling
from guided_spec.grammar.limits import NoTableError, TableLimits
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend, GrammarMatcher
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.tables.table import compare_texts, proven_table, tabled_part
from guided_spec.grammar.tables.tabled import TabledGrammar
from guided_spec.grammar.tables.token_table import TokenTable
from guided_spec.grammar.text.unique_keys import NotedGrammar
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.tokenizer import load_tokenizer

_TIMED = 100  # tokens of one text, whose rows are timed


def finished(table: TokenTable) -> Future[TokenTable]:
    """A table that is there."""
    made: Future[TokenTable] = Future()
    made.set_result(table)
    return made


class Made(NamedTuple):
    """One schema's table. seconds: of one core, to make it, with the proof of its states.

    outcome: "whole", "part", why there is none, or "refused" where the schema does not compile.
    rows, moves: of each row, and of each accepted token, nanoseconds of a core: (matcher, table).
    """

    id: str
    split: str
    outcome: str
    backend: str = ""
    has_keys: bool = False
    seconds: float = 0.0
    states: int = 0
    classes: int = 0
    distinct_rows: int = 0
    bytes: int = 0
    steps: int = 0
    difference: str | None = None
    rows: Sequence[tuple[int, int]] = ()
    moves: Sequence[tuple[int, int]] = ()


class Maker:
    """Makes the tables of one vocabulary and walks them. steps: random tokens for each."""

    def __init__(self, vocabulary: Vocabulary, limits: TableLimits, steps: int) -> None:
        self._backend: GrammarBackend = BackendChoice("auto", vocabulary)
        self._spelling = Spelling(vocabulary)
        self._row = np.zeros((1, -(-vocabulary.vocab_size // 32)), dtype=np.int32)
        self._limits, self._steps = limits, steps

    def make(self, case: SchemaCase) -> Made:
        """One schema's table, compared and timed."""
        try:
            compiled = self._backend.compile(GrammarSpec.json_schema(case.schema))
        except GrammarError:
            return Made(case.id, case.split, "refused")
        part = tabled_part(compiled)
        began = time.thread_time()
        backend = compiled.backend if isinstance(compiled, NotedGrammar) else ""
        try:
            table = proven_table(part, self._spelling, self._limits)
        except NoTableError as error:
            return Made(case.id, case.split, str(error), backend, part is not compiled)
        seconds = time.thread_time() - began
        compared = compare_texts(table, part, self._steps, seed=0)
        rows, moves = self._times(table, part)
        return Made(
            *(case.id, case.split, "whole" if table.is_whole else "part", backend),
            *(part is not compiled, seconds, table.num_states, table.then.shape[1]),
            *(len(table.rows), table.memory_size_bytes, compared.steps),
            None if compared.difference is None else str(compared.difference),
            *(rows, moves),
        )

    def _times(
        self, table: TokenTable, part: CompiledGrammar
    ) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        assert isinstance(part, NotedGrammar)
        own, tabled = (
            part.new_matcher(),
            TabledGrammar(part, lambda: finished(table), 0).new_matcher(),
        )
        rng = np.random.default_rng(0)
        rows, moves, state = list[tuple[int, int]](), list[tuple[int, int]](), 0
        while state >= 0 and len(rows) < _TIMED:
            rows.append((self._fill(own), self._fill(tabled)))
            legal = np.flatnonzero(table.then[state] != -1)
            token_id = int(np.flatnonzero(table.classes == rng.choice(legal))[0])
            moves.append((_accept(own, token_id), _accept(tabled, token_id)))
            state = table.after(state, token_id)
        return rows, moves

    def _fill(self, matcher: GrammarMatcher) -> int:
        began = time.thread_time_ns()
        matcher.fill_next_token_bitmask(self._row)
        return time.thread_time_ns() - began


def _accept(matcher: GrammarMatcher, token_id: int) -> int:
    began = time.thread_time_ns()
    matcher.accept_token(token_id)
    return time.thread_time_ns() - began


def main(
    paths: Annotated[list[Path], typer.Argument(help="Files or folders of schemas with tests.")],
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder of a model.")] = None,
    limit: Annotated[int | None, typer.Option(help="Schemas of one split at most.")] = None,
    steps: Annotated[int, typer.Option(help="Random tokens along each table.")] = 2_000,
    states: Annotated[int, typer.Option(help="Of one table at most.")] = TableLimits().states,
    output: Annotated[Path | None, typer.Option(help="JSON with a record for each schema.")] = None,
) -> None:
    """Which schemas have tables, what these cost, and what a row costs with and without."""
    warnings.simplefilter("ignore")  # of schemas that are narrowed
    with failures_as_messages():
        cases = load_cases(paths, limit)
        loaded = load_tokenizer(tokenizer or bundled_asset("target"))
        stop = 0 if loaded.eos_token_id is None else loaded.eos_token_id
        vocabulary = Vocabulary.from_tokenizer(loaded, len(loaded), [stop])
        maker = Maker(vocabulary, TableLimits(states=states), steps)
        gc.freeze()
        made = [maker.make(case) for case in cases]
    report = summarize(made)
    for name, rows in report.items():
        table = Table("", *next(iter(rows.values())), title=name)
        for key, values in rows.items():
            table.add_row(
                key, *(f"{v:.3g}" if isinstance(v, float) else str(v) for v in values.values())
            )
        stdout().print(table)
    if output is not None:
        records = [one._asdict() | {"rows": len(one.rows), "moves": len(one.moves)} for one in made]
        output.write_text(json.dumps({"report": report, "schemas": records}, indent=1), "utf-8")


def summarize(made: Sequence[Made]) -> dict[str, dict[str, dict[str, Any]]]:
    """By title, lines with their columns."""
    accepted = [one for one in made if one.outcome != "refused"]
    tabled = [one for one in accepted if one.outcome in ("whole", "part")]
    kinds = Counter(
        f"{one.backend}{', keys kept unique' if one.has_keys else ''}: {_outcome(one)}"
        for one in accepted
    )
    shares = {
        kind: {"schemas": count, "share": f"{count / len(accepted):.1%}"}
        for kind, count in sorted(kinds.items())
    }
    shares["accepted"] = {"schemas": len(accepted), "share": "100%"}
    report = {"schemas": shares}
    if tabled:
        report["tables"] = {
            f"{outcome}: {name}": _spread([pick(one) for one in tabled if one.outcome == outcome])
            for outcome in sorted({one.outcome for one in tabled})
            for name, pick in _COSTS.items()
        }
        report["microseconds"] = {
            f"{name}, {who}": _spread([pair[at] / 1e3 for one in tabled for pair in pairs(one)])
            for name, pairs in _TIMES.items()
            for at, who in enumerate(("matcher", "table"))
        }
        steps, wrong = sum(one.steps for one in tabled), [o for o in tabled if o.difference]
        report["compared"] = {
            "random tokens": {"count": steps},
            "differences": {"count": len(wrong)},
        }
    return report


_COSTS: dict[str, Callable[[Made], float]] = {
    "seconds of a core": lambda one: one.seconds,
    "MB": lambda one: one.bytes / 1e6,
    "states": lambda one: one.states,
    "classes": lambda one: one.classes,
    "distinct rows": lambda one: one.distinct_rows,
}
_TIMES: dict[str, Callable[[Made], Sequence[tuple[int, int]]]] = {
    "row": lambda one: one.rows,
    "token": lambda one: one.moves,
}


def _outcome(one: Made) -> str:
    return one.outcome.partition(" behind the tokens")[0]


def _spread(values: Sequence[float]) -> dict[str, Any]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "p50": statistics.median(ordered),
        "p90": ordered[int(0.9 * last)],
        "p99": ordered[int(0.99 * last)],
        "max": ordered[-1],
    }


if __name__ == "__main__":
    typer.run(main)
