"""Many users of one engine, and users who leave."""

from __future__ import annotations

import asyncio
import gc
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from guided_spec.engine.llm import LLM
from guided_spec.engine.runner import EngineWorker
from guided_spec.errors import RequestCancelledError
from guided_spec.grammar.pipeline import PendingGrammar
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.engine.conftest import PATIENCE, Spy
from tests.tiny_llm import make_llm, near_copy

LETTERS = GrammarSpec.regex("[a-z]{100}")  # every step shows text
SHORT = SamplingParams(max_tokens=3)


async def until_steps(spy: Spy, count: int) -> None:
    while len(spy.steps) < count:
        await asyncio.sleep(0.005)


async def gather_under_patience(llm: LLM, lengths: list[int]) -> list[list[int]]:
    runs = [llm.agenerate("A", SamplingParams(max_tokens=length)) for length in lengths]
    outputs = await asyncio.wait_for(asyncio.gather(*runs), PATIENCE)
    return [output.token_ids for (output,) in outputs]


def test_tasks_share_batches(spy: Spy) -> None:
    spy.permits = threading.Semaphore(1)

    async def main(llm: LLM) -> list[list[int]]:
        task = asyncio.create_task(gather_under_patience(llm, [9, 5, 7, 6]))
        await until_steps(spy, 2)  # the second step is held until all have arrived
        spy.open()
        return await task

    with make_llm("llama", "spy", max_batch_size=4) as llm:
        found = asyncio.run(main(llm))
        longest = llm.generate("A", SamplingParams(max_tokens=9))[0].token_ids
    assert found == [longest[:length] for length in (9, 5, 7, 6)]
    assert max(map(len, spy.steps)) == 4


def test_threads_share_an_engine() -> None:
    params = SamplingParams(max_tokens=12, grammar=GrammarSpec.regex("[a-z]{4,8}"))
    with make_llm("llama", "draft_model", near_copy("llama")) as llm:
        expected = llm.generate("A", params)[0].text
        with ThreadPoolExecutor(6) as pool:
            runs = [pool.submit(llm.generate, ["A", "A"], params) for _ in range(12)]
            texts = {output.text for run in runs for output in run.result(PATIENCE)}
    assert texts == {expected}


def test_astream_gives_what_stream_gives() -> None:
    params = SamplingParams(max_tokens=20, grammar=LETTERS, complete=False)

    async def main(llm: LLM) -> list[str]:
        return [chunk.text async for chunk in llm.astream("A", params)]

    with make_llm("llama", "none") as llm:
        pieces = asyncio.run(main(llm))
        assert pieces == [chunk.text for chunk in llm.stream("A", params)]
        assert "".join(pieces) == llm.generate("A", params)[0].text
    assert len(pieces) > 5


def test_leaving_a_stream_frees_its_slot(spy: Spy) -> None:
    spy.permits = threading.Semaphore(2)
    with make_llm("llama", "spy", max_batch_size=1) as llm:
        stream = llm.stream(["A", "B"], SamplingParams(max_tokens=150, grammar=LETTERS))
        next(stream)
        stream.close()  # type: ignore[attr-defined]  # what leaving the loop does
        spy.open()
        output = llm.generate("A", SHORT)[0]
        assert output.finish_reason == "length"
    assert len(spy.steps) <= 3 + SHORT.max_tokens
    assert spy.released == [0, 0]


def test_cancelling_a_task_frees_its_slot(spy: Spy) -> None:
    spy.permits = threading.Semaphore(2)
    params = SamplingParams(max_tokens=150, grammar=LETTERS)

    async def main(llm: LLM) -> None:
        task = asyncio.create_task(llm.agenerate(["A", "B"], params))
        await until_steps(spy, 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        spy.open()
        (output,) = await asyncio.wait_for(llm.agenerate("A", SHORT), PATIENCE)
        assert output.finish_reason == "length"

    with make_llm("llama", "spy", max_batch_size=1) as llm:
        asyncio.run(main(llm))
    assert len(spy.steps) <= 3 + SHORT.max_tokens
    assert spy.released == [0, 0]


def test_the_others_of_a_batch_go_on(spy: Spy) -> None:
    spy.permits = threading.Semaphore(2)
    params = SamplingParams(max_tokens=30, grammar=LETTERS, complete=False)

    async def main(llm: LLM) -> list[int]:
        stays = asyncio.create_task(llm.agenerate("A", params))
        leaves = asyncio.create_task(llm.agenerate("A", params))
        await until_steps(spy, 2)
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        spy.open()
        (output,) = await asyncio.wait_for(stays, PATIENCE)
        return output.token_ids

    with make_llm("llama", "spy", max_batch_size=2) as llm:
        found = asyncio.run(main(llm))
        assert found == llm.generate("A", params)[0].token_ids


def test_cancelling_what_waits_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    never: Future[CompiledGrammar] = Future()

    async def main(llm: LLM) -> None:
        task = asyncio.create_task(
            llm.agenerate("A", SamplingParams(grammar=LETTERS), on_error="return")
        )
        await asyncio.sleep(0.1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        (output,) = await asyncio.wait_for(llm.agenerate("A", SHORT, on_error="return"), PATIENCE)
        assert output.error is None

    with make_llm("llama") as llm:
        monkeypatch.setattr(llm._grammars, "ask", lambda _: PendingGrammar(never, None))
        asyncio.run(main(llm))


def _worker(llm: LLM) -> EngineWorker:
    runner = llm._runner
    assert isinstance(runner, EngineWorker)
    return runner


def test_closing_ends_what_waits_for_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    never: Future[CompiledGrammar] = Future()
    llm = make_llm("llama")
    monkeypatch.setattr(llm._grammars, "ask", lambda _: PendingGrammar(never, None))
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(llm.generate, "A", SamplingParams(grammar=LETTERS))
        while not _worker(llm).setup.engine.has_work:
            gc.collect(0)
        llm.close()
        with pytest.raises(RequestCancelledError):
            run.result(PATIENCE)


def test_a_forgotten_llm_ends_its_thread() -> None:
    llm = make_llm("llama")
    assert llm.generate("A", SHORT, on_error="return")[0].error is None
    thread = _worker(llm)._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_another_proposer_on_the_same_weights() -> None:
    params = SamplingParams(max_tokens=12, grammar=LETTERS, complete=False)
    with make_llm("llama", "none", near_copy("llama"), num_draft_tokens=3) as plain:
        expected = plain.generate("A", params)[0]
        with plain.with_proposer("draft_model") as llm:
            assert llm.model is plain.model
            assert llm.config == plain.config
            found = llm.generate("A", params)[0]
    assert found.token_ids == expected.token_ids
    assert len(found.stats.drafted) == 3
