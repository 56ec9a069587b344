"""Lines of every kind of file, and what is wrong with a line or a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from guided_spec.batch import inputs
from guided_spec.batch.inputs import Line, reader_of
from guided_spec.errors import ConfigError


def read(path: Path, data: bytes, columns: Sequence[str] = ()) -> list[Line]:
    path.write_bytes(data)
    return list(reader_of(path)(path, columns))


def test_json_lines_as_people_have_them(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a": 1}\r\n\r\n  \n{"a": "\\u2028\xe2\x80\xa8"}\n\xff\n{\n[2]'
    lines = read(tmp_path / "rows.jsonl", data)
    assert [(line.number, line.value) for line in lines] == [
        (1, {"a": 1}),
        (4, {"a": "\u2028\u2028"}),
        (5, None),
        (6, None),
        (7, [2]),
    ]
    faults = [str(line.fault) for line in lines if line.fault is not None]
    assert faults[0] == "line 5 is no UTF-8: invalid start byte at byte 0"
    assert faults[1].startswith("line 6 is not valid JSON: Expecting property name")


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"a": ' + b"1" * 5_000 + b"}"])
def test_lines_that_python_cannot_hold(tmp_path: Path, data: bytes) -> None:
    (line,) = read(tmp_path / "rows.ndjson", data)
    assert line.value is None
    assert str(line.fault).startswith("line 1 cannot be read: ")


def test_a_line_without_an_end_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 16)
    data = b'"' + b"x" * 100 + b'"\n"fits"\n"' + b"x" * 14 + b'"\n"' + b"y" * 15
    lines = read(tmp_path / "rows.jsonl", data)
    assert [line.value for line in lines] == [None, "fits", None, None]
    assert "line 1 has more than 16 bytes" in str(lines[0].fault)


_CELL = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=6)


@given(rows=st.lists(st.tuples(_CELL, _CELL), max_size=5), delimiter=st.sampled_from(",\t"))
def test_what_csv_writes_is_read(
    rows: list[tuple[str, str]], delimiter: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("csv") / ("rows.csv" if delimiter == "," else "rows.tsv")
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([("a", "b"), *rows])
    found = [line.value for line in reader_of(path)(path, ["a"])]
    assert found == [{"a": a, "b": b} for a, b in rows]


def test_long_cells(tmp_path: Path) -> None:
    (line,) = read(tmp_path / "rows.csv", b"a,b\n1," + b"x" * 300_000 + b"\n")
    assert len(line.value["b"]) == 300_000


def test_rows_of_another_length(tmp_path: Path) -> None:
    lines = read(tmp_path / "rows.csv", b'a,b\n1,2\n\n3\n"4\n5",6\n7,8,9\n')
    assert [line.value for line in lines if line.fault is None] == [
        {"a": "1", "b": "2"},
        {"a": "4\n5", "b": "6"},
    ]
    faults = [str(line.fault) for line in lines if line.fault is not None]
    assert faults[0].startswith("line 4 has 1 cells, and the first line names 2")
    assert faults[1].startswith("line 7 has 3 cells")


def test_parquet(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"a": f"é{at}", "b": at, "c": [at]} for at in range(600)]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    lines = list(reader_of(path)(path, ["c", "a"]))
    assert [line.value for line in lines] == [{"a": row["a"], "c": row["c"]} for row in rows]
    assert [line.number for line in lines] == [*range(1, 601)]


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("name", "data", "columns", "reason"),
    [
        ("rows.txt", b"", (), r"name must end in .jsonl, .ndjson, .csv"),
        ("rows.csv", b"a,a\n", (), "its column 'a' stands twice"),
        ("rows.csv", b"note\n1\n", ("notes",), r"no column 'notes'; did you mean note\? the col"),
        ("rows.csv", b"a\n\xff\n", ("a",), "cannot be read: 'utf-8' codec"),
        ("rows.csv", b'a\n"1', ("a",), "begins in line 2 cannot be read: unexpected end of data"),
        ("rows.csv", b'a,b\n"x\ny",z\n\n"4" inch,5\n', (), 'begins in line 5 .*twice: "a ""b"""'),
        ("rows.tsv", b'a\tb\n1\t"2\n3\t4"x\n', (), "begins in line 2 cannot be read"),
        ("rows.parquet", b"nothing", ("a",), "cannot be read: Parquet"),
    ],
)
def test_files_that_cannot_be_read(
    tmp_path: Path, name: str, data: bytes, columns: Sequence[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--input=.*{reason}"):
        read(tmp_path / name, data, columns)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--input=.*there is no such file"):
        reader_of(tmp_path / "rows.jsonl")


def test_json_lines_read_back(tmp_path: Path) -> None:
    values: list[Any] = [{"a": "\x7f\x00\u2029"}, "x", None, 1.5]
    data = "\n".join(map(json.dumps, values)).encode()
    assert [line.value for line in read(tmp_path / "rows.jsonl", data)] == values
