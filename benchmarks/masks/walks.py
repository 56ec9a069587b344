"""Which way of filling mask rows costs least: ``python -m benchmarks.masks.walks``.

First one request: walk a persistent fork along the draft and roll it back (what ``Lookahead``
does), fork anew and walk the copy, or hand the draft to xgrammar's own tree walk. Then many
requests: ``RowFiller`` on one thread and on several, and xgrammar's own threads.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from benchmarks.masks.row_filling import Text, fill_table
from guided_spec.bundled import bundled_asset
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.evaluate.measurement import load_workload
from guided_spec.grammar.backends.xgrammar import XGrammarBackend
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.ops.mask_words import num_mask_words

Way = Callable[[Any, Sequence[int], Tensor], None]


def walk_and_rollback(matcher: Any, draft: Sequence[int], rows: Tensor) -> None:
    """Fill, accept, fill, ..., then take the draft back."""
    for depth, token in enumerate(draft):
        matcher.fill_next_token_bitmask(rows, depth)
        matcher.accept_token(token)
    matcher.fill_next_token_bitmask(rows, len(draft))
    matcher.rollback(len(draft))


def fork_and_walk(matcher: Any, draft: Sequence[int], rows: Tensor) -> None:
    """The same walk on a fork made for it."""
    fork = matcher.fork()
    for depth, token in enumerate(draft):
        fork.fill_next_token_bitmask(rows, depth)
        fork.accept_token(token)
    fork.fill_next_token_bitmask(rows, len(draft))


def tree_walk(matcher: Any, draft: Sequence[int], rows: Tensor) -> None:
    """xgrammar's ``traverse_draft_tree`` over a chain; node 0 stands for the committed token."""
    nodes = len(draft) + 1
    next_token = torch.arange(1, nodes + 1)
    next_token[-1] = -1
    siblings = torch.full((nodes,), -1)
    tokens = torch.tensor([0, *draft])
    matcher.traverse_draft_tree(next_token, siblings, tokens, rows[:nodes])


WAYS: dict[str, Way] = {
    "walk, roll back": walk_and_rollback,
    "fork, walk": fork_and_walk,
    "traverse_draft_tree": tree_walk,
}


def main(
    workload: Annotated[Path | None, typer.Argument(help="JSON Lines with answers.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder of a model.")] = None,
    num_draft_tokens: Annotated[int, typer.Option("--num-draft-tokens", "-k")] = 5,
    limit: Annotated[int, typer.Option(help="Documents.")] = 100,
) -> None:
    """Microseconds for all rows of one draft, at every K-th token of the right answers; then
    milliseconds for the rows of many requests, by the number of threads.
    """
    with failures_as_messages():
        loaded = load_tokenizer(tokenizer or bundled_asset("target"))
        vocabulary = Vocabulary.from_tokenizer(loaded, len(loaded), [loaded.eos_token_id])
        backend = XGrammarBackend(vocabulary)
        words = num_mask_words(vocabulary.vocab_size)
        times: dict[str, list[float]] = {name: [] for name in WAYS}
        texts: list[Text] = []
        for item in load_workload(workload or Path(bundled_asset("heldout.jsonl")), limit):
            if item.grammar is None or item.answer is None:
                continue
            compiled = backend.compile(item.grammar)
            tokens = loaded(item.answer, add_special_tokens=False)["input_ids"]
            texts.append(Text(compiled, tokens))
            rows = torch.full((num_draft_tokens + 1, words), -1, dtype=torch.int32)
            _time_document(compiled.new_matcher(), tokens, rows, times)
    stdout().print(_way_table(times))
    stdout().print(fill_table(texts, vocabulary.vocab_size, num_draft_tokens))


def _way_table(times: dict[str, list[float]]) -> Table:
    table = Table("way", "median µs", "p99 µs", "drafts")
    for name, seconds in times.items():
        cuts = statistics.quantiles(seconds, n=100)
        micros = (f"{value * 1e6:.1f}" for value in (statistics.median(seconds), cuts[98]))
        table.add_row(name, *micros, str(len(seconds)))
    return table


def _time_document(
    matcher: Any, tokens: Sequence[int], rows: Tensor, times: dict[str, list[float]]
) -> None:
    step = len(rows) - 1
    for start in range(0, len(tokens), step):
        draft = tokens[start : start + step]
        for name, way in WAYS.items():
            began = time.perf_counter()
            way(matcher, draft, rows)
            times[name].append(time.perf_counter() - began)
        for token in draft:
            if not matcher.accept_token(token):
                return  # the answer is written in another style than the grammar's


if __name__ == "__main__":
    typer.run(main)
