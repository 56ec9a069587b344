"""What the mask rows of many requests cost, by the number of threads that fill them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import xgrammar
from rich.table import Table
from torch import Tensor

from benchmarks.kernels.device_time import host_seconds
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.filler import RequestDraft, RowFiller, cores
from guided_spec.masks.rows import MaskRows

REQUESTS = (1, 4, 8, 16, 32, 64, 128, 256)
THREADS = (1, 2, 4, 6, 8)


class Text(NamedTuple):
    """One of xgrammar's grammars, and the tokens of a text that it allows."""

    compiled: CompiledGrammar
    token_ids: list[int]


class RowFilling:
    """Requests in the middle of their texts, each with a draft that nobody has filled rows for.

    texts: grammars with the tokens of one right text each; used in turn.
    depths: rows a request; its draft has one token less.
    """

    def __init__(self, texts: Sequence[Text], requests: int, depths: int, rows: MaskRows) -> None:
        self._depths = depths
        self._rows = rows
        self._filler = RowFiller(rows)
        self._constraints: list[Constraint] = []
        self._drafts: list[list[int]] = []
        self._request_drafts: list[RequestDraft] = []
        for at in range(requests):
            text = texts[at % len(texts)]
            start = at * 7 % max(1, len(text.token_ids) - depths + 1)
            constraint = Constraint(text.compiled)
            constraint.commit(text.token_ids[:start])
            self._constraints.append(constraint)
            self._drafts.append(text.token_ids[start : start + depths - 1])

    def prepare(self) -> None:
        """Start a step and append the drafts: all rows are missing."""
        self._rows.clear(len(self._constraints))
        self._request_drafts.clear()
        for at, (constraint, draft) in enumerate(zip(self._constraints, self._drafts, strict=True)):
            own = RequestDraft(at, constraint.fork(), self._depths)
            for token in draft:
                own.append(token)
            self._request_drafts.append(own)

    def fill(self, threads: int | None = None) -> None:
        """Fill the rows that ``prepare`` left missing; ``threads`` as for ``RowFiller.fill``."""
        self._filler.fill(self._request_drafts, threads=threads)

    def upload(self) -> Tensor:
        """The rows where the device can read them, perhaps not at once: [requests, depths, W]."""
        return self._rows.first(len(self._constraints), self._depths)

    def seconds(self, threads: int | None) -> float:
        """The time of the fills of one step."""
        return host_seconds(lambda: self.fill(threads), self.prepare)

    def native_seconds(self, threads: int) -> float:
        """The time that xgrammar's own threads take for one row of each request."""
        batch = xgrammar.BatchGrammarMatcher(threads)
        matchers: list[Any] = [
            constraint.fork().text.own_matcher for constraint in self._constraints
        ]
        bitmask = np.zeros((len(matchers), len(self._rows.words(0, 0))), dtype=np.int32)
        return host_seconds(lambda: batch.batch_fill_next_token_bitmask(matchers, bitmask))


def fill_table(texts: Sequence[Text], vocab_size: int, num_draft: int) -> Table:
    """Median milliseconds by requests and threads."""
    counts = [n for n in THREADS if n <= cores()]
    names = [f"{n} threads ms" if n > 1 else "serial ms" for n in counts]
    native = f"xgrammar's own {counts[-1]} ms"
    table = Table("rows a request", "requests", "rows", *names, "chosen ms", native)
    for depths in (1, num_draft + 1):
        for requests in REQUESTS:
            rows = MaskRows(requests, depths, vocab_size, torch.device("cpu"))
            case = RowFilling(texts, requests, depths, rows)
            ways = [n for n in counts if n <= requests]
            columns = [f"{case.seconds(n) * 1e3:.3f}" for n in ways]
            columns += [""] * (len(counts) - len(ways))
            columns.append(f"{case.seconds(None) * 1e3:.3f}")
            columns.append(f"{case.native_seconds(counts[-1]) * 1e3:.3f}" if depths == 1 else "")
            table.add_row(str(depths), str(requests), str(requests * depths), *columns)
    return table
