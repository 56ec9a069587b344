"""What a caller gets: errors raised or returned, honest endings, values."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import pydantic
import pytest
import torch
from transformers import BatchEncoding

from guided_spec.core import DecodeBatch
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import warn_of_shortening
from guided_spec.errors import (
    ConfigError,
    GrammarCompileError,
    ModelError,
    PromptError,
    TextCutShortError,
    UnsupportedSchemaError,
)
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.engine.conftest import Spy
from tests.tiny_llm import make_llm

SHORT = SamplingParams(max_tokens=8)
REFUSED = SamplingParams(grammar={"not": {"multipleOf": 2}})


class Cat(pydantic.BaseModel):
    name: Literal["Ada", "Bob"]
    is_old: bool


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with make_llm("llama", "chain:grammar_forced+ngram") as llm:
        yield llm


BAD: list[tuple[Any, SamplingParams, type[Exception]]] = [
    ("A", REFUSED, UnsupportedSchemaError),
    ("A", SamplingParams(grammar=GrammarSpec.regex("(")), GrammarCompileError),
    ([5] * 192, SHORT, PromptError),
    (None, SHORT, PromptError),
    ("A", SamplingParams(stop_token_ids=[100_000]), ConfigError),
]


@pytest.mark.parametrize(("prompt", "params", "kind"), BAD)
def test_what_fails_before_its_first_token_is_raised(
    llm: LLM, prompt: Any, params: SamplingParams, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        llm.generate(prompt, params)
    with pytest.raises(kind):
        list(llm.stream([prompt], params))
    with pytest.raises(kind):
        asyncio.run(llm.agenerate([prompt], params))
    with pytest.raises(kind) as caught:
        llm.generate(["A", prompt], [SHORT, params])
    assert "prompt 1 of 2" in caught.value.__notes__[-1]
    outputs = llm.generate(["A", prompt], [SHORT, params], on_error="return")
    assert outputs[0].error is None
    assert isinstance(outputs[1].error, kind)
    last = list(llm.stream([prompt], params, on_error="return"))[-1]
    assert last.completion is not None
    assert isinstance(last.completion.error, kind)
    assert llm.generate("A", SHORT)[0].error is None  # nothing is left behind


def test_the_place_of_a_prompt_is_not_remembered_with_its_grammar(llm: LLM) -> None:
    broken = SamplingParams(grammar=GrammarSpec.regex("a place("))
    with pytest.raises(GrammarCompileError) as caught:
        llm.generate(["A", "A"], [SHORT, broken])
    assert "prompt 1 of 2" in caught.value.__notes__[-1]
    with pytest.raises(GrammarCompileError) as caught:
        llm.generate("A", broken)
    assert not getattr(caught.value, "__notes__", [])


def test_what_fails_later_is_raised_where_text_was_handed_out(spy: Spy) -> None:
    def fail(batch: DecodeBatch) -> None:
        if len(batch.contexts[0]) > batch.prompt_lengths[0] + 2:
            raise ZeroDivisionError

    spy.on_step = fail
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    with make_llm("llama", "spy") as llm:
        with pytest.raises(ModelError):
            list(llm.stream("A", params))
        output = llm.generate("A", params)[0]
    assert isinstance(output.error, ModelError)
    assert output.token_ids


def test_another_word_for_on_error(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="on_error='ignore': must be one of raise, return"):
        llm.generate("A", on_error="ignore")  # type: ignore[arg-type]


def test_prompts_of_every_kind(llm: LLM) -> None:
    tokenizer: Any = llm.tokenizer
    texts = ["The cat", "A dog is"]
    ids = [llm.encode(text) for text in texts]
    expected = [output.text for output in llm.generate(texts, SHORT)]
    width = max(map(len, ids))
    padded = {
        "input_ids": [[0] * (width - len(row)) + row for row in ids],
        "attention_mask": [[0] * (width - len(row)) + [1] * len(row) for row in ids],
    }
    tensors = {name: torch.tensor(value) for name, value in padded.items()}
    kinds: list[Any] = [
        (text for text in texts),
        iter(texts),
        np.array(texts),
        np.array(texts, dtype=object),
        ids,
        BatchEncoding(padded),
        BatchEncoding(tensors),
        [BatchEncoding({"input_ids": row}) for row in ids],
        tokenizer(texts),
    ]
    for prompts in kinds:
        assert [output.text for output in llm.generate(prompts, SHORT)] == expected
    same = torch.tensor([ids[0], ids[0]])
    for rows in (same, same.numpy()):
        assert [output.text for output in llm.generate(rows, SHORT)] == [expected[0]] * 2
    assert llm.generate(BatchEncoding({"input_ids": ids[1]}), SHORT)[0].text == expected[1]


def test_a_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = llm.generate(["A", "B", "C"], SHORT, progress=True)
    assert len(outputs) == 3
    assert "3/3" in capsys.readouterr().err
    llm.generate(["A"], SHORT)
    assert capsys.readouterr().err == ""


def test_a_text_that_was_steered_to_its_end_ended_by_its_length(llm: LLM) -> None:
    words = GrammarSpec.regex("([a-z]{1,3} )*[a-z]+[.]")
    steered = llm.generate("A", SamplingParams(max_tokens=9, grammar=words))[0]
    assert steered.stats.steered
    assert (steered.finish_reason, steered.is_complete) == ("length", True)
    assert steered.was_shortened
    cut = SamplingParams(max_tokens=9, grammar=GrammarSpec.regex("[a-z ]{40}"), complete=False)
    output = llm.generate("A", cut)[0]
    assert (output.finish_reason, output.is_complete) == ("length", False)
    short = llm.generate("A", SamplingParams(max_tokens=50, grammar=GrammarSpec.regex("[ab]")))[0]
    assert (short.finish_reason, short.is_complete) == ("stop", True)
    assert not short.was_shortened
    whole = SamplingParams(max_tokens=4, grammar=GrammarSpec.regex("[a-z]+"), complete=False)
    output = llm.generate("A", whole)[0]  # it could have gone on
    assert (output.finish_reason, output.is_complete) == ("length", True)


def test_a_number_that_was_cut_short_says_so(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Such a text is whole, and its value is wrong: the log says it once, each output always."""
    number = GrammarSpec.json_schema({"type": "string", "pattern": "^[0-9]{3,}$"})
    warn_of_shortening.cache_clear()
    with caplog.at_level("WARNING"):
        outputs = [
            llm.generate("A", SamplingParams(max_tokens=most, grammar=number))[0]
            for most in (7, 8, 9)
        ]
    assert all(one.is_complete and one.was_shortened for one in outputs)
    assert [len(one.text) for one in outputs] == sorted({len(one.text) for one in outputs})
    said = [one.message for one in caplog.records if "was_shortened" in one.message]
    assert len(said) == 1


def test_free_texts_are_complete_where_the_model_ends_them(llm: LLM) -> None:
    eos = llm.vocabulary.stop_token_ids[0]
    ended = llm.generate("A", SamplingParams(max_tokens=4, logit_bias={eos: 100.0}))[0]
    assert (ended.finish_reason, ended.is_complete) == ("stop", True)
    cut = llm.generate("A", SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert (cut.finish_reason, cut.is_complete, cut.parsed) == ("length", False, None)


def test_a_stop_string_leaves_no_whole_text(llm: LLM) -> None:
    spec = GrammarSpec.regex("[a-c]{6}")
    output = llm.generate("A", SamplingParams(max_tokens=20, grammar=spec, stop=["a", "b", "c"]))[0]
    assert (output.text, output.finish_reason, output.is_complete) == ("", "stop", False)


@pytest.mark.parametrize("tables", ["off", "always"])
@pytest.mark.parametrize("proposer", ["none", "grammar_forced"])
def test_what_stands_behind_a_stop_token_does_not_count(proposer: str, tables: str) -> None:
    """A step may accept a whole text of the grammar, of which the stop token leaves the half."""
    spec = GrammarSpec.regex("abcdefgh")
    with make_llm("llama", proposer, grammar_tables=tables) as llm:
        for stop in ({"stop": "d"}, {"stop_token_ids": llm.encode("d")}):
            params = SamplingParams(max_tokens=20, grammar=spec, **stop)
            completion = llm.generate("A", params)[0].completions[0]
            assert (completion.text, completion.finish_reason) == ("abc", "stop")
            assert not completion.is_complete
            assert completion.stats.tabled == (
                len(completion.token_ids) if tables == "always" else 0
            )


@pytest.mark.parametrize("echo", [False, True])
def test_values(llm: LLM, echo: bool) -> None:  # noqa: FBT001
    params = SamplingParams(max_tokens=60, grammar=Cat, echo=echo)
    output = llm.generate("The cat", params)[0]
    assert isinstance(output.parsed, Cat)
    assert output.completions[0].answer == output.text.removeprefix("The cat" if echo else "")
    plain = SamplingParams(max_tokens=60, grammar=Cat.model_json_schema(), echo=echo)
    value = llm.generate("The cat", plain)[0].parsed
    assert value == output.parsed.model_dump()
    assert (
        llm.generate("A", SamplingParams(max_tokens=9, grammar=GrammarSpec.regex("1")))[0].parsed
        is None
    )


def test_the_value_behind_a_marker(llm: LLM) -> None:
    """A special token that shows nothing in the text, and one that does."""
    for marker in ("<think>", "ab"):
        spec = GrammarSpec.of(Cat).after(marker, reasoning_budget=5)
        output = llm.generate("A", SamplingParams(max_tokens=80, grammar=spec))[0]
        assert isinstance(output.parsed, Cat)
        assert output.text.endswith(output.completions[0].answer)
        cut = llm.generate("A", SamplingParams(max_tokens=3, grammar=spec, complete=False))[0]
        assert (cut.completions[0].answer, cut.parsed) == ("", None)


def test_values_while_they_are_written(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, grammar=Cat)
    seen = [chunk.parsed for chunk in llm.stream("The cat", params)]
    assert isinstance(seen[-1], Cat)
    partial = [value for value in seen[:-1] if value is not None]
    assert partial
    whole = json.loads(seen[-1].model_dump_json())
    for value in partial:
        assert all(str(whole[key]).startswith(str(part)) for key, part in value.items())


def test_what_happens_is_logged(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "guided_spec"):
        llm.generate("A", SamplingParams(max_tokens=9, grammar=GrammarSpec.regex("[pq]{2}")))
        llm.generate("A", SamplingParams(grammar=GrammarSpec.regex("(q")), on_error="return")
    said = "\n".join(caplog.messages)
    assert "compiled a regex in" in said
    assert "refused" in said


NUMBER = GrammarSpec.json_schema({"type": "string", "pattern": "^[0-9]{3,}$"})
SHORTENED = {"max_tokens": 8, "grammar": NUMBER}


@pytest.mark.every_case
@pytest.mark.parametrize(
    "fields",
    [
        SHORTENED,
        {"max_tokens": 9, "grammar": GrammarSpec.regex("[a-z ]{40}"), "complete": False},
        {"max_tokens": 9, "grammar": GrammarSpec.regex("[a-z ]+"), "complete": False},
    ],
    ids=["steered", "cut off", "cut off where it might end"],
)
def test_a_text_that_was_cut_short_may_be_refused(llm: LLM, fields: dict[str, Any]) -> None:
    shown = SamplingParams(**fields)
    refused = SamplingParams(**fields, on_short="error")
    reason = f'^max_tokens={shown.max_tokens}: the text was ended early.*or pass on_short="return"'
    for call in (llm.generate, lambda *given: list(llm.stream(*given))):
        with pytest.raises(TextCutShortError, match=reason):
            call("A", refused)
    with pytest.raises(TextCutShortError, match=reason):
        list(llm.map(["A"], refused))
    (output,) = llm.generate("A", refused, on_error="return")
    assert isinstance(output.error, TextCutShortError)
    assert (output.finish_reason, output.is_complete, output.parsed) == ("error", False, None)
    # It is the same text: only what becomes of it differs.
    assert output.token_ids == llm.generate("A", shown)[0].token_ids
    assert output.was_shortened is (fields is SHORTENED)


def test_sampled_texts_do_not_depend_on_what_becomes_of_them(llm: LLM) -> None:
    fields: dict[str, Any] = {**SHORTENED, "temperature": 1.0, "seed": 3}
    shown, refused = (
        llm.generate("A", SamplingParams(**fields, on_short=word), on_error="return")[0]
        for word in ("return", "error")
    )
    assert shown.token_ids == refused.token_ids


def test_free_text_is_never_refused(llm: LLM) -> None:
    """Nothing shortens it."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, on_short="error")
    calls: Any = (llm.generate, lambda *given: [c.completion for c in llm.stream(*given)][-1:])
    for call in (*calls, llm.map):
        (output,) = call(["A"], params)
        assert (output.finish_reason, output.was_shortened) == ("length", False)
    tag = {"type": "structural_tag", "format": {"type": "any_text"}}
    spec = GrammarSpec.structural_tag(tag)  # as that of tools, of which none is called
    params = SamplingParams(max_tokens=4, grammar=spec, on_short="error")
    (output,) = llm.generate("A", params, on_error="return")
    assert (output.error is not None) == output.was_shortened


def test_a_whole_text_is_never_refused(llm: LLM) -> None:
    short = GrammarSpec.regex("[ab]{3}")
    for most in range(4, 8):
        params = SamplingParams(max_tokens=most, grammar=short, on_short="error")
        (output,) = llm.generate("A", params)
        assert (output.finish_reason, output.is_complete) == ("stop", True)


def test_the_context_may_be_what_is_short(llm: LLM) -> None:
    prompt = "The name of the cat is Ada. " * 9
    room = llm.max_model_len - len(llm.encode(prompt))
    assert 0 < room < 150
    spec = GrammarSpec.regex("[a-z ]{500}")
    params = SamplingParams(max_tokens=500, grammar=spec, complete=False, on_short="error")
    with pytest.raises(TextCutShortError, match=f"the context has room for {room} tokens: send a"):
        llm.generate(prompt, params)


def test_other_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="^on_short='raise': must be one of error, return"):
        SamplingParams(on_short="raise")  # type: ignore[arg-type]
