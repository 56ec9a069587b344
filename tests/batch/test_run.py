"""A batch by itself: who is asked, how many at a time, and what is left after a stop."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.batch.inputs import Line
from guided_spec.batch.results import Question, digest_of
from guided_spec.batch.run import Batch
from guided_spec.engine.rows.progress import ProgressBar
from guided_spec.errors import ConfigError

SLOTS = 2
LLM = SimpleNamespace(load=SimpleNamespace(num_slots=SLOTS))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C is not ignored, as it is in a shell's background, whose processes inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Form:
    """A line is its own id. Negative ones are at fault, those of 100 and more fail.

    stop_at: what calls ``stop`` instead of being answered.
    """

    columns: Sequence[str] = ()

    def __init__(self, stop_at: int | None = None, stop: Callable[[], None] | None = None) -> None:
        self.asked: list[int] = []
        self.flying = self.most_flying = self.num_read = self.most_ahead = 0
        self._stop_at, self._stop = stop_at, stop

    def read(self, index: int, line: Line) -> Question:
        """What the line asks."""
        del index
        self.num_read += 1
        number = line.value
        fault = line.fault or ("negative" if number < 0 else None)
        refusal = None if fault is None else {"response": None, "error": {"message": fault}}
        return Question(str(number), digest_of(number), number, refusal)

    def runner(self, llm: Any, watch: Callable[[Any], None]) -> Form:
        """What answers the lines."""
        del llm, watch
        self.num_read = 0
        return self

    async def run(self, question: Question) -> Mapping[str, Any]:
        """After a while."""
        number = question.content
        self.asked.append(number)
        self.flying += 1
        self.most_flying = max(self.most_flying, self.flying)
        self.most_ahead = max(self.most_ahead, self.num_read - len(self.asked))
        for _ in range(number % 7):
            await asyncio.sleep(0)
        self.flying -= 1
        if number == self._stop_at and self._stop is not None:
            self._stop()
            await asyncio.sleep(0)
        status = 400 if number >= 100 else 200
        return {"response": {"status_code": status, "body": number}, "error": None}

    def close(self) -> None:
        """Nothing is held."""


def run(source: Path, output: Path, form: Form) -> Batch:
    with Batch(source, output, form) as batch, ProgressBar(None, is_shown=False) as bar:
        batch.run(LLM, bar)
    return batch


def answered(output: Path) -> list[int]:
    """The numbers that have an answer."""
    lines = [json.loads(line) for line in output.read_bytes().splitlines()]
    return [line["response"]["body"] for line in lines if line["response"] is not None]


def numbers(path: Path, given: Sequence[int]) -> Path:
    path.write_text("".join(f"{number}\n" for number in given))
    return path


def test_every_line_has_an_answer(tmp_path: Path) -> None:
    source = numbers(tmp_path / "in.jsonl", [*range(60), -1, 100, -2, *range(60, 99), 101, -3])
    form = Form()
    summary = run(source, tmp_path / "out.jsonl", form).summary
    assert sorted(answered(tmp_path / "out.jsonl")) == [*range(99), 100, 101]
    assert form.most_flying == 4 * SLOTS
    assert form.most_ahead <= 3  # those at fault: no line is read before there is room for it
    assert (summary.total, summary.before, summary.answered, summary.failed) == (104, 0, 99, 5)
    again = Form()
    summary = run(source, tmp_path / "out.jsonl", again).summary
    assert again.asked == [100, 101]  # errors are no answers
    assert (summary.total, summary.before, summary.answered, summary.failed) == (104, 99, 0, 5)
    assert sorted(answered(tmp_path / "out.jsonl")) == [*range(99), 100, 101]


def test_of_lines_with_one_id_the_first_is_answered(tmp_path: Path) -> None:
    source, output = numbers(tmp_path / "in.jsonl", [1, 2, 1, 3, -4, -4]), tmp_path / "out.jsonl"
    for asked, before in (([1, 2, 3], 0), ([], 3)):  # and again, where only errors are left
        form = Form()
        with Batch(source, output, form) as batch:
            assert batch.needs_model == bool(asked)
            with ProgressBar(None, is_shown=False) as bar:
                batch.run(LLM, bar)
        assert form.asked == asked
        summary = batch.summary
        found = (summary.total, summary.before, summary.answered, summary.failed)
        assert found == (6, before, len(asked), 3)
        assert sorted(answered(output)) == [1, 2, 3]
        lines = [json.loads(line) for line in output.read_bytes().splitlines()]
        told = {line["custom_id"]: line["error"]["message"] for line in lines if line["error"]}
        assert told["1"] == "custom_id='1': stands in lines 1 and 3: each line needs its own"
        assert "lines 5 and 6" in told["-4"] or told["-4"] == "negative"


@given(
    count=st.integers(1, 30),
    stops=st.lists(st.integers(0, 29), max_size=3),
    torn=st.integers(0, 60),
)
def test_stopped_anywhere_and_gone_on_with(
    count: int, stops: list[int], torn: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("stops")
    source, output = numbers(folder / "in.jsonl", range(count)), folder / "out.jsonl"
    for stop in stops:
        with suppress(RuntimeError):
            run(source, output, Form(stop, fail))
        kept = output.read_bytes()
        output.write_bytes(kept[: max(0, len(kept) - torn)])  # what a kill may leave
    before = answered_whole(output)
    last = Form()
    run(source, output, last)
    assert sorted(last.asked + before) == [*range(count)]
    assert sorted(answered(output)) == [*range(count)]


def answered_whole(output: Path) -> list[int]:
    """Those in lines with an end."""
    if not output.exists():
        return []
    whole = [line for line in output.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]
    return [json.loads(line)["response"]["body"] for line in whole]


def fail() -> None:
    raise RuntimeError


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_keeps_what_is_answered(tmp_path: Path) -> None:
    source = numbers(tmp_path / "in.jsonl", range(40))
    with pytest.raises(KeyboardInterrupt):
        run(source, tmp_path / "out.jsonl", Form(20, interrupt))
    before = answered(tmp_path / "out.jsonl")
    assert 8 <= len(before) < 40
    form = Form()
    run(source, tmp_path / "out.jsonl", form)
    assert sorted(before + form.asked) == [*range(40)]


def test_what_needs_no_model(tmp_path: Path) -> None:
    source = numbers(tmp_path / "in.jsonl", [1, -1])
    run(source, tmp_path / "out.jsonl", Form())
    with Batch(source, tmp_path / "out.jsonl", Form()) as batch:
        assert not batch.needs_model
        batch.refuse_faults()
    assert (batch.summary.before, batch.summary.answered, batch.summary.failed) == (1, 0, 1)
    assert len((tmp_path / "out.jsonl").read_bytes().splitlines()) == 2


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("given", "output", "reason"),
    [
        ([], "out.jsonl", "^--input=.*holds no lines"),
        ([1], "in.jsonl", "^--output=.*is the input; name another file"),
        ([1], "none/out.jsonl", "^--output=.*is in no folder that exists; make it first"),
        ([1], "", "^--output=.*must be a file, not a folder"),
    ],
)
def test_what_is_known_before_a_model_is_loaded(
    tmp_path: Path, given: list[int], output: str, reason: str
) -> None:
    source = numbers(tmp_path / "in.jsonl", given)
    with pytest.raises(ConfigError, match=reason):
        Batch(source, tmp_path / output, Form())


def test_a_file_that_is_gone_while_it_is_answered(tmp_path: Path) -> None:
    source = numbers(tmp_path / "in.jsonl", range(9))
    with (
        Batch(source, tmp_path / "out.jsonl", Form()) as batch,
        ProgressBar(None, is_shown=False) as bar,
    ):
        source.unlink()
        with pytest.raises(ConfigError, match="cannot be read"):
            batch.run(LLM, bar)
