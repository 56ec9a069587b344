"""The lines of an input file, one at a time: JSON Lines, CSV, TSV or Parquet."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.engine.rows.template import no_column
from guided_spec.errors import ConfigError, reason_of

INPUT = "--input"
MAX_LINE_BYTES = 2**26  # of JSON: a longer line is a file without line breaks
_PARQUET_ROWS = 256  # read at a time


class Line(NamedTuple):
    """One line.

    number: in the file from 1, of Parquet the row's. value: what it holds. fault: why it cannot be
    read, and then ``value`` is None.
    """

    number: int
    value: Any
    fault: str | None = None


Reader = Callable[[Path, Sequence[str]], Iterator[Line]]


def reader_of(path: Path) -> Reader:
    """What reads the file, by the end of its name. Raises ConfigError for another one.

    The reader takes the path and the columns that are needed, and raises ConfigError for a file
    that cannot be read, or that has no such column. Blank lines are skipped.
    """
    found = _READERS.get(path.suffix.lower())
    if found is None:
        raise ConfigError(INPUT, str(path), f"its name must end in {', '.join(_READERS)}")
    if not path.is_file():
        raise ConfigError(INPUT, str(path), "there is no such file")
    return found


def _read_json_lines(path: Path, _columns: Sequence[str]) -> Iterator[Line]:
    try:
        with path.open("rb") as file:
            number = 0
            while data := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                if len(data) > MAX_LINE_BYTES:
                    while not data.endswith(b"\n") and (data := file.readline(MAX_LINE_BYTES)):
                        pass
                    reason = f"line {number} has more than {MAX_LINE_BYTES:,} bytes"
                    yield Line(number, None, f"{reason}: end each object with a newline")
                    continue
                data = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
                if data.strip():
                    yield _read_json(number, data)
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_json(number: int, data: bytes) -> Line:
    try:
        return Line(number, json.loads(data.decode("utf-8")))
    except UnicodeDecodeError as error:
        reason = f"is no UTF-8: {error.reason} at byte {error.start}"
    except json.JSONDecodeError as error:
        reason = f"is not valid JSON: {error.msg} at character {error.pos}"
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, deep nesting
        reason = f"cannot be read: {error}"
    return Line(number, None, f"line {number} {reason}")


def _read_table(path: Path, columns: Sequence[str]) -> Iterator[Line]:
    csv.field_size_limit(MAX_LINE_BYTES)  # its own is short for a document
    delimiter, before = "\t" if path.suffix.lower() == ".tsv" else ",", 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter=delimiter, strict=True)
            header = next(rows, None)
            if header is None:
                return
            _require_header(path, header, columns)
            before = rows.line_num
            for row in rows:
                if row:
                    yield _read_row(rows.line_num, header, row)
                before = rows.line_num
    except csv.Error as error:
        fix = 'put quotes around a cell that has quotes, and write each of its own twice: "a ""b"""'
        reason = f"the row that begins in line {before + 1} cannot be read: {error}; {fix}"
        raise ConfigError(INPUT, str(path), reason) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error


def _read_row(number: int, header: list[str], row: list[str]) -> Line:
    if len(row) != len(header):
        reason = f"line {number} has {len(row)} cells, and the first line names {len(header)}"
        return Line(number, None, f"{reason}: put quotes around cells with commas")
    return Line(number, dict(zip(header, row, strict=True)))


def _read_parquet(path: Path, columns: Sequence[str]) -> Iterator[Line]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        fix = "needs pyarrow: pip install 'guided-spec[batch]'"
        raise ConfigError(INPUT, str(path), fix) from None
    try:
        with parquet.ParquetFile(path) as file:
            _require_header(path, file.schema_arrow.names, columns)
            number = 0
            for batch in file.iter_batches(_PARQUET_ROWS, columns=list(columns)):
                for row in batch.to_pylist():
                    number += 1
                    yield Line(number, row)
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise _unreadable(path, error) from error


def _require_header(path: Path, header: Sequence[str], columns: Sequence[str]) -> None:
    """Raise ConfigError for names that stand twice, or for a column that is not there."""
    twice = [name for at, name in enumerate(header) if name in header[:at]]
    if twice:
        raise ConfigError(INPUT, str(path), f"its column {twice[0]!r} stands twice; name it anew")
    for name in columns:
        if name not in header:
            raise ConfigError(INPUT, str(path), f"has {no_column(name, header)}")


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(INPUT, str(path), f"cannot be read: {reason_of(error)}")


_READERS: dict[str, Reader] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".csv": _read_table,
    ".tsv": _read_table,
    ".parquet": _read_parquet,
}
