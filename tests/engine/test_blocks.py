"""Requests whose drafts are really accepted: what ends, cuts or shares them acts inside blocks."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from guided_spec.core import DecodeBatch
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion, RequestOutput
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.step import Step, speculative_step
from guided_spec.types import SamplingParams
from tests.engine.conftest import PATIENCE
from tests.tiny_llm import make_llm, near_copy, tiny_model, tiny_tokenizer

PROPOSERS = ("draft_model", "chain:grammar_forced+draft_model")
CHARACTERS = GrammarSpec.regex("[你好é🎉]{12}")
PROMPT = "The name"


@pytest.fixture(scope="module", params=PROPOSERS)
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    """Drafts that are often right, but not always; the seed decides the text, not the drafts."""
    with make_llm("llama", request.param, near_copy("llama"), verifier="coupled") as llm:
        yield llm


@cache
def plain(params: SamplingParams) -> RequestOutput:
    with make_llm("llama", "none", verifier="coupled") as llm:
        return llm.generate(PROMPT, params)[0]


def same(found: Completion, expected: Completion) -> bool:
    """The tokens, the text and its end; and speculation saved forwards."""
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    assert found.finish_reason == expected.finish_reason
    return found.stats.steps < expected.stats.steps


FREE = SamplingParams(max_tokens=24)


def stops() -> list[SamplingParams]:
    """Two to four characters from all over the free text, most of them across tokens."""
    text = plain(FREE).text
    places = range(0, len(text) - 4, 3)
    return [SamplingParams(max_tokens=24, stop=text[at : at + 2 + at % 3]) for at in places]


def test_stop_strings_wherever_a_block_holds_them(llm: LLM) -> None:
    cases = stops()
    outputs = llm.generate([PROMPT] * len(cases), cases)
    saved = [
        same(output.completions[0], plain(params).completions[0])
        for output, params in zip(outputs, cases, strict=True)
    ]
    assert sum(saved) > len(cases) / 2
    assert {output.finish_reason for output in outputs} == {"stop"}
    ends = [len(output.token_ids) for output in outputs]
    assert len(set(ends)) > 5


def test_stop_tokens_wherever_a_block_holds_them(llm: LLM) -> None:
    tokens = plain(FREE).token_ids
    cases = [SamplingParams(max_tokens=24, stop_token_ids=(token,)) for token in tokens]
    outputs = llm.generate([PROMPT] * len(cases), cases)
    for output, token in zip(outputs, tokens, strict=True):
        assert output.token_ids == tokens[: tokens.index(token) + 1]
        assert output.finish_reason == "stop"
    assert sum(output.stats.steps for output in outputs) < sum(
        map(len, [o.token_ids for o in outputs])
    )


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "sampled"])
def test_max_tokens_wherever_a_block_ends(llm: LLM, params: dict[str, Any]) -> None:
    whole = plain(SamplingParams(max_tokens=16, **params)).token_ids
    cases = [SamplingParams(max_tokens=length, **params) for length in range(1, 17)]
    outputs = llm.generate([PROMPT] * len(cases), cases)
    assert [output.token_ids for output in outputs] == [whole[:n] for n in range(1, 17)]
    assert {output.finish_reason for output in outputs} == {"length"}
    assert outputs[-1].stats.steps < 16


@pytest.mark.parametrize("place", [1, 5, 6, 9])
def test_the_end_of_text_inside_a_block(place: int) -> None:
    """Some token is the model's end of text; the draft goes on behind it."""
    tokens = plain(FREE).token_ids
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.eos_token_id = tokens[place]
    ending = SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, ignore_eos=True)
    with make_llm(model, "draft_model", tiny_model("llama")) as llm:
        ended, ignored = llm.generate([PROMPT] * 2, list(ending))
        assert ended.text == llm.vocabulary.decode(tokens[: tokens.index(tokens[place])])
    assert ended.token_ids == tokens[: tokens.index(tokens[place]) + 1]
    assert ended.finish_reason == "stop"
    assert ignored.token_ids == tokens
    assert ignored.finish_reason == "length"
    assert ignored.stats.acceptance_length > 3


@pytest.mark.slow
@pytest.mark.parametrize("stop", [(), ("好",), ("éé", "你好")])
def test_streams_hold_committed_text_only(llm: LLM, stop: tuple[str, ...]) -> None:
    """Drafts are refused now and then: what is streamed is a prefix of plain decoding's text."""
    accepted = refused = 0
    for seed in range(4):
        params = SamplingParams(grammar=CHARACTERS, stop=stop, temperature=1.0, seed=seed)
        expected, text = plain(params), ""
        for chunk in llm.stream(PROMPT, params):
            text += chunk.text
            assert expected.text.startswith(text)
            assert "\ufffd" not in chunk.text
        assert text == expected.text
        assert chunk.completion is not None
        stats = chunk.completion.stats
        accepted += sum(stats.accepted)
        refused += sum(stats.drafted) - sum(stats.accepted)
    assert accepted > 0
    assert refused > 0


def test_samples_share_a_prompt(llm: LLM) -> None:
    params = SamplingParams(n=7, temperature=1.0, seed=11, max_tokens=20)  # more than slots
    found, expected = llm.generate(PROMPT, params)[0], plain(params)
    saved = [same(a, b) for a, b in zip(found.completions, expected.completions, strict=True)]
    assert len(saved) == 7
    assert sum(saved) > 3


@pytest.mark.slow
def test_cancelled_in_the_middle_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is finished, what it gave the cancelled request goes nowhere; its slot is free."""
    entered, resume = threading.Event(), threading.Event()

    def held(target: Any, proposer: Any, batch: DecodeBatch, **carry: Any) -> Step:
        step = speculative_step(target, proposer, batch, **carry)
        if len(batch) == 2 and int(step.accepted.num_accepted.min()) > 0:
            entered.set()
            assert resume.wait(PATIENCE)
        return step

    monkeypatch.setattr("guided_spec.engine.steps.step_runner.speculative_step", held)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    outputs: list[RequestOutput] = []
    stream = llm.stream(PROMPT, params)
    pieces = [next(stream).text]
    other = threading.Thread(target=lambda: outputs.extend(llm.generate(PROMPT, params)))
    other.start()
    assert entered.wait(PATIENCE)
    stream.close()  # type: ignore[attr-defined]  # a generator
    resume.set()
    other.join(PATIENCE)
    expected = plain(params)
    assert outputs[0].token_ids == expected.token_ids
    assert expected.text.startswith(pieces[0])
    cases = [FREE] * 6  # every slot is used, the freed one too
    assert {o.text for o in llm.generate([PROMPT] * 6, cases)} == {plain(FREE).text}


# --- echo ----------------------------------------------------------------------------------------

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}answer: "
CHAT = [{"role": "user", "content": "a cat"}]
IDS = tiny_tokenizer()("Café 你")["input_ids"]


@pytest.fixture(scope="module")
def echoing() -> Iterator[LLM]:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    with make_llm("llama", PROPOSERS[1], near_copy("llama"), tokenizer=tokenizer) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt", "text"),
    [("The name", "The name"), (IDS, "Café 你"), (CHAT, "<user>a cat\nanswer: ")],
    ids=["text", "ids", "chat"],
)
def test_echo(echoing: LLM, prompt: Any, text: str) -> None:
    quiet, echo = SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, echo=True)
    without, found = echoing.generate([prompt, prompt], [quiet, echo])
    assert found.text == text + without.text
    assert found.token_ids == without.token_ids
    chunks = list(echoing.stream([prompt], echo))
    assert chunks[0].text.startswith(text)
    assert "".join(chunk.text for chunk in chunks) == found.text
    assert without.stats.output_tokens == found.stats.output_tokens == 12


def test_stop_strings_are_not_searched_in_an_echo(echoing: LLM) -> None:
    """Nor across its end."""
    free = echoing.generate("The name", FREE)[0]
    across = "me" + free.text[:1]
    params = SamplingParams(max_tokens=24, echo=True, stop=["The", across])
    output = echoing.generate("The name", params)[0]
    expected = echoing.generate("The name", SamplingParams(max_tokens=24, stop=["The", across]))[0]
    assert output.text == "The name" + expected.text
    assert output.token_ids == expected.token_ids


def test_an_echo_of_samples_and_of_failures(echoing: LLM) -> None:
    params = SamplingParams(n=3, echo=True, temperature=1.0, seed=0, max_tokens=4)
    (output,) = echoing.generate("The name", params, on_error="return")
    assert all(c.text.startswith("The name") for c in output.completions)
    broken = SamplingParams(echo=True, grammar=GrammarSpec.regex("("))
    (failed,) = echoing.generate("The name", broken, on_error="return")
    assert (failed.finish_reason, failed.text, failed.token_ids) == ("error", "The name", [])
