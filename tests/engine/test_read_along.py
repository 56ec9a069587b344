"""Prompts that the verify forward of other requests reads: the texts are what they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from guided_spec.core import DecodeBatch, PromptPiece
from guided_spec.engine.outputs import Completion
from guided_spec.engine.request import State
from guided_spec.engine.steps import planner
from guided_spec.engine.steps.in_flight import Piece
from guided_spec.engine.steps.planner import Planner
from guided_spec.engine.target.line_target import LineTarget
from guided_spec.engine.target.prompts import MIN_PROMPT_TOKENS, prompt_tokens_per_step
from guided_spec.models.packed.graph_pool import SIZES, bucket
from guided_spec.models.packed.slot_head import PackedSlotHead
from guided_spec.proposers import takes_draft
from guided_spec.proposers.learned_head import LearnedHead
from guided_spec.types import Draft, SamplingParams
from tests.engine.reads import Read, watch_reads
from tests.engine.test_equality import PARAMS, PROMPTS
from tests.learned_heads import HeadedTarget
from tests.models.speculation import prompts_of
from tests.models.tiny import make_line_lm
from tests.tiny_llm import make_llm, tiny_model

# No grammar decides when a text comes: lengths say who joins whom.
FREE = [
    SamplingParams(max_tokens=5 + 3 * (row % 3), temperature=0, ignore_eos=True)
    for row in range(len(PROMPTS))
]
PROPOSERS = [
    "none",
    "ngram",
    "eagle3",
    "eagle3:validate",
    "chain:grammar_forced+eagle3",
    "chain:grammar_forced:start+eagle3",
]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """Of all forwards, as they are launched."""
    return watch_reads(monkeypatch)


def tokens_of(reads: Sequence[Read], *, is_alone: bool) -> list[int]:
    """Prompt tokens of each forward that reads any, by itself or along with drafts."""
    return [one.num_tokens for one in reads if one.prompts and one.is_alone == is_alone]


def write(
    headed: HeadedTarget, proposer: str, params: list[SamplingParams], **options: Any
) -> list[list[Completion]]:
    """More requests than slots, so that prompts come while others decode."""
    draft = headed.draft if takes_draft(proposer) else None
    with make_llm(headed.target, proposer, draft, max_batch_size=3, **options) as llm:
        outputs = llm.generate(PROMPTS, params, on_error="return")
    assert [output.error for output in outputs] == [None] * len(PROMPTS)
    return [list(output.completions) for output in outputs]


def tokens(found: list[list[Completion]]) -> list[list[tuple[list[int], str]]]:
    return [[(c.token_ids, c.finish_reason) for c in completions] for completions in found]


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_the_texts_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
    headed: HeadedTarget,
    reads: list[Read],
    proposer: str,
    temperature: float,
) -> None:
    params = [replace(p, temperature=temperature, seed=row) for row, p in enumerate(PARAMS)]
    found = write(headed, proposer, params, kernels="packed")
    assert len(tokens_of(reads, is_alone=False)) > 1
    # The first ones, while nobody decodes: by themselves where a head drafts for the first token.
    is_alone = temperature > 0 and "eagle3" in proposer
    separate = len(tokens_of(reads, is_alone=True))
    assert (separate >= 1) == is_alone
    reads.clear()
    monkeypatch.setattr(planner, "prompt_tokens_per_step", lambda *_: 0)
    monkeypatch.setattr(Planner, "decodes_with_prompt", lambda *_: False)
    assert tokens(found) == tokens(write(headed, proposer, params, kernels="packed"))
    assert not tokens_of(reads, is_alone=False)
    assert len(tokens_of(reads, is_alone=True)) > separate


@pytest.mark.parametrize("proposer", ["eagle3", "chain:ngram+eagle3"])
def test_a_head_reads_a_prompt_as_the_target_does(
    monkeypatch: pytest.MonkeyPatch, headed: HeadedTarget, proposer: str
) -> None:
    """In pieces, so that nobody waits for all of it; and drafts the same, also behind a prefix."""
    params = [replace(p, temperature=1.0, seed=row, max_tokens=30) for row, p in enumerate(FREE)]
    prompts: list[Any] = [
        PROMPTS[0],
        *([5 + at % 60 for at in range(length)] for length in (120, 150, 90)),
    ]
    monkeypatch.setattr(planner, "prompt_tokens_per_step", lambda *_: 8)
    longest, found, read = list[int](), list[Any](), PackedSlotHead.read

    def reading(head: Any, slots: Any, tokens: Any, states: Any) -> None:
        longest[-1] = max(longest[-1], *map(len, tokens))
        read(head, slots, tokens, states)

    monkeypatch.setattr(PackedSlotHead, "read", reading)
    for _ in range(2):
        longest.append(0)
        options: Any = {"kernels": "packed", "max_batch_size": 2}
        with make_llm(headed.target, proposer, headed.draft, **options) as llm:
            outputs = llm.generate(prompts, params[:4])
        found.append(tokens([list(output.completions) for output in outputs]))
        monkeypatch.setattr(Planner, "begun", lambda *_: [])
        monkeypatch.setattr(LearnedHead, "_read_prompts", lambda *_: None)
    assert found[0] == found[1]
    assert longest[0] < longest[1]


@pytest.mark.parametrize("proposer", ["eagle3", "chain:ngram+eagle3"])
def test_no_draft_waits_for_the_prompt_that_a_step_has_read(
    monkeypatch: pytest.MonkeyPatch, headed: HeadedTarget, proposer: str
) -> None:
    """The head reads it behind the forward; a draft finds all of it read."""
    read, waited = LearnedHead._read, list[int]()

    def reading(head: Any, batch: DecodeBatch) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(head, "_read_unread", partial(noting, head._read_unread))
            read(head, batch)

    def noting(read_unread: Any, unread: Any) -> None:
        waited.extend(len(one.token_ids) for one in unread.values())
        read_unread(unread)

    monkeypatch.setattr(LearnedHead, "_read", reading)
    params = [replace(p, seed=row) for row, p in enumerate(PARAMS)]
    found = list[Any]()
    for _ in range(2):
        waited.clear()
        found.append(tokens(write(headed, proposer, params, kernels="packed")))
        found.append(sorted(waited))
        monkeypatch.setattr(LearnedHead, "_read_prompts", lambda *_: None)
    assert found[0] == found[2]
    assert sum(found[1]) < sum(found[3])


def test_samples_wait_for_the_prompt_they_share(headed: HeadedTarget, reads: list[Read]) -> None:
    params = [replace(p, n=2, temperature=1.0, seed=row) for row, p in enumerate(PARAMS)]
    found = write(headed, "ngram", params, kernels="packed")
    assert len(tokens_of(reads, is_alone=False)) > 1
    assert tokens(found) == tokens(write(headed, "ngram", params, kernels="stock"))


def test_long_prompts_are_read_in_pieces(
    monkeypatch: pytest.MonkeyPatch, headed: HeadedTarget, reads: list[Read]
) -> None:
    """No text waits long for a prompt: beside others, it is read a few tokens at a time."""
    monkeypatch.setattr(planner, "prompt_tokens_per_step", lambda *_: 2)
    monkeypatch.setattr(Planner, "decodes_with_prompt", lambda *_: False)  # the first ones
    found = write(headed, "eagle3", PARAMS, kernels="packed")
    along = tokens_of(reads, is_alone=False)
    assert max(along) == 2
    assert max(tokens_of(reads, is_alone=True)) > 2
    monkeypatch.setattr(planner, "prompt_tokens_per_step", lambda *_: 512)
    reads.clear()
    assert tokens(write(headed, "eagle3", PARAMS, kernels="packed")) == tokens(found)
    longer = tokens_of(reads, is_alone=False)
    assert max(longer) > 2
    assert len(longer) < len(along)
    assert tokens(write(headed, "none", PARAMS, kernels="stock")) == tokens(found)


def test_the_more_prompts_there_are_the_longer_do_texts_wait() -> None:
    assert prompt_tokens_per_step([64 * 3000], 64 * 3000, 10_000, 0, 4096, SIZES) == 3000
    assert prompt_tokens_per_step([32 * 3000, 32 * 3000], 64 * 3000, 10_000, 0, 4096, SIZES) == 3000
    assert prompt_tokens_per_step([64 * 3000], 64 * 3000, 1, 0, 8192, SIZES) == 2 * 3000
    assert prompt_tokens_per_step([8 * 900] * 8, 64 * 900, 4, 0, 4096, SIZES) == 3 * 900
    assert prompt_tokens_per_step([200_000], 200_000, 4, 0, 2048, SIZES) == 2048
    assert (
        prompt_tokens_per_step([5000], 64 * 3000, 10_000, 0, 4096, SIZES) == 3000
    )  # as at the start


def test_many_short_prompts_are_read_sooner_than_one_that_is_as_long() -> None:
    few, many, own = [16 * 1000], [4 * 64] * 64, 6 * 64
    assert sum(few) < sum(many)
    assert prompt_tokens_per_step(few, sum(few), 64, own, 4096, SIZES) <= MIN_PROMPT_TOKENS
    assert prompt_tokens_per_step(many, sum(many), 64, own, 4096, SIZES) > 3 * MIN_PROMPT_TOKENS


@example([1], 64)
@example([1] * 64, 64)
@given(st.lists(st.integers(1, 8000), min_size=1, max_size=64), st.integers(1, 64))
def test_prompts_fill_the_graph_that_they_share(unread: list[int], num_decoding: int) -> None:
    """A token more would take as long as the next graph does, and fewer would save nothing."""
    own = 6 * num_decoding
    found = prompt_tokens_per_step(unread, sum(unread), num_decoding, own, 4096, SIZES)
    ends = sum(end <= found for end in accumulate(unread))
    total = found + own + ends
    full = min(bucket(min(total, SIZES[-1])), SIZES[-2])
    gap = bucket(full + 1) - full  # to the next graph, which these do not fill
    assert MIN_PROMPT_TOKENS - max(gap, 128) < found <= 4096
    if total <= SIZES[-1]:
        assert bucket(total) <= total + len(unread)  # but for prompts that end a little behind it


def test_few_tokens_are_read_whatever_graphs_there_are() -> None:
    assert prompt_tokens_per_step([100], 100, 3, 18, 4, SIZES) == 2
    assert prompt_tokens_per_step([100], 100, 100, 600, 8, SIZES) == 8


@pytest.mark.parametrize(
    ("proposer", "verifier", "sampling"),
    [
        ("none", "rejection", {"temperature": 1.0, "seed": 1}),
        ("eagle3", "rejection", {"temperature": 0.0, "seed": 1}),
        ("eagle3", "rejection", {"temperature": 1.0, "seed": 1}),
        ("eagle3", "rejection", {"temperature": 1.0, "seed": None}),
        ("eagle3", "coupled", {"temperature": 1.0, "seed": 1}),
    ],
)
def test_a_prompt_and_its_first_token_take_one_forward(
    monkeypatch: pytest.MonkeyPatch,
    headed: HeadedTarget,
    reads: list[Read],
    proposer: str,
    verifier: str,
    sampling: dict[str, Any],
) -> None:
    """Unless the text that a seed asks for depends on what is drafted."""
    params = replace(PARAMS[0], **sampling)
    has_seed, is_sampled = sampling["seed"] is not None, sampling["temperature"] > 0
    found, alone, forwards = list[list[int]](), list[int](), list[int]()
    for _ in range(2):
        options: Any = {"verifier": verifier, "kernels": "packed", "prefill_tokens": 1024}
        with make_llm(headed.target, proposer, headed.draft, **options) as llm:
            (output,) = llm.generate([PROMPTS[0]], [params])
        found.append(output.completions[0].token_ids)
        alone.append(len(tokens_of(reads, is_alone=True)))
        forwards.append(len(reads))
        reads.clear()
        monkeypatch.setattr(Planner, "decodes_with_prompt", lambda *_: False)
    assert not has_seed or found[0] == found[1]
    is_drafted = proposer == "eagle3" and verifier == "rejection" and is_sampled and has_seed
    assert alone == [int(is_drafted), 1]
    if proposer == "none":
        assert forwards[0] == forwards[1] - 1


def test_so_they_do_beside_others(
    monkeypatch: pytest.MonkeyPatch, headed: HeadedTarget, reads: list[Read]
) -> None:
    found = write(headed, "none", FREE, kernels="packed")
    assert not tokens_of(reads, is_alone=True)
    forwards, decodes_with_prompt = len(reads), Planner.decodes_with_prompt

    def while_nobody_decodes(self: Planner, piece: Piece) -> bool:
        is_alone = not self.scheduler.running(State.DECODE)
        return is_alone and decodes_with_prompt(self, piece)

    monkeypatch.setattr(Planner, "decodes_with_prompt", while_nobody_decodes)
    reads.clear()
    assert tokens(write(headed, "none", FREE, kernels="packed")) == tokens(found)
    assert forwards < len(reads)


def test_who_joins_keeps_no_head_from_reading_ahead(
    monkeypatch: pytest.MonkeyPatch, headed: HeadedTarget
) -> None:
    """For the others: what the target reads in this step alone it reads later."""
    read_ahead, sizes = LearnedHead.read_ahead, list[tuple[int, int]]()

    def reading(head: LearnedHead, batch: DecodeBatch, *rest: Any) -> Any:
        carry: Any = read_ahead(head, batch, *rest)
        sizes.append((len(carry.rows) if carry else 0, len(batch)))
        return carry

    monkeypatch.setattr(LearnedHead, "read_ahead", reading)
    write(headed, "eagle3", FREE, kernels="packed")
    assert any(0 < read < batch for read, batch in sizes)


class Known(NamedTuple):
    """A draft of these tokens, as ``LineTarget`` reads it."""

    draft: Draft
    most: tuple[int, ...]
    serve_mailbox: None = None


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
@torch.inference_mode()
def test_a_row_is_what_two_forwards_give(name: str) -> None:
    """Slots 2 and 0 begin behind what is left of their prompts, slot 1 goes on, 3 only reads."""
    model, slots = tiny_model(name), (0, 1, 2)
    texts = prompts_of([9, 6, 30], 300, 0)
    drafts, most = torch.tensor([[0, 0], [7, 8], [9, 0]]), (0, 2, 1)
    known: Any = Known(Draft(drafts, torch.tensor(most)), most)
    later = [[*text, 1, 2, 3] for text in texts]  # once the step is committed
    begun = [PromptPiece(1, 0, texts[1][:-1], later[1])]
    begun.append(PromptPiece(2, 0, texts[2][:10], later[2]))
    other = [5, 6, 7, 8]
    rest = [PromptPiece(2, 10, texts[2][10:-1], later[2]), PromptPiece(3, 0, other[:-1], other)]
    rest.append(PromptPiece(0, 0, texts[0][:-1], later[0]))
    outputs, states = list[Any](), list[Any]()
    for is_apart in (True, False):
        lm = make_line_lm(model, num_slots=4, max_length=60, longest_draft=3)
        target = LineTarget(lm, (1, -1))
        target.read(begun)
        if is_apart:
            target.read(rest)
        batch: Any = SimpleNamespace(
            slots=slots, contexts=texts, device=lm.device, prompts=[] if is_apart else rest
        )
        outputs.append(target.verify(batch, known))
        target.commit(batch, [0, 1, 0], outputs[-1])
        pulled = [target.states.pull(slot, 0) for slot in range(4)]
        states.append([one.states for one in pulled if one is not None])
    assert outputs[0].counts == outputs[1].counts == [1, 3, 2]
    for row, count in enumerate([1, 3, 2]):
        for part in range(2):
            found, wanted = (output[part][row, :count] for output in reversed(outputs))
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    assert [len(one) for one in states[0]] == [9, 7, 30, 3]
    for found, wanted in zip(*reversed(states), strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("proposer", ["none", "ngram"])
def test_a_linear_state_takes_a_prompt_and_its_first_token(
    reads: list[Read], proposer: str
) -> None:
    """In one row; but a prompt that something is drafted behind is read before."""
    found = []
    for kernels in ("packed", "stock"):
        with make_llm("qwen3_next", proposer, max_batch_size=3, kernels=kernels) as llm:
            found.append(llm.generate(PROMPTS, PARAMS))
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]
    assert len(tokens_of(reads, is_alone=False)) > 1
    assert any(one.is_alone for one in reads) == (proposer == "ngram")
