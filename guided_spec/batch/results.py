"""The output file: what is answered already, and a line for each answer as it comes."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from guided_spec.errors import ConfigError, reason_of

OUTPUT = "--output"
_ID = "batch_req_"
_HEAD = f'{{"id": "{_ID}'.encode()  # with which every line begins


class Question(NamedTuple):
    """One line of the input, read.

    custom_id: what its answer is found by; None for a line that says none.
    digest: of all that its answer depends on. content: what there is to answer.
    refusal: the fields of its answer where the line itself is at fault, else None.
    """

    custom_id: str | None
    digest: str
    content: Any = None
    refusal: Mapping[str, Any] | None = None


def digest_of(*parts: Any) -> str:
    """A digest of JSON values: equal for equal ones."""
    data = json.dumps(parts, sort_keys=True).encode()
    return blake2b(data, digest_size=16).hexdigest()


class Register:
    """The custom ids of a batch, in a temporary database: millions of them take no memory."""

    def __init__(self) -> None:
        self._database = sqlite3.connect("")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(
            "CREATE TABLE questions (id BLOB PRIMARY KEY, digest TEXT, line INTEGER, done INTEGER)"
            " WITHOUT ROWID"
        )

    def add(self, custom_id: str, digest: str, line: int) -> int | None:
        """Note a question. Returns the line of an earlier one with its id, else None."""
        key, insert = _key(custom_id), "INSERT OR IGNORE INTO questions VALUES (?, ?, ?, 0)"
        if self._database.execute(insert, (key, digest, line)).rowcount:
            return None
        found = self._database.execute("SELECT line FROM questions WHERE id = ?", (key,))
        return int(found.fetchone()[0])

    def digest(self, custom_id: str) -> str | None:
        """Of the question with this id; None if there is none."""
        select = "SELECT digest FROM questions WHERE id = ?"
        found = self._database.execute(select, (_key(custom_id),)).fetchone()
        return None if found is None else str(found[0])

    def mark(self, custom_id: str) -> bool:
        """The question is answered; False if it was so before."""
        update = "UPDATE questions SET done = 1 WHERE id = ? AND done = 0"
        return bool(self._database.execute(update, (_key(custom_id),)).rowcount)

    def is_answered(self, custom_id: str | None) -> bool:
        """Whether its answer stands in the output."""
        if custom_id is None:
            return False
        select = "SELECT done FROM questions WHERE id = ?"
        found = self._database.execute(select, (_key(custom_id),)).fetchone()
        return found is not None and bool(found[0])

    def close(self) -> None:
        """Delete the database."""
        self._database.close()


class ResultFile:
    """JSON Lines, appended to. Nobody else may write them meanwhile.

    Raises ConfigError where it cannot be written, or another batch writes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()  # a link stays one
        try:
            self._file = self._open()
        except OSError as error:
            raise _unwritable(path, error) from error

    def resume(self, register: Register) -> int:
        """Mark what is answered; returns how many are.

        Answers that are errors, and a last line that was cut off, are taken out of the file: they
        are asked for again. Raises ConfigError, and leaves the file as it is, for a line that is no
        answer of this batch.
        """
        num_kept = num_dropped = 0
        for number, line in self._lines():
            custom_id = self._answered(number, line, register)
            if custom_id is None:
                num_dropped += 1
            elif register.mark(custom_id):
                num_kept += 1
            else:
                self._refuse(number, f"answers {custom_id!r:.80} a second time")
        if num_dropped:
            self._keep_answers()
        return num_kept

    def write(self, question: Question, fields: Mapping[str, Any]) -> None:
        """Append an answer. Raises ConfigError where it cannot be written."""
        line = {"id": _ID + question.digest, "custom_id": question.custom_id} | dict(fields)
        # Half of a surrogate pair, which a line may hold, becomes its escape.
        text = json.dumps(line, ensure_ascii=False) + "\n"
        left = memoryview(text.encode("utf-8", errors="backslashreplace"))
        try:
            while left:  # unbuffered: what is written survives the end of this process
                left = left[os.write(self._file.fileno(), left) :]
        except OSError as error:
            raise _unwritable(self._path, error) from error

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()

    def _open(self) -> BinaryIO:
        file = self._path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            fix = "another batch writes it; wait for its end, or name another file"
            raise ConfigError(OUTPUT, str(self._path), fix) from None
        return file

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        self._file.seek(0)
        yield from enumerate(self._file, 1)

    def _answered(self, number: int, line: bytes, register: Register) -> str | None:
        """What the line answers; None if it is to be asked for again."""
        if not line.endswith(b"\n"):  # the process ended, or the disk was full, in this line
            if not (line.startswith(_HEAD) or _HEAD.startswith(line)):
                self._refuse(number, "is no answer of a batch")
            return None
        answer = _parsed(line)
        if answer is None:
            self._refuse(number, "is no answer of a batch")
        custom_id = _id_of_success(answer)
        if custom_id is None:
            return None
        digest = register.digest(custom_id)
        if digest is None:
            self._refuse(number, f"answers {custom_id!r:.80}, which the input does not have")
        if answer["id"] != _ID + digest:
            asked = "the line, the model or an option is another one now"
            self._refuse(number, f"answers another request of {custom_id!r:.80}: {asked}")
        return custom_id

    def _refuse(self, number: int, reason: str) -> NoReturn:
        raise ConfigError(OUTPUT, str(self._path), f"line {number} {reason}; name another file")

    def _keep_answers(self) -> None:
        """Replace the file by one without what is to be asked for again."""
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            with part.open("wb") as kept:
                for _, line in self._lines():
                    answer = _parsed(line) if line.endswith(b"\n") else None
                    if answer is not None and _id_of_success(answer) is not None:
                        kept.write(line)
                kept.flush()
                os.fsync(kept.fileno())
            part.replace(self._path)
            self._file.close()
            self._file = self._open()
        except OSError as error:
            raise _unwritable(self._path, error) from error


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A whole line that a batch has written; None for another one."""
    if not line.startswith(_HEAD):
        return None
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    is_ours = isinstance(answer, dict) and {"id", "custom_id", "error"} <= answer.keys()
    return answer if is_ours else None


def _id_of_success(answer: Mapping[str, Any]) -> str | None:
    """What it answers; None of an error."""
    response = answer.get("response") or {"status_code": 200}
    if answer["error"] is not None or response.get("status_code") != 200:
        return None
    return str(answer["custom_id"])


def _key(custom_id: str) -> bytes:
    return custom_id.encode("utf-8", errors="surrogatepass")


def _unwritable(path: Path, error: OSError) -> ConfigError:
    fix = f"must be a file that can be written ({reason_of(error)})"
    return ConfigError(OUTPUT, str(path), fix)
