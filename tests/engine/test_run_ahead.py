"""Forwards that are launched before the host knows their tokens: no text is another by them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import RequestOutput
from guided_spec.engine.steps.draft_length import DraftLengthPolicy
from guided_spec.engine.target.line_target import ForwardAhead, LineTarget
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.packed.packed_lm import PackedLM
from guided_spec.types import SamplingParams
from tests.engine.test_equality import PARAMS, PROMPTS
from tests.learned_heads import write_head
from tests.models.tiny import kv_bytes_per_token
from tests.tiers import examples
from tests.tiny_llm import VOCAB_SIZE, make_llm, near_copy, tiny_model

LONG = SamplingParams(max_tokens=40, ignore_eos=True)
DATE = GrammarSpec.regex("[0-9]{4}-[0-9]{2}-[0-9]{2}")
SAMPLED = replace(LONG, temperature=0.8, top_p=0.9, seed=4, repetition_penalty=1.3)
VARIED = [
    LONG,
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=2, ignore_eos=True),
    SamplingParams(grammar=DATE),
    SamplingParams(grammar=DATE, temperature=1.0, seed=3, logprobs=2),
    SAMPLED,
    replace(LONG, stop=("e",)),
    replace(LONG, max_tokens=13, n=3, temperature=1.0, seed=5),
]
Found = list[tuple[str, list[tuple[list[int], str, str | None]]]]


@contextmanager
def running_ahead(*, is_on: bool = True) -> Iterator[Counter[str]]:
    """Whether engines do, as on a CUDA device. Counts forwards, those launched ahead, and of these
    those that served and those that did not."""
    counts = Counter[str]()
    verify, run, line = ForwardAhead.verify, LineTarget.run_ahead, PackedLM.forward_line

    def verifying(ahead: ForwardAhead, *arguments: Any) -> Any:
        before = counts["forwards"]
        found = verify(ahead, *arguments)
        counts["served" if counts["forwards"] == before else "wasted"] += 1
        return found

    def run_ahead(target: LineTarget, *arguments: Any) -> ForwardAhead | None:
        found = run(target, *arguments)
        counts["ahead"] += found is not None
        return found

    def forward_line(model: PackedLM, *arguments: Any) -> Any:
        counts["forwards"] += 1
        return line(model, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LineTarget, "launches_at_once", is_on)
        patch.setattr(ForwardAhead, "verify", verifying)
        patch.setattr(LineTarget, "run_ahead", run_ahead)
        patch.setattr(PackedLM, "forward_line", forward_line)
        yield counts


def written(
    prompts: Sequence[Any],
    params: Sequence[SamplingParams],
    model: Any = "llama",
    proposer: str = "none",
    draft: Any = None,
    **options: Any,
) -> Found:
    with make_llm(model, proposer, draft, kernels="packed", **options) as llm:
        return found_in(llm.generate(prompts, params, on_error="return"))


def found_in(outputs: Sequence[RequestOutput]) -> Found:
    return [
        (str(output.error), [(c.token_ids, c.text, c.finish_reason) for c in output.completions])
        for output in outputs
    ]


def both(*arguments: Any, **options: Any) -> Counter[str]:
    """Asserts that the texts are alike; returns the counts."""
    with running_ahead(is_on=False) as counts:
        expected = written(*arguments, **options)
    assert not counts["ahead"]
    with running_ahead() as counts:
        assert written(*arguments, **options) == expected
    return counts


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "qwen3_5"])
@pytest.mark.parametrize(("slots", "piece"), [(1, 1024), (3, 7)])
def test_the_texts_are_the_same(architecture: str, slots: int, piece: int) -> None:
    counts = both(PROMPTS, PARAMS, architecture, max_batch_size=slots, prefill_tokens=piece)
    assert counts["served"] > 40


@pytest.mark.parametrize("slots", [2, 8])
def test_however_texts_are_drawn_and_ended(slots: int) -> None:
    prompts = [f"The {name}" for name in ("cat", "dog", "end", "age", "name", "cat", "e", "n")]
    counts = both(prompts, VARIED, max_batch_size=slots)
    assert counts["served"] > 20


def test_a_lone_text_wastes_no_forward() -> None:
    counts = both(["A"], [LONG])
    assert counts["served"] == counts["ahead"] == LONG.max_tokens - 1


@settings(max_examples=examples(25))
@given(st.lists(st.sampled_from(VARIED), min_size=1, max_size=9), st.sampled_from([1, 2, 4]))
def test_any_requests(params: list[SamplingParams], slots: int) -> None:
    both([f"{at} on and on" for at in range(len(params))], params, max_batch_size=slots)


def test_prompts_that_begin_alike() -> None:
    prompts = [[5 + at % 300 for at in range(2 * BLOCK + 3 + row)] for row in (0, 0, 1, 5, 1, 0)]
    counts = both(prompts, [LONG, SAMPLED] * 3, max_batch_size=2)
    assert counts["served"] > 40


def test_texts_that_have_to_go_for_others() -> None:
    memory = 5 * BLOCK * kv_bytes_per_token(tiny_model("llama"))
    long = replace(LONG, max_tokens=3 * BLOCK)
    options = {"kv_memory_bytes": memory, "max_model_len": 4 * BLOCK, "max_batch_size": 4}
    assert both(["a", "b", "c", "d"], [long] * 4, **options)["served"] > BLOCK


@pytest.mark.parametrize(
    ("proposer", "options", "is_ahead"),
    [
        ("ngram", {}, False),  # the next step may draft
        ("ngram", {"num_draft_tokens": 0}, True),
        ("grammar_forced", {"num_draft_tokens": 0}, False),  # its drafts cost nothing
        ("chain:grammar_forced+ngram", {"num_draft_tokens": 0}, False),
    ],
)
def test_only_where_the_next_step_drafts_nothing(
    proposer: str, options: dict[str, Any], *, is_ahead: bool
) -> None:
    counts = both(PROMPTS, PARAMS, "llama", proposer, max_batch_size=3, **options)
    assert bool(counts["served"]) is is_ahead
    assert is_ahead or not counts["ahead"]


@pytest.mark.parametrize("proposer", ["draft_model", "eagle3"])
@pytest.mark.parametrize("verifier", ["rejection", "coupled"])
def test_steps_that_leave_drafts_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, verifier: str, proposer: str
) -> None:
    turns = iter(range(10**6))

    def num_draft_tokens(*_: Any, **__: Any) -> int:
        return 3 if next(turns) // 9 % 2 else 0

    monkeypatch.setattr(DraftLengthPolicy, "num_draft_tokens", num_draft_tokens)
    monkeypatch.setattr(
        DraftLengthPolicy, "stays_plain", lambda *_: True
    )  # wrong in every ninth step
    model: Any = "llama"
    draft: Any = near_copy(model)
    if proposer == "eagle3":
        model, draft = write_head(tmp_path, proposer, VOCAB_SIZE)
    options = {"drafting": "auto", "max_batch_size": 3, "verifier": verifier}
    counts = both(PROMPTS, PARAMS, model, proposer, draft, **options)
    assert counts["served"] > 10
    assert counts["wasted"] > 0  # how many depends on which step the last text begins in


@pytest.mark.parametrize("proposer", ["grammar_forced", "chain:grammar_forced+ngram"])
def test_steps_that_leave_out_what_is_forced_too(
    monkeypatch: pytest.MonkeyPatch, proposer: str
) -> None:
    """Only they may be launched ahead: K = 0 leaves what a grammar forces."""
    turns = iter(range(10**6))

    def num_draft_tokens(policy: DraftLengthPolicy, *_: Any) -> int:
        return policy.lengths[next(turns) // 9 % 3]

    monkeypatch.setattr(DraftLengthPolicy, "num_draft_tokens", num_draft_tokens)
    monkeypatch.setattr(
        DraftLengthPolicy, "stays_plain", lambda *_: True
    )  # wrong in every ninth step
    options = {"drafting": "auto", "max_batch_size": 3, "verifier": "coupled"}
    counts = both(PROMPTS, PARAMS, "llama", proposer, **options)
    assert 10 < counts["served"] < counts["forwards"] / 2


def test_who_comes_and_who_leaves() -> None:
    """Requests that are cancelled, and that come while a forward is launched."""

    def run() -> Found:
        with make_llm("llama", "none", kernels="packed", max_batch_size=3) as llm:
            return _come_and_go(llm)

    with running_ahead(is_on=False):
        expected = run()
    with running_ahead() as counts:
        assert run() == expected
    assert counts["served"] > 40


def _come_and_go(llm: LLM) -> Found:
    found: Found = []
    stream: Any = llm.stream("The name", replace(LONG, max_tokens=200))
    for at, _ in zip(range(12), stream, strict=False):
        if at % 4 == 3:
            found += found_in(llm.generate([f"{at}", "on"], [SAMPLED, LONG]))
    stream.close()
    return found + found_in(llm.generate(["A", "B", "C", "D"], [LONG] * 4))


def test_nothing_runs_ahead_of_one_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that fails ends its texts; those behind them are whole."""
    with running_ahead(), make_llm("llama", "none", kernels="packed") as llm:
        expected = found_in(llm.generate(["A"], LONG))
        run: Callable[..., Any] = LineTarget.run_ahead
        calls = iter(range(10**6))

        def breaking(target: LineTarget, *arguments: Any) -> Any:
            found = run(target, *arguments)
            if next(calls) == 5:
                raise RuntimeError("the device is gone")
            return found

        monkeypatch.setattr(LineTarget, "run_ahead", breaking)
        (broken,) = llm.generate(["B"], LONG, on_error="return")
        assert "the device is gone" in str(broken.error)
        assert found_in(llm.generate(["A"], LONG)) == expected
