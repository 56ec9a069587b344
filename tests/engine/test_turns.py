"""Two halves of the texts take turns, and every text is what it would be."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guided_spec.core import DecodeBatch
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import RequestOutput
from guided_spec.engine.steps import step_runner
from guided_spec.engine.steps.draft_length import DraftLengthPolicy, ForwardTimes
from guided_spec.engine.steps.in_flight import InFlight, StepInFlight
from guided_spec.engine.steps.planner import Turns
from guided_spec.step import Step, commit, speculative_step
from guided_spec.types import SamplingParams
from tests.engine.test_equality import PARAMS, PROMPTS, PROPOSERS, generate, plain, tokens
from tests.engine.test_laws import NUM_SEEDS, PROMPT, UNLIKELY, headed, law, p_value, sampled
from tests.engine.test_preemption import PROMPTS as OTHERS
from tests.engine.test_preemption import make, texts
from tests.learned_heads import HeadedTarget, write_head
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy

PATIENCE = 60.0
NONE = InFlight(5)
SIZES = (1, 64, 128, 256, 512, 1024, 2048)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> HeadedTarget:
    return write_head(tmp_path_factory.mktemp("head") / "eagle3", "eagle3", VOCAB_SIZE)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """From two texts on they take turns; the slots of each step, as they are launched."""
    seen = list[tuple[int, ...]]()

    def launched(target: Any, proposer: Any, batch: DecodeBatch, **rest: Any) -> Step:
        seen.append(batch.slots)
        return speculative_step(target, proposer, batch, **rest)

    monkeypatch.setattr("guided_spec.engine.steps.step_runner.speculative_step", launched)
    monkeypatch.setattr(Turns, "are_taken", lambda _, num_texts, *__: num_texts >= 2)
    return seen


def ran_in_turns(batches: Sequence[tuple[int, ...]]) -> bool:
    """Whether many steps had none of the texts of the step before."""
    apart = [not {*one} & {*other} for one, other in zip(batches, batches[1:], strict=False)]
    return sum(apart) > len(apart) / 4


def sizes_of_turns(batches: Sequence[tuple[int, ...]]) -> list[int]:
    """Texts in each step in which none begins. Those whose prompts end decode at once, and how
    many end together depends on when their grammars are ready."""
    seen, sizes = set[int](), list[int]()
    for slots in batches:
        if seen.issuperset(slots):
            sizes.append(len(slots))
        seen.update(slots)
    return sizes


@pytest.mark.parametrize("proposer", PROPOSERS[1:])
def test_the_texts_are_the_same(batches: list[tuple[int, ...]], proposer: str) -> None:
    draft = near_copy("llama") if "draft_model" in proposer else None
    options: dict[str, Any] = {"kernels": "packed", "max_batch_size": 5, "prefill_tokens": 16}
    assert tokens(generate("llama", proposer, draft, **options)) == tokens(plain("llama"))
    assert ran_in_turns(batches)
    assert max(sizes_of_turns(batches)) <= 3


@pytest.mark.parametrize("proposer", ["eagle3", "chain:grammar_forced+ngram", "draft_model"])
def test_nobody_takes_turns_while_nobody_drafts(
    batches: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    written: HeadedTarget,
    proposer: str,
) -> None:
    """Such steps are of all texts, and halves begin anew when drafts do."""
    drafted, count = list[int](), 0

    def num_draft_tokens(policy: DraftLengthPolicy, *_: Any) -> int:
        nonlocal count
        count += 1
        drafted.append(policy.lengths[-1 if count // 9 % 2 else 0])
        return drafted[-1]

    monkeypatch.setattr(DraftLengthPolicy, "num_draft_tokens", num_draft_tokens)
    monkeypatch.setattr(DraftLengthPolicy, "drafts", lambda _, __: count // 9 % 2 == 1)
    model, draft = written if proposer == "eagle3" else ("llama", near_copy("llama"))
    draft = None if proposer.startswith("chain") else draft
    options: dict[str, Any] = {"kernels": "packed", "max_batch_size": 5, "drafting": "auto"}
    expected = tokens(plain(model))
    batches.clear()
    assert tokens(generate(model, proposer, draft, **options)) == expected
    assert len(drafted) == len(batches) > 30
    plain_steps = [len(slots) for slots, of in zip(batches, drafted, strict=True) if of <= 0]
    others = [slots for slots, of in zip(batches, drafted, strict=True) if of > 0]
    assert max(plain_steps) == 5
    assert ran_in_turns(others)


@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
@pytest.mark.parametrize("proposer", ["eagle3", "chain:grammar_forced+eagle3"])
def test_seeds_give_the_same_texts(
    batches: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    written: HeadedTarget,
    proposer: str,
    verifier: str,
) -> None:
    params = [
        SamplingParams(max_tokens=40, temperature=0.8, seed=at, grammar=one.grammar)
        for at, one in enumerate(PARAMS)
    ]
    found = list[list[tuple[list[int], str]]]()
    for takes_turns in (True, False):
        if not takes_turns:
            assert ran_in_turns(batches)
            monkeypatch.setattr(Turns, "are_taken", lambda *_: False)
        with make(written, proposer, None, verifier=verifier) as llm:
            found.append(texts(llm.generate(PROMPTS, params)))
    assert found[0] == found[1]


def test_texts_that_must_draft_take_turns_whatever_is_measured(
    batches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, written: HeadedTarget
) -> None:
    """By rejection a text with a seed depends on its drafts: their length is always the same."""
    monkeypatch.setattr(DraftLengthPolicy, "drafts", lambda *_: False)
    params = [SamplingParams(max_tokens=40, temperature=0.8, seed=at) for at in range(4)]
    with make(written, "eagle3", None, verifier="rejection", drafting="auto") as llm:
        llm.generate(PROMPTS[:4], params)
    assert ran_in_turns(batches)


@pytest.mark.slow
def test_the_law_is_the_same(batches: list[tuple[int, ...]], tmp_path: Path) -> None:
    target, draft = headed("eagle3", tmp_path)
    params = sampled(seed=None)
    options: dict[str, Any] = {"max_batch_size": 60, "max_model_len": 32, "num_draft_tokens": 3}
    with make_llm(target, "eagle3", draft, kernels="packed", **options) as llm:
        exact, others = law(llm, params), law(llm, sampled(seed=None, temperature=1.6))
        found = [one.completions[0] for one in llm.generate([PROMPT] * NUM_SEEDS, params)]
    assert ran_in_turns(batches)
    counts = Counter(tuple(one.token_ids) for one in found)
    assert set(counts) <= set(exact)
    assert p_value(counts, exact) > UNLIKELY > p_value(counts, others)


def test_who_is_cancelled_on_the_way_keeps_its_slot_until_it_lands(
    monkeypatch: pytest.MonkeyPatch, written: HeadedTarget
) -> None:
    """What the step gave it goes nowhere, and nothing of it to who comes next."""
    entered, resume = threading.Event(), threading.Event()
    batches, given = list[tuple[int, ...]](), SamplingParams(max_tokens=60, ignore_eos=True)

    def held(target: Any, proposer: Any, batch: DecodeBatch, **rest: Any) -> Step:
        batches.append(batch.slots)
        step = speculative_step(target, proposer, batch, **rest)
        if batches[-2:] == [(0,), (1,)] and not entered.is_set():
            entered.set()
            assert resume.wait(PATIENCE)
        return step

    monkeypatch.setattr("guided_spec.engine.steps.step_runner.speculative_step", held)
    monkeypatch.setattr(Turns, "are_taken", lambda _, num_texts, *__: num_texts >= 2)
    outputs = list[RequestOutput]()
    with make(written, "eagle3", None, max_batch_size=2) as llm:
        stream = llm.stream(OTHERS[0], given)
        next(stream)
        others = [OTHERS[1], OTHERS[2]]
        other = threading.Thread(target=lambda: outputs.extend(llm.generate(others, given)))
        other.start()
        assert entered.wait(PATIENCE)
        stream.close()  # type: ignore[attr-defined]  # a generator
        resume.set()
        other.join(PATIENCE)
        monkeypatch.setattr(Turns, "are_taken", lambda *_: False)
        assert texts(outputs) == texts(llm.generate(others, given))
    assert (0,) in batches[batches.index((1,)) + 1 :]  # whose slot the third text then has


def test_a_step_that_raises_once_takes_nobody_with_it(
    batches: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def failing(batch: DecodeBatch, *rest: Any) -> Any:
        calls.append(len(batch))
        if len(calls) == 5:
            raise ZeroDivisionError("no commit")
        return commit(batch, *rest)

    monkeypatch.setattr(step_runner, "commit", failing)
    with make_llm("llama", "ngram", kernels="packed", max_batch_size=4) as llm:
        written = [one.completions[0] for one in llm.generate(PROMPTS, PARAMS)]
        assert batches
        assert len(calls) > 5
    assert tokens(written) == tokens(plain("llama"))


def test_closing_ends_what_is_on_its_way(batches: list[tuple[int, ...]]) -> None:
    llm: LLM = make_llm("llama", "ngram", kernels="packed")
    found, params = list[RequestOutput](), SamplingParams(max_tokens=150, ignore_eos=True)
    writer = threading.Thread(
        target=lambda: found.extend(llm.generate(["A"] * 4, params, on_error="return"))
    )
    writer.start()
    while len(batches) < 6:
        writer.join(0.01)
    llm.close()
    writer.join(PATIENCE)
    assert not writer.is_alive()
    assert len(found) == 4


def measured(flat: int, width: int, most: int) -> Turns:
    """Forwards of up to ``flat`` tokens take the same, and longer ones in proportion."""
    times = ForwardTimes({size: max(size, flat) / 1e5 for size in SIZES})
    return Turns.from_times(times, width, most)


@given(flat=st.integers(1, 1000), width=st.integers(2, 9), most=st.integers(1, 400))
def test_halves_take_turns_where_their_forwards_take_hardly_longer(
    flat: int, width: int, most: int
) -> None:
    found = measured(flat, width, most)
    takes = [at for at in range(1, most + 1) if found.are_taken(at, NONE)]
    assert takes == [*range(most - len(takes) + 1, most + 1)]
    for num_texts in takes:
        assert num_texts * width > flat / 2  # else two forwards take twice as long
    if most * width > 4 * flat and most > 8:
        assert takes


def test_without_times_nobody_takes_turns() -> None:
    found = Turns.from_times(ForwardTimes({}), 6, 256)
    assert not any(found.are_taken(at, NONE) for at in range(1, 300))


def test_who_takes_turns_goes_on_with_fewer() -> None:
    found, step = measured(512, 6, 256), cast(StepInFlight, object())
    first = min(at for at in range(1, 257) if found.are_taken(at, NONE))
    assert found.are_taken(first * 3 // 4 + 1, NONE._replace(steps=(step,)))
    assert not found.are_taken(first // 2, NONE._replace(steps=(step,)))
