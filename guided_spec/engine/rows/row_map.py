"""Rows without end: some in flight at a time, their outputs in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from typing import Any

from guided_spec.engine.outputs import (
    Cancellable,
    Chunk,
    Completion,
    Failures,
    Manner,
    OnError,
    RequestOutput,
    RequestStats,
    Submits,
    cancel_all,
)
from guided_spec.engine.rows.progress import ProgressBar
from guided_spec.engine.rows.template import PromptTemplate, require_columns
from guided_spec.errors import ConfigError, PromptError
from guided_spec.types import SamplingParams

SLOTS_AHEAD = 4  # rows in flight for each slot: enough that none waits while the caller works


class RowMap:
    """What one ``LLM.map`` asks for.

    template: of rows with columns; None where rows are prompts. window: rows in flight at most.

    Raises ConfigError.
    """

    def __init__(
        self,
        rows: Iterable[Any],
        template: str | None,
        params: SamplingParams,
        window: int,
        on_error: OnError,
    ) -> None:
        if isinstance(rows, str | bytes | Mapping) or not isinstance(rows, Iterable):
            fix = "must be an iterable of prompts, or of rows for a prompt with columns"
            raise ConfigError("rows", rows, fix)
        if not isinstance(params, SamplingParams):
            raise ConfigError("params", params, "must be one SamplingParams, for all rows")
        self._rows = rows
        self._template = None if template is None else PromptTemplate(template)
        if self._template is not None and isinstance(rows, Sized):
            columns = self._template.columns
            require_columns("prompt", template, columns, rows, has="the rows have")
        self._params = params
        self._window = window
        self._failures = Failures.before_the_first_token(on_error)

    def run(self, submit: Submits, bar: ProgressBar) -> Iterator[RequestOutput]:
        """The outputs in the order of the rows. Closing it cancels what is in flight."""
        flying: deque[_Row] = deque()
        with bar:
            try:
                for index, row in enumerate(self._rows):
                    if len(flying) == self._window:
                        yield self._landed(flying, bar)
                    flying.append(self._start(index, row, submit))
                while flying:
                    yield self._landed(flying, bar)
            finally:
                for each in flying:
                    cancel_all(each.requests)

    def _start(self, index: int, row: Any, submit: Submits) -> _Row:
        started = _Row(index, self._params.n)
        try:
            prompt = row if self._template is None else self._template.fill(row)
        except PromptError as error:
            for sample in range(self._params.n):
                failed = Completion("", [], "error", error, RequestStats())
                started.report(Chunk(0, sample, "", failed))
        else:
            manner = Manner(is_streamed=False, is_traced=False)
            started.requests = submit([prompt], self._params, started.report, manner)
        return started

    def _landed(self, flying: deque[_Row], bar: ProgressBar) -> RequestOutput:
        """The output of the first row, which is waited for."""
        output = flying[0].output.result()
        flying.popleft()
        for completion in output.completions:
            error = completion.error
            if error is not None and self._failures.raises(completion):
                at = f"row {output.prompt_index}, counted from 0"
                # Set, not added: a grammar's error is remembered, and raised by other calls too.
                error.__notes__ = [f'{at}; on_error="return" serves the others']
                raise error
            bar.count(completion)
        bar.advance()
        return output


class _Row:
    """A row in flight. output: done with its last sample."""

    def __init__(self, index: int, num_samples: int) -> None:
        self.requests: Sequence[Cancellable | None] = ()
        self.output: Future[RequestOutput] = Future()
        self._index = index
        self._num_samples = num_samples
        self._ended: dict[int, Completion] = {}

    def report(self, chunk: Chunk) -> None:
        """Take a chunk; called from the engine's thread."""
        if chunk.completion is None:
            return
        self._ended[chunk.sample_index] = chunk.completion
        if len(self._ended) == self._num_samples:
            completions = tuple(self._ended[at] for at in sorted(self._ended))
            self.output.set_result(RequestOutput(self._index, completions))
