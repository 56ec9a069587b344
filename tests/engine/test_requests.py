"""Where a text ends, how it is streamed, and which prompts and parameters are understood."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from guided_spec.engine.llm import LLM
from guided_spec.engine.request import Request
from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams
from tests.tiny_llm import make_llm, tiny_model, tiny_tokenizer

FORCED = GrammarSpec.regex("(?:abcdef){12}")
CHARACTERS = GrammarSpec.regex("[你好é🎉]{12}")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Every draft is accepted: the draft model is the target."""
    draft = tiny_model("llama")
    with make_llm("llama", "chain:grammar_forced+draft_model", draft) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    with make_llm("llama", "none") as llm:
        yield llm


def one(llm: LLM, prompt: Any = "The name", **params: Any) -> Any:
    output = llm.generate([prompt], SamplingParams(**params), on_error="return")[0]
    assert output.error is None
    return output


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 12])
def test_max_tokens(llm: LLM, max_tokens: int) -> None:
    output = one(llm, max_tokens=max_tokens)
    assert len(output.token_ids) == max_tokens == output.stats.output_tokens
    assert output.finish_reason == "length"
    assert output.token_ids == one(llm, max_tokens=12).token_ids[:max_tokens]


def test_the_context_ends_a_text(llm: LLM) -> None:
    prompt = [5] * (llm.max_model_len - 3)
    output = one(llm, prompt, max_tokens=50)
    assert len(output.token_ids) == 3
    assert output.finish_reason == "length"


def test_a_grammar_that_ends_at_the_last_token_has_stopped(llm: LLM, plain: LLM) -> None:
    grammar = GrammarSpec.choice(["abc"])
    length = len(one(plain, grammar=grammar).token_ids)
    for engine in (llm, plain):
        assert one(engine, grammar=grammar, max_tokens=length).finish_reason == "stop"
        cut = one(engine, grammar=grammar, max_tokens=length - 1, complete=False)
        assert cut.finish_reason == "length"


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("def", "abc"),
        ("fab", "abcde"),  # across the places where the text repeats
        (["efa", "fabcdefab"], "abcd"),
        (["efx", "efabcdefabcdeff"], "abcdef" * 12),  # only beginnings of them occur
        (["xyz", "abcdefabcdef"], ""),
        (["cdefab", "bcdefa"], "a"),
    ],
)
def test_stop_strings(llm: LLM, plain: LLM, stop: Any, text: str) -> None:
    """Inside blocks that were accepted whole, and token by token."""
    for engine in (llm, plain):
        output = one(engine, grammar=FORCED, stop=stop)
        assert output.text == text
        assert output.finish_reason == "stop"
    assert one(llm, grammar=FORCED).stats.acceptance_length > 3


def test_tokens_behind_a_stop_string_are_dropped(llm: LLM, plain: LLM) -> None:
    ours, theirs = (one(engine, grammar=FORCED, stop="def") for engine in (llm, plain))
    assert ours.token_ids == theirs.token_ids
    assert len(ours.token_ids) < len(one(llm, grammar=FORCED).token_ids)


def test_stop_token_ids_inside_an_accepted_block(llm: LLM) -> None:
    free = one(llm, max_tokens=30)
    assert free.stats.acceptance_length > 3
    for place in (1, 3, 8):
        token = free.token_ids[place]
        output = one(llm, max_tokens=30, stop_token_ids=[token])
        end = free.token_ids.index(token) + 1
        assert output.token_ids == free.token_ids[:end]
        assert output.finish_reason == "stop"


@pytest.fixture(scope="module")
def ending() -> Iterator[tuple[LLM, list[int]]]:
    """A model that writes its end-of-text token early, and what it writes past it."""
    with make_llm("llama", "none") as llm:
        tokens = one(llm, max_tokens=20).token_ids
    model = copy.deepcopy(tiny_model("llama"))
    model.generation_config.eos_token_id = tokens[5]
    with make_llm(model, "draft_model", tiny_model("llama")) as llm:
        yield llm, tokens


def test_the_end_of_text_in_the_middle_of_a_draft(ending: tuple[LLM, list[int]]) -> None:
    llm, tokens = ending
    end = tokens.index(tokens[5]) + 1
    output = one(llm, max_tokens=20)
    assert output.token_ids == tokens[:end]
    assert output.finish_reason == "stop"
    assert output.text == llm.vocabulary.decode(tokens[: end - 1])


def test_ignore_eos(ending: tuple[LLM, list[int]]) -> None:
    llm, tokens = ending
    output = one(llm, max_tokens=20, ignore_eos=True)
    assert output.token_ids == tokens
    assert output.finish_reason == "length"


def test_ignore_eos_does_not_lengthen_a_grammar(llm: LLM, plain: LLM) -> None:
    for engine in (llm, plain):
        output = one(engine, grammar=GrammarSpec.choice(["abc", "abd"]), ignore_eos=True)
        assert output.text in ("abc", "abd")
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] == tiny_tokenizer().eos_token_id


@pytest.mark.parametrize("stop", [(), ("好",), ("éé", "你好")])
def test_streamed_pieces_join_to_the_text(llm: LLM, stop: tuple[str, ...]) -> None:
    """Characters of several tokens each: none is ever shown in half."""
    seen: list[str] = []
    for seed in range(6):
        params = SamplingParams(grammar=CHARACTERS, stop=stop, temperature=1.0, seed=seed)
        chunks = list(llm.stream(["A"], params))
        pieces = [chunk.text for chunk in chunks]
        completion = chunks[-1].completion
        assert completion is not None
        assert [chunk.completion for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert "".join(pieces) == completion.text
        assert set(completion.text) <= set("你好é🎉")
        assert not [s for s in stop if s in completion.text]
        seen.append(completion.text)
        assert all(pieces[:-1])  # no empty pieces but the last
    assert len(set(seen)) > 1


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    lengths = [20, 1, 9, 3, 14, 2, 7]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    outputs = llm.generate(["a"] * 7, params)
    assert [len(output.token_ids) for output in outputs] == lengths
    assert [output.prompt_index for output in outputs] == list(range(7))
    streamed = [c.prompt_index for c in llm.stream(["a"] * 7, params) if c.completion is not None]
    assert sorted(streamed) == list(range(7))
    assert streamed != list(range(7))  # those that end first come first


def test_one_prompt_many_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    expected = one(llm, "cat", max_tokens=4).token_ids
    ids = list(tiny_tokenizer()("cat")["input_ids"])
    arrays = [np.array(ids), torch.tensor(ids), [*np.array(ids)]]
    calls: list[tuple[Any, int]] = [("cat", 1), (["cat"], 1), (ids, 1), ([ids, "cat"], 2), ([], 0)]
    for prompts, count in [*calls, (arrays, 3), *((array, 1) for array in arrays)]:
        outputs = llm.generate(prompts, params)
        assert [output.token_ids for output in outputs] == [expected] * count
    assert llm.encode("cat") == ids


def test_parameters_for_each_prompt_or_for_all(llm: LLM) -> None:
    a, b = SamplingParams(max_tokens=2), SamplingParams(max_tokens=5)
    assert [len(o.token_ids) for o in llm.generate(["x", "y"], [a, b])] == [2, 5]
    assert [len(o.token_ids) for o in llm.generate(["x", "y"], b)] == [5, 5]
    for wrong in ([a], [a, b, a], []):
        with pytest.raises(ConfigError, match="one SamplingParams, or 2: one for each prompt"):
            llm.generate(["x", "y"], wrong)
    with pytest.raises(ConfigError, match="must be a SamplingParams, or a list of them"):
        llm.generate(["x", "y"], [a, None])


def test_compiling_ahead_leaves_broken_grammars_to_their_requests(llm: LLM) -> None:
    llm.compile([GrammarSpec.regex("("), GrammarSpec.regex("ab")])
    assert one(llm, grammar=GrammarSpec.regex("ab")).text == "ab"


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}answer: {% endif %}"
)


def test_chat_prompts(llm: LLM) -> None:
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = TEMPLATE
    chat = [{"role": "user", "content": "a cat"}]
    params = SamplingParams(max_tokens=3)
    with make_llm("llama", tokenizer=tokenizer) as chatting:
        assert chatting.encode(chat) == chatting.encode("user: a cat\nanswer: ")
        outputs = chatting.generate(
            [chat, [{"role": "tool", "content": "x"}], chat], params, on_error="return"
        )
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "the chat template refused it: no tools" in str(outputs[1].error)
    output = llm.generate(chat, params, on_error="return")[0]
    assert "the tokenizer has no chat template" in str(output.error)


def test_texts_get_their_grammars_while_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before they have a slot: the device would wait for that between two steps."""
    events, take, finish = list[str](), Request.take_grammar, Request.finish

    def taking(request: Request) -> None:
        if request.text.constraint is None:
            events.append("grammar")
        take(request)

    def finishing(request: Request, *args: Any) -> None:
        events.append("end")
        finish(request, *args)

    monkeypatch.setattr(Request, "take_grammar", taking)
    monkeypatch.setattr(Request, "finish", finishing)
    grammars = [FORCED, CHARACTERS, GrammarSpec.regex("[ab]{9}")]
    with make_llm("llama", max_batch_size=1) as llm:
        params = [SamplingParams(max_tokens=99, grammar=grammar) for grammar in grammars]
        llm.compile(grammars)
        outputs = llm.generate(["The name"] * 3, params)
    assert events == ["grammar"] * 3 + ["end"] * 3
    assert all(output.completions[0].is_complete for output in outputs)
