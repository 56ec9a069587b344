"""Choices: their probabilities are those of constrained sampling, whatever else runs."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from enum import Enum
from typing import Any, Literal

import pytest
import torch

from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError, GuidedSpecError, PromptError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.types import SamplingParams
from tests.engine.conftest import Spy
from tests.tiny_llm import make_llm, tiny_model, tiny_tokenizer
from tests.toys import text_rule

PROMPT = "The kind of the animal is "
CHOICES = ["cat", "a cat", "an error", "an", "ant"]
CHI_SQUARE_99_9 = 18.47  # four degrees of freedom


def exact(name: str, vocabulary: Vocabulary, paths: dict[tuple[int, ...], str] | None) -> Any:
    """By one forward of the model itself for every legal path, with no cache.

    paths: the only ones, each with its text; None for all.
    """
    prompt = tiny_tokenizer()(PROMPT)["input_ids"]
    stop = vocabulary.stop_token_ids[0]
    free = text_rule([text.encode() for text in CHOICES], vocabulary)
    found = Counter[str]()

    def legal(path: tuple[int, ...]) -> list[int]:
        if paths is None:
            return sorted(free(path))
        ahead = {way[len(path)] for way in paths if way[: len(path)] == path and way != path}
        return sorted(ahead | ({stop} if path in paths else set()))

    def walk(path: tuple[int, ...], share: float) -> None:
        with torch.inference_mode():
            logits = tiny_model(name)(torch.tensor([[*prompt, *path]])).logits[0, -1]
        tokens = legal(path)
        values = torch.softmax(logits[tokens].double(), 0).tolist()
        for token, value in zip(tokens, values, strict=True):
            if token == stop:
                found[vocabulary.decode(path)] += share * value
            else:
                walk((*path, token), share * value)

    walk((), 1.0)
    return pytest.approx([found[text] for text in CHOICES], rel=1e-3, abs=1e-7)


@pytest.mark.parametrize("num_slots", [1, 5])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_all_paths_by_the_models_own_forward(name: str, num_slots: int) -> None:
    with make_llm(name, max_batch_size=num_slots, prefill_tokens=7) as llm:
        found = llm.choose(PROMPT, CHOICES)
        assert list(found.probabilities.values()) == exact(name, llm.vocabulary, None)
        assert found.paths == "all"
    assert math.fsum(found.probabilities.values()) == pytest.approx(1.0, abs=1e-12)
    assert found.choice == max(CHOICES, key=found.probabilities.__getitem__)
    expected = {text: math.log(p) for text, p in found.probabilities.items()}
    assert found.logprobs == pytest.approx(expected)


def test_canonical_paths_by_the_models_own_forward() -> None:
    tokenizer = tiny_tokenizer()
    ways = {tuple(tokenizer(text)["input_ids"]): text for text in CHOICES}
    with make_llm("llama") as llm:
        found = llm.choose(PROMPT, CHOICES, paths="canonical")
        assert list(found.probabilities.values()) == exact("llama", llm.vocabulary, ways)
        assert found.paths == "canonical"
        assert found.probabilities != llm.choose(PROMPT, CHOICES).probabilities


def test_packed_models_too() -> None:
    with make_llm("llama", kernels="packed") as llm:
        found = llm.choose(PROMPT, CHOICES)
        assert list(found.probabilities.values()) == exact("llama", llm.vocabulary, None)


def test_sampling_agrees() -> None:
    params = SamplingParams(
        n=2000, temperature=1.0, seed=11, grammar=GrammarSpec.choice(CHOICES), max_tokens=64
    )
    with make_llm("llama", "grammar_forced", max_batch_size=64) as llm:
        found = llm.choose(PROMPT, CHOICES)
        (output,) = llm.generate(PROMPT, params)
    counts = Counter(completion.text for completion in output.completions)
    expected = {text: 2000 * p for text, p in found.probabilities.items()}
    assert min(expected.values()) > 5
    assert sum((counts[t] - e) ** 2 / e for t, e in expected.items()) < CHI_SQUARE_99_9


class Animal(Enum):
    CAT = "cat"
    ANT = "ant"


def test_choices_come_in_any_of_their_forms() -> None:
    with make_llm("llama") as llm:
        listed = llm.choose(PROMPT, ["cat", "ant", "cat"])
        literal = llm.choose(PROMPT, Literal["cat", "ant"])
        member = llm.choose(PROMPT, Animal)
        assert listed == literal
        assert member.choice is Animal(listed.choice)
        assert member.probabilities == {Animal(k): v for k, v in listed.probabilities.items()}
        assert llm.choose(PROMPT, ["cat"]).probabilities == {"cat": 1.0}


def test_a_list_of_prompts_gives_a_list() -> None:
    prompts: list[Any] = [PROMPT, [5, 6, 7], "x", PROMPT]
    with make_llm("llama") as llm:
        alone = [llm.choose(prompt, CHOICES) for prompt in prompts]
        together = llm.choose(prompts, CHOICES)
        assert llm.choose([PROMPT], CHOICES) == [alone[0]]
        assert llm.choose([], CHOICES) == []
    for one, other in zip(alone, together, strict=True):
        assert one.probabilities == pytest.approx(other.probabilities, rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_it_runs_among_other_requests(name: str, spy: Spy) -> None:
    prompts = [PROMPT, "x", PROMPT, "abc", PROMPT]
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3)
    asked = []

    async def everything(llm: LLM) -> Any:
        texts = asyncio.create_task(llm.agenerate(prompts, params))
        while not spy.steps:  # they decode
            await asyncio.sleep(0)
        chosen = [asyncio.create_task(llm.achoose(PROMPT, CHOICES)) for _ in range(3)]
        return await texts, [await task for task in chosen]

    with make_llm(name, "spy", max_batch_size=3) as llm:
        plain = llm.generate(prompts, params)
        spy.steps.clear()
        texts, asked = asyncio.run(everything(llm))
        assert [one.token_ids for one in texts] == [one.token_ids for one in plain]
        for found in asked:
            assert list(found.probabilities.values()) == exact(name, llm.vocabulary, None)


def test_a_cancelled_task_leaves_the_others() -> None:
    async def cancel_one(llm: LLM) -> Any:
        tasks = [asyncio.create_task(llm.achoose([PROMPT] * 9, CHOICES)) for _ in range(2)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        return await tasks[1]

    with make_llm("llama", max_batch_size=2) as llm:
        assert len(asyncio.run(cancel_one(llm))) == 9
        assert len(llm.generate("x", SamplingParams(max_tokens=3))[0].token_ids) == 3


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ("yes", "choices='yes': must be strings: a list"),
        (["yes", 1], "choices=1: must be strings"),
        ([], "must hold at least one"),
        (["yes", ""], "each must be a non-empty string"),
        (["\ud800"], "half of a surrogate pair"),
        (int, "must be strings"),
    ],
)
def test_what_is_no_choice_is_refused(choices: Any, message: str) -> None:
    with make_llm("llama") as llm, pytest.raises(ConfigError, match=message):
        llm.choose(PROMPT, choices)


def test_prompts_and_settings_are_refused_by_name() -> None:
    with make_llm("llama", max_model_len=32) as llm:
        with pytest.raises(ConfigError, match="paths='best': must be one of all, canonical"):
            llm.choose(PROMPT, CHOICES, paths="best")  # type: ignore[call-overload]
        with pytest.raises(PromptError, match="raise max_model_len"):
            llm.choose("x" * 200, CHOICES)
        near = list(range(1, 32))
        with pytest.raises(PromptError, match="prompt and choices take 3[3-9] tokens"):
            llm.choose(near, CHOICES)
        with pytest.raises(PromptError):
            llm.choose([PROMPT, 3.5], CHOICES)  # type: ignore[arg-type]
        assert llm.choose(PROMPT, ["a", "b"]).choice in "ab"
    with pytest.raises(GuidedSpecError, match="closed"):
        llm.choose(PROMPT, CHOICES)
