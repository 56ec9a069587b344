"""A batch, from its files to its summary: checked, gone on with, answered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from guided_spec.batch.inputs import INPUT, Line, Reader, reader_of
from guided_spec.batch.results import OUTPUT, Question, Register, ResultFile
from guided_spec.engine.rows.template import require_columns
from guided_spec.errors import ConfigError

if TYPE_CHECKING:  # these load torch
    from guided_spec.engine.outputs import Completion
    from guided_spec.engine.rows.progress import ProgressBar

_AHEAD = 4  # lines in flight for each slot


class Runner(Protocol):
    """What answers the lines of a batch, many at a time."""

    async def run(self, question: Question) -> Mapping[str, Any]:
        """The fields of an answer, its error among them."""

    def close(self) -> None:
        """No more lines are answered."""


class Form(Protocol):
    """What the lines of a batch are."""

    @property
    def columns(self) -> Sequence[str]:
        """Those that a table must have."""

    def read(self, index: int, line: Line) -> Question:
        """What a line asks. index: of the line from 1, blank ones not counted.

        A line with a ``fault`` is refused for it, whatever else it holds.
        """

    def runner(self, llm: Any, watch: Callable[[Completion], None]) -> Runner:
        """What answers them. watch: called with each text that has ended."""


class Contents(NamedTuple):
    """What an input holds: its lines, and those of them that are at fault themselves."""

    total: int
    at_fault: int


@dataclass
class Summary:
    """What a batch came to.

    total: lines of the input. before: those that earlier runs answered. answered, failed: those of
    this run. The others are those of its texts.
    """

    total: int
    before: int
    answered: int = 0
    failed: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    acceptance: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Of this run."""
        return self.output_tokens / self.seconds if self.seconds else 0.0


class Batch:
    """An input with its answers. A context manager, which closes its files.

    Everything that can be known without a model is checked: both files and every line. Of lines
    with one id the first is answered, and the others are at fault. ``summary`` says from the
    beginning what earlier runs have answered.

    Raises ConfigError.
    """

    def __init__(self, source: Path, output: Path, form: Form) -> None:
        self._form = form
        self._source = source
        self._read: Reader = reader_of(source)
        _require_two_files(source, output)
        with ExitStack() as opened:
            self._register = opened.enter_context(closing(Register()))
            self.contents = self._check()
            self._file = opened.enter_context(closing(ResultFile(output)))
            before = self._file.resume(self._register)
            self._opened = opened.pop_all()
        self.summary = Summary(self.contents.total, before)

    @property
    def needs_model(self) -> bool:
        """Whether a line is left that a model has to answer."""
        return self.contents.total - self.contents.at_fault > self.summary.before

    def refuse_faults(self) -> None:
        """Write the errors of lines that are at fault themselves; no others may be left."""
        for question in self._left():
            self._write(question, question.refusal or {})

    def run(self, llm: Any, bar: ProgressBar) -> None:
        """Answer what is left, in the order in which texts end. Ctrl-C keeps what is answered.

        llm: an ``LLM``. Raises ConfigError for files that cannot be read or written any more.
        """
        try:
            asyncio.run(self._run_all(llm, bar))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        finally:
            self.summary.output_tokens = bar.speed.num_tokens
            self.summary.seconds = bar.speed.seconds
            self.summary.acceptance = bar.speed.acceptance

    async def _run_all(self, llm: Any, bar: ProgressBar) -> None:
        questions = self._left()
        with closing(self._form.runner(llm, bar.count)) as runner:

            async def work() -> None:
                for question in questions:  # which all workers share
                    fields = question.refusal
                    if fields is None:
                        fields = await runner.run(question)
                    self._write(question, fields)
                    bar.advance(failed=self.summary.failed)

            async with asyncio.TaskGroup() as group:
                for _ in range(_AHEAD * llm.load.num_slots):
                    group.create_task(work())

    def _left(self) -> Iterator[Question]:
        """Questions without an answer, read as they are asked for."""
        for index, line in enumerate(self._read(self._source, self._form.columns), 1):
            question = self._form.read(index, line)
            first = self._first_of(question, line)
            if first != line.number:
                fix = f"stands in lines {first} and {line.number}: each line needs its own"
                fault = str(ConfigError("custom_id", question.custom_id, fix))
                twice = self._form.read(index, line._replace(fault=fault))
                yield twice._replace(custom_id=question.custom_id)
            elif not self._register.is_answered(question.custom_id):
                yield question

    def _write(self, question: Question, fields: Mapping[str, Any]) -> None:
        self._file.write(question, fields)
        response = fields.get("response") or {"status_code": 200}
        is_answer = fields["error"] is None and response["status_code"] == 200
        self.summary.answered += is_answer
        self.summary.failed += not is_answer

    def _first_of(self, question: Question, line: Line) -> int:
        """The number of the first line with the question's id, which may be this one."""
        if question.custom_id is None:
            return line.number
        first = self._register.add(question.custom_id, question.digest, line.number)
        return line.number if first is None else first

    def _check(self) -> Contents:
        """Read everything once."""
        total = at_fault = 0
        for total, line in enumerate(self._read(self._source, self._form.columns), 1):
            question = self._form.read(total, line)
            is_first = self._first_of(question, line) == line.number
            at_fault += question.refusal is not None or not is_first
        if not total:
            raise ConfigError(INPUT, str(self._source), "holds no lines")
        columns = self._form.columns
        values = (line.value for line in self._read(self._source, columns))
        require_columns(INPUT, str(self._source), columns, values)
        return Contents(total, at_fault)

    def close(self) -> None:
        """Close the files."""
        self._opened.close()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _require_two_files(source: Path, output: Path) -> None:
    if output.exists() and output.samefile(source):
        raise ConfigError(OUTPUT, str(output), "is the input; name another file")
    if not output.parent.is_dir():
        raise ConfigError(OUTPUT, str(output), "is in no folder that exists; make it first")
    if output.is_dir():
        raise ConfigError(OUTPUT, str(output), "must be a file, not a folder")
