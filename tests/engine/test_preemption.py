"""Too few blocks for all that run: who came last waits, and every text is what it would be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import RequestOutput
from guided_spec.engine.request import Request
from guided_spec.engine.scheduler import Scheduler
from guided_spec.engine.steps.in_flight import InFlight
from guided_spec.engine.steps.planner import Turns
from guided_spec.engine.steps.step_runner import StepRunner
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed_form import PackedForm
from guided_spec.types import SamplingParams
from tests.engine.reads import watch_reads
from tests.learned_heads import HeadedTarget
from tests.models.tiny import build, kv_bytes_per_token
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy, tiny_model

LENGTH = 4 * BLOCK
PROMPTS = [[5 + (at * 7 + row) % 300 for at in range(9 + 11 * row)] for row in range(5)]
LONG = GrammarSpec.regex("[0-9]{3}(-[a-z]{2}){18}")
FREE = SamplingParams(max_tokens=64, ignore_eos=True)
SAMPLED = replace(FREE, temperature=1.0, seed=5)
PARAMS = [FREE, replace(FREE, grammar=LONG), SAMPLED, replace(SAMPLED, grammar=LONG), FREE]
Texts = list[tuple[list[int], str]]


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each request, by its number, had to go back to the queue."""
    counts = Counter[int]()
    requeue = Scheduler.requeue

    def requeuing(scheduler: Scheduler, request: Request) -> None:
        counts[request.number] += 1
        assert request.number == max(one.number for one in scheduler.running())
        requeue(scheduler, request)

    monkeypatch.setattr(Scheduler, "requeue", requeuing)
    return counts


def make(headed: HeadedTarget, proposer: str, num_blocks: int | None, **options: Any) -> LLM:
    """num_blocks: for all texts together; None for as many as they can need."""
    memory = None
    if num_blocks is not None:
        memory = num_blocks * BLOCK * kv_bytes_per_token(headed.target)
    draft = headed.draft if "eagle3" in proposer else None
    options = {"kernels": "packed", "verifier": "coupled", "max_model_len": LENGTH, **options}
    return make_llm(headed.target, proposer, draft, kv_memory_bytes=memory, **options)


def texts(outputs: Sequence[RequestOutput]) -> Texts:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(c.token_ids, c.finish_reason) for output in outputs for c in output.completions]


@pytest.fixture(scope="module")
def expected(headed: HeadedTarget) -> Texts:
    with make(headed, "none", None, prefix_cache=False) as llm:
        return texts(llm.generate(PROMPTS, PARAMS))


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("proposer", ["none", "eagle3", "suffix", "chain:grammar_forced+ngram"])
def test_texts_that_wait_for_each_other(
    headed: HeadedTarget,
    proposer: str,
    *,
    prefix_cache: bool,
    expected: Texts,
    waited: Counter[int],
) -> None:
    with make(headed, proposer, 6, prefix_cache=prefix_cache) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, on_error="return")
        assert texts(outputs) == expected
        assert waited.total() > 1
        assert waited[1] == 0  # who came first waits for nobody
        for output in outputs:
            stats = output.stats
            assert stats.output_tokens == len(output.token_ids)
            assert stats.cached_tokens < stats.prompt_tokens
        # Nothing is lost: all blocks can be taken again.
        (alone,) = llm.generate(PROMPTS[4], PARAMS[4])
        assert (alone.token_ids, alone.finish_reason) == expected[4]


@pytest.mark.parametrize("proposer", ["eagle3", "suffix"])
def test_who_has_to_go_is_not_on_its_way(
    headed: HeadedTarget,
    proposer: str,
    expected: Texts,
    waited: Counter[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where halves take turns: what is launched is committed before."""
    requeue, launch, commit = Scheduler.requeue, StepRunner.launch, StepRunner.commit
    launched, in_flight = list[bool](), [InFlight(0)]

    def requeuing(scheduler: Scheduler, request: Request) -> None:
        launched.append(request in in_flight[-1].requests)
        requeue(scheduler, request)

    def launching(*arguments: Any) -> InFlight:
        in_flight.append(launch(*arguments))
        return in_flight[-1]

    def committing(*arguments: Any) -> InFlight:
        in_flight.append(commit(*arguments))
        return in_flight[-1]

    monkeypatch.setattr(Scheduler, "requeue", requeuing)
    monkeypatch.setattr(StepRunner, "launch", launching)
    monkeypatch.setattr(StepRunner, "commit", committing)
    monkeypatch.setattr(Turns, "are_taken", lambda _, num_texts, *__: num_texts >= 2)
    with make(headed, proposer, 6) as llm:
        assert texts(llm.generate(PROMPTS, PARAMS, on_error="return")) == expected
    assert waited.total() > 1
    assert max(len(one.steps) for one in in_flight) == 2
    assert launched == [False] * waited.total()


@pytest.mark.slow
def test_as_many_blocks_as_one_text_needs(
    headed: HeadedTarget, expected: Texts, waited: Counter[int]
) -> None:
    """They go one after another, whatever is asked for."""
    with make(headed, "eagle3", 4) as llm:
        assert texts(llm.generate(PROMPTS, PARAMS, on_error="return")) == expected
        whole = SamplingParams(max_tokens=1000, ignore_eos=True)
        (output,) = llm.generate(PROMPTS[0], whole)
        assert len(PROMPTS[0]) + len(output.token_ids) == LENGTH
    assert waited.total() > 3


@pytest.mark.slow
@pytest.mark.parametrize("proposer", ["none", "chain:grammar_forced+ngram"])
def test_texts_with_a_state_that_wait_for_each_other(proposer: str, waited: Counter[int]) -> None:
    """Each has a state of its own and shares too few blocks; its state begins anew as it does."""
    options: dict[str, Any] = {"kernels": "packed", "verifier": "coupled"}
    options |= {"max_model_len": LENGTH, "num_draft_tokens": 3, "max_forced_tokens": 8}
    model = build("qwen3_5", vocab_size=VOCAB_SIZE)
    found = []
    for blocks in (None, 4):
        memory = None
        if blocks is not None:
            form = PackedForm.of(model, "packed", LENGTH)
            assert form is not None
            memory = blocks * BLOCK * kv_bytes_per_token(model) + 8 * form.state_bytes(1 + 3 + 8)
        with make_llm(model, proposer, max_batch_size=8, kv_memory_bytes=memory, **options) as llm:
            found.append(texts(llm.generate(PROMPTS, PARAMS)))
        assert bool(waited) == (blocks is not None)
    assert found[0] == found[1]


def test_a_long_text_is_not_overtaken_for_ever(headed: HeadedTarget, waited: Counter[int]) -> None:
    """Short ones come and go beside it; it ends before those that came much later."""
    long = SamplingParams(max_tokens=100, ignore_eos=True)
    short = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = [PROMPTS[0], PROMPTS[1], *[PROMPTS[3]] * 12]
    order = list[int]()
    with make(headed, "none", 4, max_batch_size=3) as llm:
        for chunk in llm.stream(prompts, [short, long, *[short] * 12]):
            if chunk.completion is not None:
                order.append(chunk.prompt_index)
    assert sorted(order) == list(range(14))
    assert order.index(1) < 5
    assert waited.total() > 0


def test_nobody_comes_in_who_could_not_go_on(
    headed: HeadedTarget, waited: Counter[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read all of its prompt before, and had to go for the room that its first draft needs."""
    reads = watch_reads(monkeypatch)
    long = [5 + at * 7 % 300 for at in range(2 * BLOCK + 9)]
    prompts = [long[: BLOCK // 2], long[: BLOCK + 3], long]
    params = SamplingParams(max_tokens=56, ignore_eos=True)
    options: dict[str, Any] = {"max_batch_size": 2, "prefill_tokens": 1, "prefix_cache": False}
    with make(headed, "none", 4, **options) as llm:
        llm.generate(prompts, params)
    assert not waited
    assert sum(one.num_tokens for one in reads) == sum(len(prompt) - 1 for prompt in prompts)


def test_who_came_first_reads_first(headed: HeadedTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though one that came later has a slot before its own."""
    reads = watch_reads(monkeypatch)
    prompts = [PROMPTS[0], PROMPTS[4], PROMPTS[3]]
    params = [replace(FREE, max_tokens=length) for length in (1, 9, 9)]
    with make(headed, "none", None, max_batch_size=2, prefill_tokens=8, prefix_cache=False) as llm:
        llm.generate(prompts, params)
    read = [prompt.slot for one in reads for prompt in one.prompts]
    first = [slot for slot, before in zip(read, [None, *read], strict=False) if slot != before]
    assert first == [0, 1, 0]


def test_choices_that_are_scored(headed: HeadedTarget, waited: Counter[int]) -> None:
    """Their rows need room behind the prompt, too."""
    prompts: list[Any] = [(PROMPTS[row] * 7)[: 2 * BLOCK - 3] for row in range(3)]
    choices = ["a cat, a dog", "a dog, a dog and a dog", "b"]
    with make(headed, "none", None) as llm:
        expected = llm.choose(prompts, choices, paths="canonical")
    with make(headed, "none", 4) as llm:
        found = llm.choose(prompts, choices, paths="canonical")
    for one, wanted in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(wanted.logprobs, rel=1e-4)
    assert waited.total() > 0


@pytest.mark.parametrize("proposer", ["none", "eagle3"])
def test_samples_of_one_prompt(headed: HeadedTarget, proposer: str, waited: Counter[int]) -> None:
    """Where no block is left for what they do not share, they read the prompt in their turn."""
    params = replace(SAMPLED, n=5)
    with make(headed, "none", None, prefix_cache=False) as llm:
        expected = texts(llm.generate(PROMPTS[3], params))
    with make(headed, proposer, 4) as llm:
        found = llm.generate([PROMPTS[3]], [params], on_error="return")
    assert texts(found) == expected
    assert waited.total() > 0


@pytest.mark.parametrize(
    ("proposer", "draft", "verifier"),
    [
        ("draft_model", "llama", "rejection"),
        ("draft_model", "qwen3_5", "coupled"),
        ("pard", "llama", "coupled"),
    ],
)
def test_a_draft_model_has_room_for_what_its_target_holds_once(
    proposer: str, draft: str, verifier: str, waited: Counter[int]
) -> None:
    """Texts that begin alike take few blocks of the target's, and would take many more apart."""
    target, model = tiny_model("llama"), near_copy(draft)
    model.config.pard_token = 3  # what marks a model that was trained for pard
    begin = [5 + at * 7 % 300 for at in range(3 * BLOCK)]
    prompts = [[*begin, 40 + row, 9] for row in range(6)]
    params = [replace(FREE, max_tokens=6), replace(SAMPLED, max_tokens=6)] * 3
    options: dict[str, Any] = {"max_model_len": LENGTH, "verifier": verifier}
    with make_llm(target, proposer, model, max_batch_size=1, **options) as llm:
        expected = texts(llm.generate(prompts, params))
    options |= {"kv_memory_bytes": 10 * BLOCK * kv_bytes_per_token(target)}
    with make_llm(target, proposer, model, max_batch_size=6, **options) as llm:
        found = llm.generate(prompts, params, on_error="return")
    assert texts(found) == expected
    assert [output.stats.cached_tokens for output in found] == [0, *[3 * BLOCK] * 5]
    assert not waited
    assert draft != "llama" or sum(sum(output.stats.accepted) for output in found) > 5
