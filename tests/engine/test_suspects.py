"""A step that raises ends the request that makes it raise, and changes no other text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

from guided_spec import step
from guided_spec.core import DecodeBatch
from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import RequestOutput
from guided_spec.engine.request import Request
from guided_spec.engine.steps.planner import Turns
from guided_spec.engine.target.line_target import LineTarget
from guided_spec.engine.target.slot_target import SlotTarget
from guided_spec.errors import ModelError
from guided_spec.masks import lookahead
from guided_spec.step import commit, speculative_step
from tests.cases import pairwise
from tests.engine.test_preemption import LENGTH, PARAMS, PROMPTS, Texts, texts
from tests.learned_heads import HeadedTarget
from tests.server.running import until
from tests.tiny_llm import make_llm

Contexts = list[Sequence[int]]
Rule = Callable[[Contexts], bool]

VICTIM, OTHER = 1, 3  # of the prompts
MIDDLE = len(PROMPTS[-1]) + 20  # the longest text is on its way there


class Settings(NamedTuple):
    """Of the engine that raises. turns: two halves of the texts take turns."""

    proposer: str
    kernels: str = "packed"
    prefix_cache: bool = True
    turns: bool = False


ENGINES = [
    Settings("none"),
    Settings("ngram", "stock"),
    Settings("chain:grammar_forced+ngram", turns=True),
    Settings("eagle3", turns=True),
    Settings("eagle3", "stock"),
    Settings("chain:grammar_forced+suffix", prefix_cache=False),
]


def is_in(contexts: Contexts, *prompts: int) -> bool:
    """Whether the texts of all these prompts, or the beginnings of them, are among those."""
    return all(
        any(PROMPTS[at][: len(one)] == list(one[: len(PROMPTS[at])]) for one in contexts)
        for at in prompts
    )


class Stages:
    """Raises in one stage of those steps for whose texts the rule says so.

    raised: the number of texts in each of them.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._contexts: Contexts = []
        self._rule: Rule = lambda _: False
        self.raised: list[int] = []
        launch = speculative_step

        def launched(target: Any, proposer: Any, batch: DecodeBatch, **rest: Any) -> Any:
            self._contexts = [[*context] for context in batch.contexts]
            return launch(target, proposer, batch, **rest)

        monkeypatch.setattr("guided_spec.engine.steps.step_runner.speculative_step", launched)

    def raise_in(self, stage: str, rule: Rule) -> None:
        self._rule = rule
        getattr(self, f"_in_{stage}")()

    def _check(self, contexts: Contexts | None = None) -> None:
        contexts = self._contexts if contexts is None else contexts
        if self._rule(contexts):
            self.raised.append(len(contexts))
            raise ZeroDivisionError("in this stage")

    def _after(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            found = call(*args, **options)
            self._check()
            return found

        self._patch.setattr(owner, name, called)

    def _in_forward(self) -> None:
        for target in (SlotTarget, LineTarget):
            self._after(target, "verify")

    def _in_sampling(self) -> None:
        self._after(step, "verify")

    def _in_commit(self) -> None:
        """Behind the constraints' part: they are ahead of their texts."""

        def committed(batch: DecodeBatch, *rest: Any) -> Any:
            found = commit(batch, *rest)
            self._check(list(batch.contexts))
            return found

        self._patch.setattr("guided_spec.engine.steps.step_runner.commit", committed)

    def _in_prompts(self) -> None:
        """Whether they are read by themselves or with drafts."""
        for target in (SlotTarget, LineTarget):
            self._after_prompts(target)

    def _after_prompts(self, form: Any) -> None:
        read, verify = form.read, form.verify

        def reading(target: Any, prompts: Any) -> None:
            read(target, prompts)
            self._check([prompt.token_ids for prompt in prompts])

        def verifying(target: Any, batch: DecodeBatch, flight: Any) -> Any:
            found = verify(target, batch, flight)
            self._check([prompt.token_ids for prompt in batch.prompts])
            return found

        self._patch.setattr(form, "read", reading)
        self._patch.setattr(form, "verify", verifying)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    return Stages(monkeypatch)


@pytest.fixture(scope="module")
def expected(headed: HeadedTarget) -> Texts:
    with make(headed, Settings("none")) as llm:
        return texts(llm.generate(PROMPTS, PARAMS))


def make(headed: HeadedTarget, settings: Settings) -> LLM:
    draft = headed.draft if "eagle3" in settings.proposer else None
    options: dict[str, Any] = {"kernels": settings.kernels, "prefix_cache": settings.prefix_cache}
    coupled: dict[str, Any] = {"verifier": "coupled", "max_model_len": LENGTH}
    return make_llm(headed.target, settings.proposer, draft, **options, **coupled)


def generate(
    headed: HeadedTarget, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> list[RequestOutput]:
    monkeypatch.setattr(lookahead, "ROWS_WORTH_A_THREAD", 1)  # it may fill rows while a step raises
    if settings.turns:
        monkeypatch.setattr(Turns, "are_taken", lambda _, num_texts, *__: num_texts >= 2)
    with make(headed, settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, on_error="return")
        until(lambda: llm.load.running == llm.load.waiting == 0)
    return outputs


STAGES = ["forward", "sampling", "commit", "prompts"]


@pytest.mark.parametrize(("settings", "stage"), pairwise(ENGINES, STAGES))
def test_the_request_that_makes_steps_raise_ends_alone(
    headed: HeadedTarget,
    settings: Settings,
    stage: str,
    expected: Texts,
    stages: Stages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages.raise_in(stage, lambda contexts: is_in(contexts, VICTIM))
    outputs = generate(headed, settings, monkeypatch)
    victim = outputs.pop(VICTIM)
    assert texts(outputs) == expected[:VICTIM] + expected[VICTIM + 1 :]
    assert isinstance(victim.error, ModelError)
    assert isinstance(victim.error.__cause__, ZeroDivisionError)
    assert stages.raised[-1] == 1


@pytest.mark.parametrize(("settings", "stage"), pairwise(ENGINES, STAGES[:-1]))
def test_a_step_that_raises_once_ends_nobody(
    headed: HeadedTarget,
    settings: Settings,
    stage: str,
    expected: Texts,
    stages: Stages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with several texts, in the middle of their way."""

    def rule(contexts: Contexts) -> bool:
        return not stages.raised and len(contexts) > 1 and max(map(len, contexts)) > MIDDLE

    stages.raise_in(stage, rule)
    assert texts(generate(headed, settings, monkeypatch)) == expected
    assert len(stages.raised) == 1


@pytest.mark.parametrize("settings", ENGINES)
def test_two_that_raise_together_end_apart(
    headed: HeadedTarget,
    settings: Settings,
    expected: Texts,
    stages: Stages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In few rounds: they stay apart for longer each time."""
    stages.raise_in("forward", lambda contexts: is_in(contexts, VICTIM, OTHER))
    assert texts(generate(headed, settings, monkeypatch)) == expected
    assert 0 < len(stages.raised) <= 12  # of up to 64 tokens in each text


def test_a_text_that_cannot_be_told_ends_alone(
    headed: HeadedTarget, expected: Texts, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Request.append

    def appended(request: Request, *args: Any) -> None:
        append(request, *args)
        if request.job.prompt_ids == PROMPTS[VICTIM]:
            raise ZeroDivisionError("nobody hears")

    monkeypatch.setattr(Request, "append", appended)
    outputs = generate(headed, Settings("ngram"), monkeypatch)
    assert isinstance(outputs.pop(VICTIM).error, ModelError)
    assert texts(outputs) == expected[:VICTIM] + expected[VICTIM + 1 :]


def test_all_fail_where_each_fails_alone(
    headed: HeadedTarget, stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages.raise_in("forward", lambda _: True)
    outputs = generate(headed, Settings("ngram"), monkeypatch)
    assert all(isinstance(output.error, ModelError) for output in outputs)
    assert all(len(output.token_ids) <= 1 for output in outputs)


def test_those_who_are_cancelled_on_trial_leave_no_trace(
    headed: HeadedTarget, stages: Stages
) -> None:
    stages.raise_in("forward", lambda contexts: len(contexts) > 1)
    with make(headed, Settings("ngram")) as llm:
        chunks: Any = llm.stream(PROMPTS, PARAMS, on_error="return")
        next(chunks)
        chunks.close()
        stages.raise_in("forward", lambda _: False)
        assert llm.generate(PROMPTS[0], PARAMS[0])[0].error is None
        until(lambda: llm.load.running == llm.load.waiting == 0)
