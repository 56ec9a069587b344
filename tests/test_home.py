"""What has threads says so in a process that has none of them, and ends nothing from there."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import pickle
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from guided_spec.engine.llm import LLM
from guided_spec.errors import OtherProcessError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.guide import Guide
from guided_spec.home import Home, once_per_process
from guided_spec.server.app import build_app
from guided_spec.types import SamplingParams
from tests.processes import in_fork
from tests.tiny_llm import make_llm, tiny_tokenizer
from tests.toys import VOCABULARY

SHORT = SamplingParams(max_tokens=3)
FREE = ["A", "B"]
LETTERS = GrammarSpec.regex("[a-z]+")
MADE = r"^this LLM was made in process \d+, and its threads are not in process \d+.* \"spawn\"$"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm("llama", "ngram") as made:
        made.generate(FREE, SHORT)
        yield made


async def _all(chunks: AsyncIterator[Any]) -> list[Any]:
    return [chunk async for chunk in chunks]


USES: dict[str, Callable[[LLM], object]] = {
    "generate": lambda llm: llm.generate(FREE, SHORT),
    "return": lambda llm: llm.generate(FREE, SHORT, on_error="return"),
    "stream": lambda llm: list(llm.stream("A", SHORT)),
    "agenerate": lambda llm: asyncio.run(llm.agenerate("A", SHORT)),
    "astream": lambda llm: asyncio.run(_all(llm.astream("A", SHORT))),
    "choose": lambda llm: llm.choose("A", ["b", "c"]),
    "achoose": lambda llm: asyncio.run(llm.achoose("A", ["b", "c"])),
    "compile": lambda llm: llm.compile([LETTERS]),
    "load": lambda llm: llm.load,
}


@pytest.mark.parametrize("use", USES)
def test_a_fork_is_told_at_once(llm: LLM, use: str) -> None:
    with pytest.raises(OtherProcessError, match=MADE):
        in_fork(lambda: USES[use](llm))


def test_a_fork_that_closes_it_leaves_the_parent_s(llm: LLM) -> None:
    in_fork(lambda: [close() for close in (llm.close, llm.close, gc.collect)])
    assert llm.generate("A", SHORT)[0].finish_reason == "length"


def test_a_stream_does_not_go_on_in_a_fork(llm: LLM) -> None:
    stream = llm.stream("A", SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    with pytest.raises(OtherProcessError, match=MADE):
        in_fork(lambda: list(stream))
    assert list(stream)[-1].completion is not None  # here it does


def _generate(_number: int) -> None:
    assert KEPT is not None
    KEPT.generate("A", SHORT)


KEPT: LLM | None = None


def test_a_pool_of_forks_passes_the_error_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "KEPT", llm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found = pool.map_async(_generate, [1])
            with pytest.raises(OtherProcessError, match=MADE):
                found.get(20)


class Prompts(torch.utils.data.Dataset[Any]):
    """A data set that asks a model, as some do."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def __getitem__(self, index: int) -> str:
        return self._llm.generate("A", SHORT)[0].text

    def __len__(self) -> int:
        return 1


def test_a_loader_s_worker_passes_the_error_on(llm: LLM) -> None:
    options: dict[str, Any] = {"num_workers": 1, "timeout": 20, "multiprocessing_context": "fork"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(OtherProcessError, match="was made in process"):
            list(torch.utils.data.DataLoader(Prompts(llm), **options))


def test_a_server_s_worker_does_not_start_behind_a_fork(llm: LLM) -> None:
    app = build_app(llm)

    async def start() -> None:
        await app.router.lifespan_context(app).__aenter__()

    asyncio.run(start())
    with pytest.raises(OtherProcessError, match=MADE):
        in_fork(lambda: asyncio.run(start()))


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_not_copied(llm: LLM, copied: Callable[[Any], object]) -> None:
    told = "^this LLM cannot be pickled or copied: .* make one in each process"
    for one in (llm, {"of": [llm]}) if copied is not copy.copy else (llm,):
        with pytest.raises(OtherProcessError, match=told):
            copied(one)


def test_a_guide_compiles_in_its_own_process_alone() -> None:
    guide = Guide(VOCABULARY, tiny_tokenizer(), device=torch.device("cpu"))
    try:
        params = SamplingParams(grammar=LETTERS, max_tokens=2)
        with pytest.raises(OtherProcessError, match="this Guide was made in process"):
            in_fork(lambda: guide.open(0, [1], params))
        in_fork(guide.close)
        with pytest.raises(OtherProcessError, match="^this Guide cannot be pickled"):
            pickle.dumps(guide)
        assert guide.open(0, [1], params).constraint is not None
    finally:
        guide.close()


class Held:
    """Something to end with."""


def test_what_ends_here_does_not_end_there() -> None:
    ended: list[str] = []
    held = Held()
    end = Home("toy").finalize(held, ended.append, "over")

    def drop() -> list[str]:
        nonlocal held
        del held
        gc.collect()
        return ended

    assert in_fork(drop) == []
    assert end.alive
    assert drop() == ["over"]
    assert not end.alive


@once_per_process
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


def test_a_fork_has_threads_of_its_own() -> None:
    assert _threads() is _threads()
    assert _threads().submit(pow, 2, 3).result(20) == 8
    assert in_fork(lambda: _threads().submit(pow, 2, 4).result(20)) == 16
