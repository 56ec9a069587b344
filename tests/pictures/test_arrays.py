"""Arrays of pictures: how they reach the engine, and who holds them for how long."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from guided_spec.engine import process as engine_process
from guided_spec.engine.chats.picture_reader import PictureReader
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Chunk, Manner
from guided_spec.engine.process import EngineProcess
from guided_spec.models.pictures.picture import Picture, PicturePrompt
from guided_spec.models.pictures.vision import VisionTower
from guided_spec.server import service
from guided_spec.server.picture_room import HeldPictures, PictureRoom
from guided_spec.types import SamplingParams
from tests.pictures.sighted import ask, picture, sighted
from tests.pictures.test_server import (
    LENGTH,
    TEXT,
    URL,
    WORDS,
    chat,
    folder,
    image,
    messages,
    post,
    wanted,
)
from tests.server.running import PATIENCE, running, until

GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True, temperature=0.0)
MANNER = Manner(is_streamed=True, is_traced=False)
LARGE = 48 * 2**20

__all__ = ["folder"]  # a fixture


def made(num_bytes: int, seed: int = 0) -> PicturePrompt:
    content = f"{num_bytes} {seed}".encode()
    found = Picture.of(content, {"a": np.full(num_bytes, seed, dtype=np.uint8)}, 1)
    return PicturePrompt([1, 5, 2], (found,), [1])


@settings(deadline=None)
@given(
    st.lists(
        st_numpy.arrays(
            st.sampled_from([np.float32, np.int64, np.uint8]),
            st_numpy.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
        ),
        max_size=4,
    ),
    st.integers(1, 70),
    st.booleans(),
)
def test_messages_with_arrays_arrive_as_they_were(
    arrays: list[Any],
    piece: int,
    turned: bool,  # noqa: FBT001
) -> None:
    named = {str(at): one.T if turned else one for at, one in enumerate(arrays)}
    sent = [("first", Picture.of(b"named", named, 3)), "then"]
    ours, theirs = Pipe()
    with pytest.MonkeyPatch.context() as patch, ours, theirs:
        patch.setattr(engine_process, "PIECE_BYTES", piece)
        outbox = engine_process.Outbox(ours)
        for message in sent:
            outbox.put(message)
        (_, found), then = engine_process.receive(theirs), engine_process.receive(theirs)
    assert then == "then"
    assert found == sent[0][1]
    assert found.inputs.keys() == named.keys()
    for name, array in found.inputs.items():
        assert array.dtype == named[name].dtype
        assert array.flags.writeable
        np.testing.assert_array_equal(array, named[name])


def test_what_was_sent_is_let_go() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        outbox, array = engine_process.Outbox(ours), np.ones(99)
        left = weakref.ref(array)
        outbox.put(array)
        np.testing.assert_array_equal(engine_process.receive(theirs), array)
        del array
        until(lambda: left() is None)


@pytest.mark.slow
def test_arrays_are_not_copied_into_messages(folder: Path) -> None:
    """A copy of them would hold up the event loop, and all clients with it."""
    with EngineProcess(str(folder), proposer="none", max_model_len=512) as engine:
        prompt = engine.prepare_chat(ask(picture(3), WORDS)).prompt
        assert isinstance(prompt, PicturePrompt)
        (one,) = prompt.pictures
        more = {"extra": np.zeros(LARGE, dtype=np.uint8)}  # which the tower does not read
        wide = Picture.of(b"large", {**one.inputs, **more}, one.count)
        large = PicturePrompt(prompt.token_ids, (wide,), prompt.places)

        async def text() -> str:
            async with aclosing(engine.astream([large], GREEDY)) as chunks:
                return "".join([chunk.text async for chunk in chunks])

        tracemalloc.start()
        found = asyncio.run(text())
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert found == wanted(picture(3), WORDS)
    assert peak < LARGE / 4


def read(llm: LLM, prompt: PicturePrompt) -> list[int]:
    """The tokens of its text; the request has no arrays any more."""
    ended, chunks = threading.Event(), list[Chunk]()

    def report(chunk: Chunk) -> None:
        chunks.append(chunk)
        if chunk.completion is not None:
            ended.set()

    (request,) = llm.submit([prompt], GREEDY, report, MANNER)
    assert ended.wait(PATIENCE)
    assert request is not None
    assert request.job.pictures == prompt
    assert request.job.pictures is not None
    assert request.job.pictures.num_bytes == 0
    assert chunks[-1].completion is not None
    return chunks[-1].completion.token_ids


def test_the_engine_lets_arrays_go_once_they_are_read() -> None:
    """They are its caller's, who may ask again."""
    one, asked = sighted("qwen2_vl"), ask(picture(3), WORDS)
    with one.llm() as llm:
        prompt = llm.prepare_chat(asked).prompt
        assert isinstance(prompt, PicturePrompt)
        assert read(llm, prompt) == read(llm, prompt) == one.expected(asked, LENGTH)
    assert prompt.num_bytes > 0


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_requests_that_end_unread_keep_no_arrays(
    monkeypatch: pytest.MonkeyPatch,
    is_cancelled: bool,  # noqa: FBT001
) -> None:
    """Whoever submits requests may keep them for long after they have ended."""
    ended = threading.Event()

    def fails(*_: Any) -> None:
        raise RuntimeError("out of luck")

    def report(chunk: Chunk) -> None:
        if chunk.completion is not None:
            assert chunk.completion.error is not None
            ended.set()

    with sighted("qwen2_vl").llm(max_batch_size=1) as llm:
        if not is_cancelled:
            monkeypatch.setattr(VisionTower, "features", fails)
        long = SamplingParams(max_tokens=400, ignore_eos=True)
        running = llm.stream_chat(ask(WORDS), params=long)
        next(iter(running))
        prompt = llm.prepare_chat(ask(picture(3), WORDS)).prompt
        assert isinstance(prompt, PicturePrompt)
        (request,) = llm.submit([prompt], GREEDY, report, MANNER)
        assert request is not None
        if is_cancelled:
            request.cancel()
        assert ended.wait(PATIENCE)
        assert request.job.pictures == prompt
        assert request.job.pictures is not None
        assert request.job.pictures.num_bytes == 0
    assert prompt.num_bytes > 0


def chunk(sample: int) -> Chunk:
    return Chunk(0, sample, "")


PICTURED = [{"role": "user", "content": [{"type": "image"}]}]


def test_pictures_wait_for_room_and_texts_do_not() -> None:
    async def main() -> None:
        room, order = PictureRoom(10), list[str]()

        async def enter(name: str, messages: Sequence[Any]) -> None:
            async with room.turn(messages):
                order.append(name)

        async with room.turn(PICTURED):
            first = HeldPictures(room, made(6), 2)
        async with room.turn(PICTURED):
            second = HeldPictures(room, made(6), 1)
        waiting = [asyncio.ensure_future(enter(name, PICTURED)) for name in ("a", "b")]
        await asyncio.wait_for(enter("text", [{"role": "user", "content": "x"}]), PATIENCE)
        first.see(chunk(1))
        await asyncio.sleep(0.01)
        assert order == ["text"]
        first.see(chunk(0))  # now both samples have read them
        await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE)
        assert order == ["text", "a", "b"]
        for _ in range(2):
            second.release()
        waiting[0] = asyncio.ensure_future(enter("c", PICTURED))
        held = HeldPictures(room, made(30), 1)
        left = asyncio.ensure_future(enter("d", PICTURED))
        await asyncio.sleep(0.01)
        left.cancel()  # a client that leaves gives its turn on
        held.release()
        await asyncio.wait_for(asyncio.gather(waiting[0], enter("e", PICTURED)), PATIENCE)
        assert order[3:] == ["c", "e"]

    asyncio.run(main())


def test_released_pictures_are_let_go_by_all() -> None:
    prompt = made(6)
    held = HeldPictures(PictureRoom(), prompt, 1)
    assert prompt.num_bytes == 6
    held.release()
    assert prompt.num_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("num_samples", [1, 3])
def test_waiting_requests_hold_files(
    monkeypatch: pytest.MonkeyPatch, folder: Path, num_samples: int
) -> None:
    """Whatever is prepared is read by the engine before more is, where there is little room."""
    monkeypatch.setattr(service, "PictureRoom", partial(PictureRoom, 1))
    encode, made_before, held = PictureReader.encode, list[PicturePrompt](), list[int]()

    def noted(self: PictureReader, *given: Any) -> PicturePrompt:
        held.append(sum(one.num_bytes for one in made_before))
        made_before.append(encode(self, *given))
        return made_before[-1]

    monkeypatch.setattr(PictureReader, "encode", noted)
    part = {"type": "image_url", "image_url": {"url": URL}}
    with (
        EngineProcess(str(folder), proposer="none", max_model_len=512) as engine,
        running(engine) as served,  # type: ignore[arg-type]
        ThreadPoolExecutor(6) as pool,
    ):

        def reply(_: int) -> set[str]:
            found = post(served, "/v1/chat/completions", {**chat(part), "n": num_samples})
            return {one["message"]["content"] for one in found["choices"]}

        assert list(pool.map(reply, range(6))) == [{wanted(picture(3), WORDS)}] * 6
        counted = {"messages": messages(image(TEXT))["messages"]}
        for _ in range(2):
            assert post(served, "/v1/messages/count_tokens", counted)["input_tokens"] > 16
        assert post(served, "/tokenize", {"messages": chat(part)["messages"]})["count"] > 16
    assert held == [0] * 9


@pytest.mark.parametrize("is_streamed", [True, False])
def test_clients_that_leave_keep_their_turn_until_their_pictures_are_read(
    monkeypatch: pytest.MonkeyPatch,
    is_streamed: bool,  # noqa: FBT001
) -> None:
    """A thread reads on when its client has left: others of its kind would fill the memory."""
    encode, begun, may_read = PictureReader.encode, list[Any](), threading.Event()

    def slow(self: PictureReader, *given: Any) -> PicturePrompt:
        begun.append(given)
        assert may_read.wait(PATIENCE)
        return encode(self, *given)

    monkeypatch.setattr(PictureReader, "encode", slow)
    body = chat({"type": "image_url", "image_url": {"url": URL}})
    with sighted("llava").llm() as llm, running(llm) as served:
        address = f"{served.url}/v1/chat/completions"
        try:
            for _ in range(3):
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(address, json={**body, "stream": is_streamed}, timeout=0.3)
            assert len(begun) == 1
        finally:
            may_read.set()
        found = post(served, "/v1/chat/completions", body)
    assert len(begun) == 2, "who left while it waited reads nothing"
    assert found["choices"][0]["message"]["content"] == wanted(picture(3), WORDS)
