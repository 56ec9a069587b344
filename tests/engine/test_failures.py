"""What fails, fails alone and says why; the engine goes on."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from guided_spec.core import DecodeBatch
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import RequestOutput
from guided_spec.engine.request import OutputText
from guided_spec.errors import (
    ConfigError,
    GrammarCompileError,
    GrammarError,
    GuidedSpecError,
    ModelError,
    PromptError,
    PromptTooLongError,
    RequestCancelledError,
    UnknownProposerError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
    VocabularyMismatchError,
)
from guided_spec.grammar.pipeline import PendingGrammar
from guided_spec.grammar.protocol import CompiledGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.proposers import require_proposer
from guided_spec.types import SamplingParams
from tests.engine.conftest import PATIENCE, Spy
from tests.models.tiny import build
from tests.tiny_llm import STORIES, VOCAB_SIZE, make_llm, tiny_model

GOOD = SamplingParams(max_tokens=16, grammar=GrammarSpec.regex("[a-f]{3}"))
BROKEN_GRAMMARS: list[tuple[GrammarSpec, type[GrammarError]]] = [
    (GrammarSpec.json_schema({"type": 5}), GrammarCompileError),
    (GrammarSpec.json_schema("{not json"), GrammarCompileError),
    (GrammarSpec.json_schema({"not": {"multipleOf": 2}}), UnsupportedSchemaError),
    (GrammarSpec.json_schema("false"), UnsatisfiableGrammarError),
    (GrammarSpec.regex("(ab"), GrammarCompileError),
    (GrammarSpec.regex(r"(a)\1"), GrammarCompileError),
    (GrammarSpec.ebnf("root ::= undefined_rule"), GrammarCompileError),
    (GrammarSpec.lark("start: undefined_rule"), GrammarCompileError),
]
BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "it has no tokens"),
    ([], "it has no tokens"),
    ([5] * 192, "only 191 fit"),
    ("word " * 200, "raise max_model_len"),
    (None, "of type NoneType: pass a str"),
    (7, "of type int: pass a str"),
    (b"x", "of type bytes: pass a str"),
    (bytearray(b"x"), "of type bytearray: pass a str"),
    ({"role": "user", "content": "x"}, "of type dict: pass a str"),
    ("A\ud800", r"'\\ud800' at character 1"),
    (np.array([[1, 2]]), "of type ndarray: pass a str"),
    (torch.tensor([1.5]), r"holds 1\.5 of type float at 0"),
    ([1, 2.5], r"holds 2\.5 of type float at 1"),
    ([1, None], "holds None of type NoneType at 1"),
    ([1, "a"], "holds 'a' of type str at 1"),
    ([[1]], r"holds \[1\] of type list at 0"),
    ([True], "holds True"),
    ([1, VOCAB_SIZE], f"holds token {VOCAB_SIZE} at 1: ids go from 0 to {VOCAB_SIZE - 1}"),
    ([-1], "holds token -1"),
    ([{"role": "user", "content": "x"}], "no chat template"),
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm("llama", "chain:grammar_forced+ngram") as llm:
        yield llm


def assert_only_the_middle_failed(outputs: list[RequestOutput], kind: type[Exception]) -> None:
    assert [output.finish_reason for output in outputs] == ["stop", "error", "stop"]
    assert type(outputs[1].error) is kind
    assert outputs[1].text == ""
    assert outputs[1].token_ids == []
    assert outputs[0].token_ids == outputs[2].token_ids
    assert len(outputs[0].text) == 3


@pytest.mark.parametrize(("grammar", "kind"), BROKEN_GRAMMARS)
def test_a_broken_grammar(llm: LLM, grammar: GrammarSpec, kind: type[GrammarError]) -> None:
    outputs = llm.generate(
        ["A"] * 3, [GOOD, SamplingParams(grammar=grammar), GOOD], on_error="return"
    )
    assert_only_the_middle_failed(outputs, kind)
    assert str(outputs[1].error)
    again = llm.generate("A", SamplingParams(grammar=grammar), on_error="return")[
        0
    ]  # remembered, and raised anew
    assert str(again.error) == str(outputs[1].error)


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS)
def test_a_bad_prompt(llm: LLM, prompt: Any, message: str) -> None:
    outputs = llm.generate(["A", prompt, "A"], GOOD, on_error="return")
    is_long = message in {"only 191 fit", "raise max_model_len"}
    assert_only_the_middle_failed(outputs, PromptTooLongError if is_long else PromptError)
    with pytest.raises(PromptError, match=message):
        raise outputs[1].error or AssertionError


@pytest.mark.parametrize("prompt", [b"x", "A\udfff", {"role": "user"}, np.array(1)])
def test_a_bad_prompt_alone(llm: LLM, prompt: Any) -> None:
    for prompts in (prompt, [prompt]):
        (output,) = llm.generate(prompts, GOOD, on_error="return")
        assert type(output.error) is PromptError
        ends = [chunk.completion for chunk in llm.stream(prompts, GOOD, on_error="return")]
        assert [str(end and end.error) for end in ends] == [str(output.error)]


def test_a_bad_word_that_no_tokenizer_reads(llm: LLM) -> None:
    outputs = llm.generate(
        ["A"] * 3, [GOOD, SamplingParams(bad_words="\ud800"), GOOD], on_error="return"
    )
    assert_only_the_middle_failed(outputs, ConfigError)


def test_a_stop_token_outside_the_vocabulary(llm: LLM) -> None:
    bad = SamplingParams(stop_token_ids=[VOCAB_SIZE])
    outputs = llm.generate(["A"] * 3, [GOOD, bad, GOOD], on_error="return")
    assert_only_the_middle_failed(outputs, ConfigError)


def test_every_sample_of_a_failed_prompt_is_reported(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, grammar=GrammarSpec.regex("("))
    for prompt in ("A", ""):
        output = llm.generate([prompt], params, on_error="return")[0]
        assert [c.finish_reason for c in output.completions] == ["error"] * 3


class Held:
    """Stands in for the compile queue: one grammar that is not done until it is told."""

    def __init__(self, llm: LLM, held: GrammarSpec, monkeypatch: pytest.MonkeyPatch) -> None:
        self.future: Future[CompiledGrammar] = Future()
        self._ask, self._submit = llm._grammars.ask, llm._grammars.submit
        self._held = held
        monkeypatch.setattr(llm._grammars, "ask", self.ask)

    def ask(self, spec: GrammarSpec) -> PendingGrammar:
        return PendingGrammar(self.future, None) if spec == self._held else self._ask(spec)

    def finish(self) -> None:
        self.future.set_result(self._submit(self._held).result(PATIENCE))


def test_a_slow_grammar_holds_up_its_own_request_only(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = GrammarSpec.regex("[x-z]{2}")
    held = Held(llm, slow, monkeypatch)
    order = []
    stream = llm.stream(["A"] * 7, [SamplingParams(grammar=slow), *[GOOD] * 6], on_error="return")
    for chunk in stream:
        if chunk.completion is not None:
            order.append(chunk.prompt_index)
            assert chunk.completion.error is None
            if len(order) == 6:
                held.finish()
    assert sorted(order[:6]) == [1, 2, 3, 4, 5, 6]
    assert order[6] == 0


def test_a_backend_may_raise_anything(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = GrammarSpec.regex("[x-z]{3}")
    held = Held(llm, odd, monkeypatch)
    held.future.set_exception(ZeroDivisionError("in native code"))
    outputs = llm.generate(["A"] * 3, [GOOD, SamplingParams(grammar=odd), GOOD], on_error="return")
    assert_only_the_middle_failed(outputs, GrammarError)
    assert "in native code" in str(outputs[1].error)


def test_a_proposer_that_raises_fails_the_text_that_it_raises_for(spy: Spy) -> None:
    params, prompts = SamplingParams(max_tokens=3), ["A", "B", "A", "A"]

    def fail(batch: DecodeBatch) -> None:
        if any(
            len(context) == len(bad) + 1 and context[: len(bad)] == bad
            for context in batch.contexts
        ):
            raise ZeroDivisionError("no draft")

    with make_llm("llama", "spy", max_batch_size=2) as llm:
        bad = llm.encode("B")
        (good,) = llm.generate("A", params)
        spy.on_step = fail
        outputs = llm.generate(prompts, params, on_error="return")
        failed = outputs.pop(1)
        assert [output.token_ids for output in outputs] == [good.token_ids] * 3
        assert isinstance(failed.error, ModelError)
        assert "ZeroDivisionError: no draft" in str(failed.error)
        assert isinstance(failed.error.__cause__, ZeroDivisionError)
        assert len(failed.token_ids) == 1  # what was committed before is kept


def test_a_completion_that_cannot_be_made_fails_its_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody waits for it forever."""

    def broken(_: object) -> None:
        raise ValueError("of ours")

    with make_llm("llama") as llm:
        monkeypatch.setattr(OutputText, "finish", broken)
        found = llm.generate(["A", "B"], SamplingParams(max_tokens=3), on_error="return")
        monkeypatch.undo()
        assert llm.generate("A", SamplingParams(max_tokens=3))[0].error is None
    for output in found:
        assert isinstance(output.error, ModelError)
        assert "its completion cannot be made: ValueError('of ours')" in str(output.error)
    assert "the completion of a request cannot be made" in caplog.text


def test_close_ends_what_runs(spy: Spy) -> None:
    spy.permits = threading.Semaphore(2)
    llm = make_llm("llama", "spy", max_batch_size=1)
    outputs: list[RequestOutput] = []
    params = SamplingParams(max_tokens=100)
    user = threading.Thread(
        target=lambda: outputs.extend(llm.generate(["A", "B"], params, on_error="return"))
    )
    user.start()
    while len(spy.steps) < 3:
        user.join(0.01)
    closer = threading.Thread(target=llm.close)
    closer.start()
    closer.join(0.05)
    spy.open()
    closer.join(PATIENCE)
    user.join(PATIENCE)
    assert [type(output.error) for output in outputs] == [RequestCancelledError] * 2
    assert len(outputs[0].token_ids) < 100


def test_after_close() -> None:
    with make_llm("llama") as llm:
        pass
    llm.close()  # once more is fine
    for params in (SamplingParams(max_tokens=2), GOOD):
        with pytest.raises(GuidedSpecError, match="closed"):
            llm.generate("A", params)


def test_a_closed_llm_keeps_no_engine() -> None:
    """Nor its memory, however long somebody holds the LLM."""
    with make_llm("llama", "ngram", max_batch_size=2) as llm:
        setup: Any = llm._runner.setup
        engine, memory = weakref.ref(setup.engine), weakref.ref(setup.engine.model)
        llm.generate("A", SamplingParams(max_tokens=2))
    gc.collect()
    assert (engine(), memory()) == (None, None)
    assert (llm.load.num_slots, llm.load.running, llm.load.waiting) == (2, 0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 3}, r"batch=3: is no option; did you mean max_batch_size\? the names are"),
        ({"num_draft_tokens": 65}, "num_draft_tokens=65: must be between 0 and 64"),
        ({"max_forced_tokens": -1}, "max_forced_tokens=-1"),
        ({"max_model_len": 1}, "max_model_len=1: must be at least 2"),
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"max_batch_size": 2**63}, f"max_batch_size={2**63}: must be between 1 and 65536"),
        ({"compile_threads": 10**30}, "compile_threads=1.*: must be between 1 and 1024"),
        ({"prefill_tokens": 1.5}, "prefill_tokens=1.5: must be an int"),
        ({"max_batch_size": None}, "max_batch_size=None: must be an int"),
        ({"prefix_cache": "off"}, "prefix_cache='off': must be True or False"),
        ({"trust_remote_code": "no"}, "trust_remote_code='no': must be True or False"),
        ({"engine_options": "seed=1"}, "engine_options='seed=1': must be a dict"),
        ({"proposer": "draft_model"}, "draft=None: draft_model drafts with a model"),
        ({"proposer": "chain:ngram"}, "name at least two proposers"),
        ({"proposer": "chain:ngram+chain"}, "name at least two proposers"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm("llama", options.pop("proposer", "none"), **options)


@pytest.mark.parametrize("proposer", [3, "eagle9", "chain:ngram+eagle9"])
def test_a_proposer_is_looked_up_before_the_model_is_loaded(proposer: Any) -> None:
    with pytest.raises(ConfigError, match="proposer="):
        LLM("./nowhere", proposer)


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "allowed_token_ids"])
def test_a_list_that_is_none(name: str) -> None:
    given: dict[str, Any] = {name: 3}
    with pytest.raises(ConfigError, match=f"{name}=3: must be a (list|str, or a list)"):
        SamplingParams(**given)


def test_top_k_of_another_engine_s_clients() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams()
    with pytest.raises(ConfigError, match="top_k=-2: must be at least -1"):
        SamplingParams(top_k=-2)


@pytest.mark.parametrize("name", ["ignore_eos", "echo", "complete"])
def test_a_switch_is_a_bool(name: str) -> None:
    given: dict[str, Any] = {name: "no"}
    with pytest.raises(ConfigError, match=f"{name}='no': must be True"):
        SamplingParams(**given)


@pytest.mark.parametrize("grammars", [GOOD.grammar, {"type": "string"}, int])
def test_grammars_are_compiled_as_a_list(llm: LLM, grammars: Any) -> None:
    with pytest.raises(ConfigError, match=r"^grammars=.*: must be a list"):
        llm.compile(grammars)
    llm.compile([grammars])


@pytest.mark.parametrize("model", [3, {"model": "llama"}, [1]])
def test_a_model_that_is_none(model: Any) -> None:
    with pytest.raises(ConfigError, match="^model=.*must be a hub id, a folder, or a loaded model"):
        LLM(model)
    with pytest.raises(ConfigError, match="^draft=.*must be a hub id, a folder, or a loaded model"):
        LLM(tiny_model("llama"), draft=model)


@pytest.mark.parametrize("name", ["medusa", "chain:ngram+medusa", "NGRAM", ""])
def test_an_unknown_proposer(name: str) -> None:
    if not name:
        with make_llm("llama", name) as llm:  # none named: the default
            assert llm.proposer == "chain:grammar_forced+ngram"
        return
    with pytest.raises(UnknownProposerError, match="must be one of auto, chain, "):
        make_llm("llama", name)


@pytest.mark.parametrize("name", ["ngram:foo", "none:mask", "chain:grammar_forced+suffix:mask"])
def test_a_proposer_that_takes_nothing_behind_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match="takes nothing after the colon: pass"):
        make_llm("llama", name)
    with pytest.raises(ConfigError, match="takes nothing after the colon: pass"):
        require_proposer(name)


def test_forced_text_has_one_place_to_name() -> None:
    with pytest.raises(
        ConfigError, match="'grammar_forced:end': .* nothing after the colon, or 'start'"
    ):
        make_llm("llama", "chain:grammar_forced:end+ngram")


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, "7"])
def test_a_seed_out_of_range(seed: Any) -> None:
    with pytest.raises(ConfigError, match="^seed="):
        SamplingParams(seed=seed)


def test_a_draft_of_another_vocabulary() -> None:
    with pytest.raises(VocabularyMismatchError, match="its tokenizer differs from the target's"):
        make_llm("llama", "draft_model", str(STORIES / "draft"))
    with pytest.raises(VocabularyMismatchError, match="it knows 64 tokens, the target 380"):
        make_llm("llama", "draft_model", build("llama", vocab_size=64))


def test_a_model_folder_without_a_tokenizer(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="tokenizer="):
        LLM(str(tmp_path), "none")
    for folder in (tmp_path / "absent", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(ModelError, match="no (such folder|config.json)"):
            LLM(str(folder), "none")


@pytest.mark.parametrize("as_path", [False, True])
def test_a_model_folder_and_a_tokenizer(tmp_path: Path, *, as_path: bool) -> None:
    """``make_llm`` gives the tokenizer; a folder may be a str or a Path."""
    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    with make_llm("llama") as llm:
        expected = llm.generate("A", GOOD)[0].text
    with make_llm(folder if as_path else str(folder), tokenizer=llm.tokenizer) as llm:
        assert llm.generate("A", GOOD)[0].text == expected
