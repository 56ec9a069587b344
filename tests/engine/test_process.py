"""An LLM in a process of its own gives what one in this process gives, and fails like it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import queue
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from itertools import accumulate
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from guided_spec.engine import PROGRAM
from guided_spec.engine import process as processes
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Chunk
from guided_spec.engine.process import EngineProcess
from guided_spec.errors import ConfigError, ModelError, OtherProcessError, UnsupportedSchemaError
from guided_spec.grammar.isolation import start_interpreter
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.trace.record import Trace
from guided_spec.types import SamplingParams
from tests.processes import in_fork
from tests.server.running import until

OPTIONS: dict[str, Any] = {"max_model_len": 512, "max_batch_size": 4}
LONG = SamplingParams(max_tokens=450, ignore_eos=True)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.fixture(scope="module")
def process() -> Iterator[EngineProcess]:
    logging.getLogger("guided_spec").setLevel(logging.INFO)
    begun = start_interpreter(PROGRAM)  # as a server does, which imports the rest meanwhile
    with EngineProcess(interpreter=begun, **OPTIONS) as made:
        logging.getLogger("guided_spec").setLevel(logging.NOTSET)
        yield made
        assert begun.process.poll() is None
    assert begun.process.poll() == 0


async def chunks_of(llm: LLM | EngineProcess, *args: Any, **options: Any) -> list[Chunk]:
    return [chunk async for chunk in llm.astream(*args, **options)]


def outcomes(trace: Trace) -> list[list[tuple[int, str]]]:
    return [[(token.id, token.outcome) for token in step.drafted] for step in trace.steps]


def test_chunks_are_those_of_an_llm(process: EngineProcess) -> None:
    """Texts, tokens, logprobs, traces and parsed values, whichever process writes them."""
    grammar = GrammarSpec.json_schema(SCHEMA)
    one = SamplingParams(max_tokens=40, seed=5, n=2, logprobs=2, grammar=grammar)
    two = SamplingParams(max_tokens=12, temperature=0.0, bad_words=["my", "name", [7]])
    ask: Any = (["My name is", "Hello"], [one, two])
    with LLM(**OPTIONS) as llm:
        here = asyncio.run(chunks_of(llm, *ask, trace=True))
        ids = llm.encode("Hello, Maria")
    there = asyncio.run(chunks_of(process, *ask, trace=True))
    assert process.encode("Hello, Maria") == ids
    for of in ((0, 0), (0, 1), (1, 0)):
        ours, theirs = (
            [chunk for chunk in found if (chunk.prompt_index, chunk.sample_index) == of]
            for found in (here, there)
        )
        assert "".join(chunk.text for chunk in ours) == "".join(chunk.text for chunk in theirs)
        mine, other = ours[-1].completion, theirs[-1].completion
        assert mine is not None
        assert other is not None
        assert mine.token_ids == other.token_ids
        assert mine.answer == other.answer
        texts = accumulate(chunk.text for chunk in theirs)
        assert [chunk.answer for chunk in theirs] == list(texts)
        assert mine.parsed == other.parsed
        assert mine.grammar == other.grammar
        assert [chunk.grammar for chunk in theirs] == [mine.grammar] * len(theirs)
        assert mine.trace is not None
        assert other.trace is not None
        assert outcomes(mine.trace) == outcomes(other.trace)
        for ours_at, theirs_at in zip(mine.logprobs or (), other.logprobs or (), strict=True):
            assert ours_at.logprob == pytest.approx(theirs_at.logprob, abs=1e-4)


def test_errors_are_those_of_an_llm(process: EngineProcess) -> None:
    """A schema that cannot be enforced, and what concerns all of a call."""
    schema = {"not": {"multipleOf": 2}}
    refused = SamplingParams(grammar=GrammarSpec.json_schema(schema))
    (chunk,) = asyncio.run(chunks_of(process, ["A"], refused, on_error="return"))
    with LLM(**OPTIONS) as llm:
        (same,) = asyncio.run(chunks_of(llm, ["A"], refused, on_error="return"))
    assert chunk.completion is not None
    assert same.completion is not None
    assert isinstance(chunk.completion.error, UnsupportedSchemaError)
    assert str(chunk.completion.error) == str(same.completion.error)
    with pytest.raises(UnsupportedSchemaError, match="positive spelling"):
        asyncio.run(chunks_of(process, ["A"], refused))
    with pytest.raises(ConfigError, match="2 of them"):
        asyncio.run(chunks_of(process, ["A"], [LONG, LONG]))
    with pytest.raises(ConfigError, match="on_error"):
        asyncio.run(chunks_of(process, ["A"], LONG, on_error="ignore"))


def test_a_fork_is_told_at_once_and_ends_nothing(process: EngineProcess) -> None:
    ask = partial(chunks_of, process, ["A"], SamplingParams(max_tokens=2))
    uses: list[Callable[[], object]] = [lambda: asyncio.run(ask()), lambda: process.load]
    for use in uses:
        with pytest.raises(OtherProcessError, match="^this EngineProcess was made in process"):
            in_fork(use)
    with pytest.raises(OtherProcessError, match="^this EngineProcess cannot be pickled"):
        pickle.dumps(process)
    in_fork(process.close)
    assert asyncio.run(ask())[-1].completion is not None


def test_an_answer_does_not_come_again_with_every_piece(
    process: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only its length crosses the pipe, and the last piece of text."""
    messages: list[Any] = []

    def receive(connection: Connection) -> Any:
        messages.append(pickle.loads(connection.recv_bytes()))
        return messages[-1]

    monkeypatch.setattr(Connection, "recv", receive)
    chunks = asyncio.run(chunks_of(process, ["A"], replace(LONG, max_tokens=100)))
    listed = [one for some in messages for one in (some if isinstance(some, list) else [some])]
    crossed = [one for one in listed if hasattr(one, "answer_length")]
    assert crossed  # but for a message that was waited for before
    assert {one.chunk.answer for one in crossed} == {""}
    lengths = [len(chunk.answer) for chunk in chunks]
    assert [one.answer_length for one in crossed] == lengths[-len(crossed) :]
    assert chunks[-1].answer.endswith("".join(one.chunk.text for one in crossed))


def test_leaving_a_stream_cancels_it(process: EngineProcess) -> None:
    async def first() -> Chunk:
        async with aclosing(process.astream(["A"], LONG)) as stream:
            return await anext(stream)

    assert asyncio.run(first()).completion is None
    until(lambda: process.load.running == 0)


@pytest.mark.slow
def test_its_end_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """To requests that run, to those that come, and to who waits for it; its log comes through."""
    with caplog.at_level(logging.INFO, "guided_spec"), EngineProcess(**OPTIONS) as own:
        assert any("packed forwards" in record.getMessage() for record in caplog.records)

        async def ask() -> list[Chunk]:
            found = list[Chunk]()
            async for chunk in own.astream(["A"], LONG, on_error="return"):
                if not found:
                    os.kill(_child_of_this_process(), signal.SIGKILL)
                found.append(chunk)
            return found

        last = asyncio.run(ask())[-1]
        assert last.completion is not None
        assert isinstance(last.completion.error, ModelError)
        assert "exit status -9" in str(last.completion.error)
        with pytest.raises(ModelError, match="exit status -9"):
            asyncio.run(chunks_of(own, ["A"], LONG))
        with pytest.raises(ModelError, match="exit status -9"):
            own.ended.result()
    with pytest.raises(ConfigError, match="pass a hub id or a folder"):
        EngineProcess(torch.nn.Linear(1, 1))  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_parent_that_ends_before_it_asks_for_a_model(capfd: pytest.CaptureFixture[str]) -> None:
    started = start_interpreter(PROGRAM)
    started.connection.close()
    assert started.process.wait() == 0
    assert capfd.readouterr() == ("", "")


def _child_of_this_process() -> int:
    """The last one that runs an engine."""
    command = ["pgrep", "-n", "-f", "-P", str(os.getpid()), "guided_spec.engine.process"]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


class OneQuestion:
    """A parent that asks nothing, and sees how many objects are frozen when it could."""

    num_frozen = 0

    def recv(self) -> None:
        self.num_frozen = gc.get_freeze_count()


@pytest.mark.slow
def test_no_pause_comes_of_what_is_loaded() -> None:
    parent: Any = OneQuestion()
    outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
    processes._work(processes._Start(OPTIONS, logging.INFO), parent, outgoing)
    assert parent.num_frozen > 100_000  # all that torch and transformers have
    assert gc.get_freeze_count() == 0
