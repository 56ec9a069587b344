"""The output file: what it keeps of an earlier run that was cut off, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.batch.results import Question, Register, ResultFile, digest_of
from guided_spec.errors import ConfigError

DONE: dict[str, Any] = {"text": "é\n", "error": None}
FAILED: dict[str, Any] = {"text": None, "error": {"type": "X", "message": "y"}}
REFUSED: dict[str, Any] = {"response": {"status_code": 400, "body": {}}, "error": None}


def question(name: str) -> Question:
    return Question(name, digest_of(name))


def register(names: list[str]) -> Register:
    made = Register()
    for line, name in enumerate(names, 1):
        assert made.add(name, digest_of(name), line) is None
    return made


def resumed(path: Path, names: list[str]) -> list[str]:
    """What a further run would not ask again."""
    found, file = register(names), ResultFile(path)
    try:
        count = file.resume(found)
    finally:
        file.close()
    answered = [name for name in names if found.is_answered(name)]
    assert count == len(answered)
    return answered


def written(path: Path, answers: list[tuple[str, dict[str, Any]]]) -> bytes:
    file = ResultFile(path)
    for name, fields in answers:
        file.write(question(name), fields)
    file.close()
    return path.read_bytes()


_NAMES = ["a", "ü\n", "\ud800", '"', "x" * 40]


@given(
    kinds=st.lists(st.sampled_from([DONE, FAILED, REFUSED]), min_size=1, max_size=5),
    share=st.floats(0, 1),
)
def test_a_file_that_was_cut_anywhere(
    kinds: list[dict[str, Any]], share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("cut") / "answers.jsonl"
    answers = list(zip(_NAMES, kinds, strict=False))
    data = written(path, answers)
    cut = data[: round(share * len(data))]
    path.write_bytes(cut)
    whole = [name for name, fields in answers[: cut.count(b"\n")] if fields is DONE]
    assert resumed(path, _NAMES) == whole
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["custom_id"] for line in lines] == whole
    assert resumed(path, _NAMES) == whole  # and nothing is lost by looking again
    assert not path.with_name("answers.jsonl.part").exists()


def test_what_is_left_can_be_appended(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    data = written(path, [("a", DONE), ("b", DONE)])
    path.write_bytes(data[:-5])
    found, file = register(["a", "b"]), ResultFile(path)
    assert file.resume(found) == 1
    file.write(question("b"), DONE)
    file.close()
    assert path.read_bytes() == data


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"my notes", "line 1 is no answer of a batch"),
        (b"my notes\n", "line 1 is no answer of a batch"),
        (b'{"id": "batch_req_x"}\n', "line 1 is no answer of a batch"),
        (b'{"id": "batch_req_x",}\n', "line 1 is no answer of a batch"),
        (b'{"custom_id": "a", "method": "POST"}\n', "line 1 is no answer of a batch"),
    ],
)
def test_a_file_of_somebody_else_stays_as_it_is(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=f"^--output=.*{reason}; name another file"):
        resumed(path, ["a"])
    assert path.read_bytes() == data


def test_answers_of_another_batch(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    data = written(path, [("a", FAILED), ("b", DONE)])
    with pytest.raises(ConfigError, match="line 2 answers 'b', which the input does not have"):
        resumed(path, ["a"])
    changed = Register()
    changed.add("b", digest_of("another text"), 1)
    file = ResultFile(path)
    with pytest.raises(ConfigError, match="line 2 answers another request of 'b'"):
        file.resume(changed)
    file.close()
    path.write_bytes(data + data)
    with pytest.raises(ConfigError, match="line 4 answers 'b' a second time"):
        resumed(path, ["a", "b"])
    assert path.read_bytes() == data + data


def test_one_batch_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first = ResultFile(path)
    with pytest.raises(ConfigError, match="another batch writes it"):
        ResultFile(path)
    first.write(question("a"), FAILED)
    assert first.resume(register(["a"])) == 0  # which makes the file anew
    with pytest.raises(ConfigError, match="another batch writes it"):
        ResultFile(path)
    first.close()
    ResultFile(path).close()


def test_a_link_stays_one(tmp_path: Path) -> None:
    link, path = tmp_path / "link.jsonl", tmp_path / "answers.jsonl"
    link.symlink_to(path)
    written(link, [("a", FAILED)])
    assert resumed(link, ["a"]) == []
    assert link.is_symlink()
    assert path.read_bytes() == b""


def test_a_disk_that_is_full() -> None:
    file = ResultFile(Path("/dev/full"))
    with pytest.raises(ConfigError, match=r"^--output='/dev/full': .*No space left on device"):
        file.write(question("a"), DONE)
    file.close()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "answers.jsonl"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"must be a file that can be written \(Is a directory\)"):
        ResultFile(folder)


def test_ids_that_stand_twice() -> None:
    found = register(["a", "\ud800"])
    assert found.add("a", "x", 7) == 1
    assert found.add("\ud800", "x", 8) == 2
    assert found.digest("a") == digest_of("a")
    assert found.mark("a")
    assert not found.mark("a")
    assert not found.is_answered(None)
    found.close()
