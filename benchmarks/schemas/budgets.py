"""Do budgets stand in the way of valid documents: ``python -m benchmarks.schemas.budgets FILES``.

Each valid instance of each schema is spelled in a tokenizer's own tokens and offered, token by
token, to its grammar's matcher and to the same one behind a budget. Both fill their rows; with
tokens to spare they have to say the same. Rows and tokens are timed by the thread's CPU clock, the
garbage collector kept to what is new.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import typer
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.schemas.corpus import SchemaCase, load_cases, padded_vocabulary
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stderr, stdout
from guided_spec.engine.process import frozen_heap
from guided_spec.errors import BudgetTooSmallError, GrammarError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.completion.completion import EndingsCache
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend, GrammarMatcher
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.text.state import TextState
from guided_spec.models.tokenizer import load_tokenizer

_LONGEST = 2000  # tokens of a document
Outcome = Literal["whole", "lost", "masked", "disagrees", "other row", "refused"]
"""What became of a document behind a budget. whole: taken to its end. lost: so too, but the budget
was given up. masked: a row lacked the next token. disagrees: a row had it, and the matcher refused.
other row: its rows differ from the grammar's own. refused: the budget was too small."""


class Document(NamedTuple):
    """A valid instance in tokens, the stop token last, and its grammar."""

    name: str
    compiled: CompiledGrammar
    token_ids: list[int]


@dataclass(slots=True)
class Times:
    """Seconds of filling a row and of accepting a token."""

    rows: list[float] = field(default_factory=list)
    accepts: list[float] = field(default_factory=list)


def main(  # noqa: PLR0913 - the options of a command
    paths: Annotated[list[Path], typer.Argument(help="Files or folders of schemas with tests.")],
    tokenizer: Annotated[
        list[str] | None, typer.Option(help="Hub ids or folders; else the bundled one.")
    ] = None,
    backend: Annotated[str, typer.Option(help="xgrammar, llguidance, auto, ...")] = "auto",
    limit: Annotated[int | None, typer.Option(help="Schemas of one split at most.")] = None,
    spare: Annotated[
        str, typer.Option(help="Tokens beyond each document's own, as numbers with commas.")
    ] = "500,20,3",
    complete: Annotated[bool, typer.Option(help="As if complete=True.")] = False,  # noqa: FBT002
) -> None:
    """Offer the valid instances of schemas to their grammars, with budgets and without."""
    with failures_as_messages():
        cases = load_cases(paths, limit)
        outcomes = Table(
            "vocabulary", "to spare", "documents", *get_args(Outcome), title="documents"
        )
        times = Table("vocabulary", "to spare", "what", "p50 ms", "p99 ms", "max ms")
        for name in tokenizer or [str(bundled_asset("target"))]:
            loaded = load_tokenizer(name)
            vocabulary = padded_vocabulary(loaded)
            compiler = BackendChoice(backend, vocabulary)
            documents = list(documents_of(cases, compiler, loaded))
            endings = EndingsCache(vocabulary)
            for document in documents:
                endings.of(document.compiled)  # where grammars are compiled
            for tokens in map(int, spare.split(",")):
                spent = Times()
                with frozen_heap():
                    found = _count(documents, endings, tokens, spent, is_required=complete)
                label = Path(name).name
                counts = (str(found[outcome]) for outcome in get_args(Outcome))
                outcomes.add_row(label, str(tokens), str(len(documents)), *counts)
                _add_times(times, (label, str(tokens)), spent)
        stdout().print(outcomes, times)


def documents_of(
    cases: Sequence[SchemaCase], backend: GrammarBackend, tokenizer: Any
) -> Iterator[Document]:
    """The valid instances that the grammars of ``backend`` take, in the tokenizer's own tokens."""
    for case in cases:
        try:
            compiled = backend.compile(GrammarSpec.json_schema(case.schema))
        except GrammarError:
            continue
        for number, instance in enumerate(case.instances):
            if not instance.valid:
                continue
            text = json.dumps(instance.data, ensure_ascii=False)
            token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            stop = backend.vocabulary.stop_token_ids[0]
            document = Document(f"{case.split}/{case.id}/{number}", compiled, [*token_ids, stop])
            if len(token_ids) < _LONGEST and _takes(compiled.new_matcher(), document.token_ids):
                yield document


def follow(
    document: Document,
    endings: EndingsCache,
    max_tokens: int,
    times: Times,
    *,
    is_required: bool = False,
) -> Outcome:
    """Offer a document to its grammar behind a budget; ``other row`` only while none is tight."""
    compiled = document.compiled
    try:
        bound = endings.bound(compiled, max_tokens, is_required=is_required)
    except BudgetTooSmallError:
        return "refused"
    is_loose = max_tokens >= len(document.token_ids) + 256
    matcher, plain = bound.new_matcher(), compiled.new_matcher()
    words = -(-endings.vocabulary.vocab_size // 32)
    row, own = (np.zeros((1, words), dtype=np.int32) for _ in range(2))
    for token in document.token_ids:
        started = time.thread_time()
        matcher.fill_next_token_bitmask(row)
        filled = time.thread_time()
        is_taken = matcher.accept_token(token)
        times.rows.append(filled - started)
        times.accepts.append(time.thread_time() - filled)
        plain.fill_next_token_bitmask(own)
        plain.accept_token(token)
        if _has(row[0], token) != is_taken:
            return "disagrees"
        if not is_taken:
            return "masked"
        if is_loose and not np.array_equal(row, own):
            return "other row"
    is_kept = isinstance(matcher, TextState) and not matcher.has_lost_end
    return "whole" if is_kept else "lost"


def _count(
    documents: Sequence[Document],
    endings: EndingsCache,
    spare: int,
    times: Times,
    *,
    is_required: bool,
) -> Counter[Outcome]:
    found = Counter[Outcome]()
    for document in documents:
        budget = len(document.token_ids) + spare
        outcome = follow(document, endings, budget, times, is_required=is_required)
        found[outcome] += 1
        if outcome != "whole":
            stderr().print(f"{document.name}: {outcome}")
    return found


def _takes(matcher: GrammarMatcher, token_ids: Sequence[int]) -> bool:
    return all(map(matcher.accept_token, token_ids)) and matcher.is_terminated()


def _has(row: NDArray[np.int32], token: int) -> bool:
    return bool(row[token >> 5] >> (token & 31) & 1)


def _add_times(table: Table, cells: tuple[str, str], times: Times) -> None:
    for what, values in (("row", times.rows), ("token", times.accepts)):
        found = np.array(values or [0.0]) * 1e3
        numbers = (np.median(found), np.quantile(found, 0.99), found.max())
        table.add_row(*cells, what, *(f"{number:.3f}" for number in numbers))


if __name__ == "__main__":
    typer.run(main)
