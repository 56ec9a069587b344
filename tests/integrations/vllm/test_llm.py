"""``LLM(engine="vllm")`` over a fake of vLLM's engine: its calls, errors, texts and statistics."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from guided_spec import LLM, GrammarSpec, SamplingParams
from guided_spec.engine.outputs import Chunk, Manner
from guided_spec.errors import (
    BudgetTooSmallError,
    ConfigError,
    GrammarCompileError,
    GrammarStateError,
    GuidedSpecError,
    ModelError,
    PromptTooLongError,
    RequestCancelledError,
    RequestError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.limits import GrammarLimits
from guided_spec.integrations.vllm import llm as integration
from guided_spec.integrations.vllm import plugin
from tests.integrations.vllm.fake import World, install

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
}
JSON = GrammarSpec.json_schema(SCHEMA)
JSON_PARAMS = SamplingParams(grammar=JSON)
ANSWER = '{"name": "Ada"}'


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> World:
    return install(monkeypatch, tmp_path)


@pytest.fixture
def llm(world: World) -> Iterator[LLM]:
    with LLM(engine="vllm", max_batch_size=4) as made:
        teach(made, world, "JSON: ", ANSWER, ends=True)
        teach(made, world, "one two", " three four five", ends=False)
        yield made
    assert world.engine.is_shut_down


def teach(llm: LLM, world: World, prompt: str, answer: str, *, ends: bool) -> None:
    token_ids = llm.tokenizer(answer, add_special_tokens=False)["input_ids"]
    ending = [llm.tokenizer.eos_token_id] if ends else []
    world.engine.answers[prompt] = [*token_ids, *ending]


def test_texts_and_their_ends(llm: LLM, world: World) -> None:
    params = [SamplingParams(grammar=JSON), SamplingParams(max_tokens=3, logprobs=1, echo=True)]
    guided, free = llm.generate(["JSON: ", "one two"], params)
    first = guided.completions[0]
    assert (guided.text, first.finish_reason, guided.is_complete) == (ANSWER, "stop", True)
    assert guided.parsed == {"name": "Ada"}
    assert first.stats.output_tokens == first.stats.steps == len(first.token_ids)
    assert first.stats.cached_tokens == 2
    assert free.completions[0].finish_reason == "length"
    assert free.text.startswith("one two three")
    assert free.logprobs is not None
    assert [one.token_id for one in free.logprobs] == free.completions[0].token_ids
    assert [one.logprob for one in free.logprobs[0].top] == [-0.5]
    by_length = sorted(world.engine.seen, key=lambda one: len(one[0]["prompt_token_ids"]))
    prompt, given = by_length[-1]
    assert prompt == {"prompt_token_ids": llm.encode("JSON: ")}
    assert given.detokenize is False
    assert "::=" in given.structured_outputs.grammar
    assert given.stop_token_ids == [llm.tokenizer.eos_token_id]
    assert given.output_kind.name == "FINAL_ONLY"


def test_streams_and_stop_strings(llm: LLM, world: World) -> None:
    chunks = list(llm.stream("JSON: ", SamplingParams(grammar=JSON)))
    assert "".join(chunk.text for chunk in chunks) == ANSWER
    assert len(chunks) > 2
    assert chunks[-1].parsed == {"name": "Ada"}
    teach(llm, world, "one two", " three four five six seven", ends=False)
    stopped = llm.generate("one two", SamplingParams(stop="fo", cache_salt="s", ignore_eos=True))
    assert (stopped[0].text, stopped[0].completions[0].finish_reason) == (" three ", "stop")
    assert world.engine.aborted == ["one two"]  # it does not write on for nobody
    prompt, given = world.engine.seen[-1]
    assert (prompt["cache_salt"], given.stop_token_ids, given.ignore_eos) == ("s", [], True)


def test_samples_have_seeds_of_their_own(llm: LLM, world: World) -> None:
    (output,) = llm.generate("one two", SamplingParams(n=2, seed=7, temperature=1.0))
    assert len(output.completions) == 2
    assert sorted(given.seed for _, given in world.engine.seen) == [7, 8]
    assert [one.stats.seed for one in output.completions] == [7, 8]
    (output,) = llm.generate("one two", SamplingParams(temperature=1.0))
    assert output.stats.seed == 0  # vLLM drew one and does not tell
    assert world.engine.seen[-1][1].seed is None


def test_asyncio_and_chat(llm: LLM, world: World) -> None:
    async def main() -> list[str]:
        texts = await llm.agenerate(["one two", "JSON: "], SamplingParams(max_tokens=8))
        return [output.text for output in texts]

    assert asyncio.run(main()) == [" three four five", ANSWER]
    messages = [{"role": "user", "content": "Ada?"}]
    prompt_ids = llm.prepare_chat(messages).prompt_ids
    world.engine.answers[llm.tokenizer.decode(prompt_ids)] = world.engine.answers["JSON: "]
    output = llm.chat(messages, response_format=JSON)
    assert (output.text, output.parsed) == (ANSWER, {"name": "Ada"})


def test_what_fails_before_vllm_sees_it(llm: LLM, world: World) -> None:
    unique = GrammarSpec.json_schema({"type": "array", "uniqueItems": True})
    with pytest.raises(UnsupportedSchemaError, match="uniqueItems"):
        llm.generate("JSON: ", SamplingParams(grammar=unique))
    with pytest.raises(PromptTooLongError):
        llm.generate([1] * 300)
    with pytest.raises(ConfigError, match="trace=True: under engine='vllm' steps are not"):
        llm.generate("one two", trace=True)
    with pytest.raises(ConfigError, match="params=.*vLLM refuses it: temperature"):
        llm.generate("one two", SamplingParams(temperature=3.0))
    with pytest.raises(ConfigError, match="choices are not scored"):
        llm.choose("one two", ["a", "b"])
    with pytest.raises(ConfigError, match="model='VllmModel': vLLM loads it itself"):
        llm.with_proposer("none")
    assert world.engine.seen == []
    refused, good = llm.generate(
        ["JSON: ", "JSON: "],
        [SamplingParams(grammar=unique), SamplingParams(grammar=JSON)],
        on_error="return",
    )
    assert isinstance(refused.completions[0].error, UnsupportedSchemaError)
    assert good.text == ANSWER


def test_a_budget_below_the_shortest_text_is_refused(llm: LLM, world: World) -> None:
    with pytest.raises(BudgetTooSmallError, match="max_tokens=2: .* takes [0-9]+ tokens") as caught:
        llm.generate("JSON: ", replace(JSON_PARAMS, max_tokens=2))
    assert caught.value.least is not None
    assert 2 < caught.value.least < 12
    assert world.engine.seen == []
    long = [1] * (llm.max_model_len - 2)
    with pytest.raises(
        BudgetTooSmallError, match="the context has room for 2 tokens: send a shorter"
    ):
        llm.generate(long, JSON_PARAMS)
    (cut,) = llm.generate("JSON: ", replace(JSON_PARAMS, max_tokens=2, complete=False))
    assert cut.completions[0].error is None


def test_a_text_that_leaves_its_grammar_fails(llm: LLM, world: World) -> None:
    teach(llm, world, "JSON: ", "no JSON", ends=True)
    (output,) = llm.generate("JSON: ", SamplingParams(grammar=JSON), on_error="return")
    assert isinstance(output.completions[0].error, GrammarStateError)
    teach(llm, world, "JSON: ", '{"name', ends=False)
    (output,) = llm.generate("JSON: ", SamplingParams(grammar=JSON))
    assert (output.completions[0].finish_reason, output.is_complete) == ("length", False)


@pytest.mark.slow
def test_large_grammars_are_tried_out_elsewhere(world: World) -> None:
    large = GrammarSpec.regex("([a-z]{3}){5,120}")
    with LLM(engine="vllm") as llm:
        teach(llm, world, "one two", "abc", ends=False)
        llm.compile([large])
        pipeline: Any = llm._grammars._backend
        assert len(pipeline._workers.pids) == 1
        (output,) = llm.generate("one two", SamplingParams(grammar=large))
        assert (output.text, output.is_complete) == ("abc", False)
    assert pipeline._workers._closed
    with LLM(engine="vllm", grammar_limits=GrammarLimits(repetitions=20)) as llm:
        teach(llm, world, "one two", "abc", ends=False)
        (output,) = llm.generate("one two", SamplingParams(grammar=large), on_error="return")
        assert isinstance(output.completions[0].error, GrammarCompileError)
        assert world.engine.seen == []


def test_what_vllm_ends(llm: LLM, world: World) -> None:
    world.engine.answers["fails"] = RuntimeError("out of order")
    world.engine.answers["nothing"] = []
    outputs = llm.generate(["fails", "one two", "nothing"], on_error="return")
    first, good, last = (output.completions[0] for output in outputs)
    assert isinstance(first.error, RequestError)
    assert "out of order" in str(first.error)
    assert good.text == " three four five"
    assert "without a word" in str(last.error)
    for reason, kind in (("abort", RequestCancelledError), ("error", RequestError)):
        world.engine.reason = reason
        (output,) = llm.generate("one two", on_error="return")
        assert type(output.completions[0].error) is kind
        assert output.text == " three four five"


def test_leaving_a_stream_aborts_it(llm: LLM, world: World) -> None:
    teach(llm, world, "one two", " three four five six seven", ends=False)
    world.engine.hang.add("one two")
    stream = llm.stream("one two")
    assert next(stream).text
    assert llm.load.running == 1
    stream.close()  # type: ignore[attr-defined]
    (output,) = llm.generate("JSON: ", SamplingParams(grammar=JSON))
    assert output.text == ANSWER
    assert world.engine.aborted == ["one two"]
    assert llm.load == (4, 0, 0, 64, 0)


def test_closing_ends_what_runs(world: World) -> None:
    llm = LLM(engine="vllm")
    teach(llm, world, "one two", " three four five six seven", ends=False)
    world.engine.hang.add("one two")
    stream = llm.stream("one two")
    next(stream)
    llm.close()
    llm.close()
    with pytest.raises(RequestCancelledError):
        list(stream)
    with pytest.raises(GuidedSpecError, match="closed"):
        llm.generate("one two")


def test_closing_in_the_thread_that_reports(world: World) -> None:
    llm = LLM(engine="vllm")
    teach(llm, world, "one two", " three four five", ends=False)
    runner: Any = llm._runner
    manner = Manner(is_streamed=True, is_traced=False)
    llm.submit(["one two"], SamplingParams(), lambda _: llm.close(), manner)
    runner._thread.join(60)
    assert not runner._thread.is_alive()
    assert world.engine.is_shut_down


def test_a_request_that_is_cancelled_before_it_begins_reports_that(llm: LLM) -> None:
    runner: Any = llm._runner
    gate, ended = threading.Event(), SimpleQueue[Chunk]()
    runner._loop.call_soon_threadsafe(gate.wait)
    manner = Manner(is_streamed=False, is_traced=False)
    (request,) = llm.submit(["one two"], SamplingParams(), ended.put, manner)
    assert request is not None
    request.cancel()
    gate.set()
    completion = ended.get(timeout=20).completion
    assert completion is not None
    assert isinstance(completion.error, RequestCancelledError)
    assert llm.load.running == 0


def test_a_known_grammar_is_not_waited_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    waited, wrap = list[object](), asyncio.wrap_future

    def wrap_future(future: Any) -> Any:
        waited.append(future)
        return wrap(future)

    llm.compile([JSON])
    monkeypatch.setattr(asyncio, "wrap_future", wrap_future)
    (output,) = llm.generate("JSON: ", JSON_PARAMS)
    assert (output.text, waited) == (ANSWER, [])


def test_a_request_that_ended_waits_for_no_garbage_collector(llm: LLM) -> None:
    ended, manner = threading.Event(), Manner(is_streamed=False, is_traced=False)
    gc.collect()
    gc.disable()
    try:
        (request,) = llm.submit(["JSON: "], JSON_PARAMS, lambda _: ended.set(), manner)
        assert request is not None
        left = weakref.ref(request)
        del request
        assert ended.wait(60)
        deadline = time.monotonic() + 10  # its task is about to end
        while left() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert left() is None
    finally:
        gc.enable()


def test_a_forgotten_llm_ends_its_thread(world: World) -> None:
    llm = LLM(engine="vllm")
    runner: Any = llm._runner
    del llm
    gc.collect()
    runner._thread.join(60)
    assert world.engine.is_shut_down


def test_drafts_are_counted_where_vllm_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    world = install(monkeypatch, tmp_path, integration.METRICS)
    with LLM(None, "eagle3", 2, draft="a/head", engine="vllm") as llm:
        teach(llm, world, "one two", " three four five six", ends=False)
        assert world.engine.args.per_request_spec_decode_metrics == "detailed"
        world.engine.metrics = SimpleNamespace(
            per_step_drafted=[2, 1, 2], per_step_accepted=[2, 0, 1]
        )
        (output,) = llm.generate("one two")
        assert output.stats.drafted == [3, 2]
        assert output.stats.accepted == [2, 1]
        assert output.stats.steps == output.stats.output_tokens - 3
        with pytest.raises(ConfigError, match="min_p=0.1: under engine='vllm' nothing is drafted"):
            llm.generate("one two", SamplingParams(temperature=1.0, min_p=0.1))
    with LLM(None, "eagle3", 2, draft="a/head", engine="vllm", engine_options={}) as llm:
        teach(llm, world, "one two", " three", ends=False)
        assert llm.generate("one two")[0].stats.drafted == []


def test_the_variable_is_set_for_vllms_processes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GUIDED_SPEC_VLLM", "guard")
    with LLM(None, "eagle3", draft="a/head", engine="vllm") as llm:
        assert world.engine.environment == "counts,drafts,endings,graphs,guard"
        assert world.engine.start_method == "spawn"
        assert (llm.engine, llm.proposer) == ("vllm", "eagle3")
        assert llm.model.engine is world.engine
        assert llm.default_params == SamplingParams.from_model(llm)
    assert llm.model.engine is None  # nothing shuts it down once more
    assert os.environ["GUIDED_SPEC_VLLM"] == "guard"
    assert "VLLM_WORKER_MULTIPROC_METHOD" not in os.environ
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    with LLM(None, "none", engine="vllm"):
        assert world.engine.start_method == "fork"


def test_starts_that_fail(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="engine='sglang': must be one of guided_spec, vllm"):
        LLM(engine="sglang")
    with pytest.raises(ConfigError, match="are for another engine"):
        LLM(engine_options={"seed": 1})
    world.fail = ValueError("no such dtype")
    with pytest.raises(ConfigError, match="vLLM refuses its arguments: no such dtype"):
        LLM(engine="vllm")
    world.fail = RuntimeError("no memory")
    with pytest.raises(ModelError, match="vLLM does not start: no memory"):
        LLM(engine="vllm")
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    with pytest.raises(ConfigError, match="keeps the plugin out"):
        LLM(engine="vllm")
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(plugin, "entry_points", lambda **_: [])
    with pytest.raises(ConfigError, match="does not find its plugin"):
        LLM(engine="vllm")
    monkeypatch.setattr(plugin, "installed_root", lambda: None)
    with pytest.raises(ConfigError, match="not installed: pip install"):
        LLM(engine="vllm")


def test_a_release_that_does_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patches = integration.PATCHES
    install(monkeypatch, tmp_path)
    monkeypatch.setattr(integration, "PATCHES", patches)
    with pytest.raises(ConfigError, match="does not fit: there is no sampling_params"):
        LLM(engine="vllm")
