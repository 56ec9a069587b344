"""Adjustments against a slow reference that takes one row and one token after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.types import SamplingParams

NO = float("-inf")
CPU = torch.device("cpu")
V = 7
EOS = 6


class Case(NamedTuple):
    """One request: its rules, its text, and the draft behind it."""

    rules: TokenRules
    prompt: list[int]
    output: list[int]
    drafted: list[int]


def rules(bad_words: Sequence[Sequence[int]] = (), **params: Any) -> TokenRules:
    words = tuple(tuple(word) for word in bad_words)
    return TokenRules(SamplingParams(bad_words=words, **params), words, (EOS,))


def adjusted(cases: Sequence[Case], logits: Tensor, first: int | Tensor = 0) -> Tensor:
    table = RuleTable.stack([case.rules for case in cases], logits.shape[-1], CPU)
    contexts = [case.prompt + case.output for case in cases]
    adjustments = Adjustments.stack(table, contexts, [len(case.prompt) for case in cases])
    if adjustments is None:
        return logits
    return adjustments.apply(logits, torch.tensor([case.drafted for case in cases]), first)


def reference(case: Case, row: int, logits: Sequence[float]) -> list[float]:
    """What the logits after ``row`` draft tokens become."""
    params = case.rules.params
    output = case.output + case.drafted[:row]
    text = case.prompt + output
    bias = dict(params.logit_bias)
    found = []
    for token, score in enumerate(logits):
        score += bias.get(token, 0.0)
        for word in case.rules.bad_words:
            if token == word[-1] and text[len(text) - len(word) + 1 :] == list(word[:-1]):
                score = NO
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            score = NO
        if len(output) < params.min_tokens and token in case.rules.stop_ids:
            score = NO
        if token in text:
            penalty = params.repetition_penalty
            score = score / penalty if score > 0 else score * penalty
        score -= params.frequency_penalty * output.count(token)
        score -= params.presence_penalty * (token in output)
        found.append(score)
    return found


TOKENS = st.integers(0, V - 1)
RULES = st.builds(
    rules,
    logit_bias=st.dictionaries(TOKENS, st.sampled_from([NO, -2.5, -0.25, 1.0, 3.0]), max_size=3),
    bad_words=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=3),
    allowed_token_ids=st.none() | st.lists(TOKENS, min_size=1),
    min_tokens=st.integers(0, 5),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.25, 2.0]),
    frequency_penalty=st.sampled_from([-1.0, 0.0, 0.5]),
    presence_penalty=st.sampled_from([-0.25, 0.0, 1.5]),
)
ONE_RULE = st.sampled_from(
    [
        rules(),
        rules(logit_bias={1: 2.0}),
        rules(bad_words=[[0, 1], [2]]),
        rules(allowed_token_ids=[0, 1]),
        rules(min_tokens=2),
        rules(repetition_penalty=2.0),
        rules(frequency_penalty=0.5),
        rules(presence_penalty=0.5),
    ]
)
FEW = st.integers(0, 2)  # so that words and repetitions happen


def cases(num_draft: int) -> st.SearchStrategy[list[Case]]:
    case = st.builds(
        Case,
        RULES | ONE_RULE,
        st.lists(FEW, min_size=1, max_size=3),
        st.lists(FEW, max_size=4),
        st.lists(FEW, min_size=num_draft, max_size=num_draft),
    )
    return st.lists(case, min_size=1, max_size=4)


def some_logits(batch: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(batch, rows, V, generator=generator)
    return logits.masked_fill(torch.rand(logits.shape, generator=generator) < 0.2, NO)


@given(st.integers(0, 4).flatmap(cases))
def test_every_row_is_the_reference(batch: list[Case]) -> None:
    rows = len(batch[0].drafted) + 1
    logits = some_logits(len(batch), rows)
    before = logits.clone()
    found = adjusted(batch, logits)
    expected = [
        [reference(case, row, logits[index, row].tolist()) for row in range(rows)]
        for index, case in enumerate(batch)
    ]
    torch.testing.assert_close(found, torch.tensor(expected))
    assert torch.equal(logits, before)
    assert bool((found[logits == NO] == NO).all())


@given(st.integers(1, 4).flatmap(cases), st.data())
def test_any_rows_at_any_place(batch: list[Case], data: Any) -> None:
    """Rows from ``first`` on, one for all or each its own, are those of the whole."""
    width = len(batch[0].drafted)
    logits = some_logits(len(batch), width + 1)
    whole = adjusted(batch, logits)
    first = data.draw(st.integers(0, width))
    assert torch.equal(adjusted(batch, logits[:, first:], first), whole[:, first:])
    firsts = data.draw(st.lists(st.integers(0, width), min_size=len(batch), max_size=len(batch)))
    ragged = torch.tensor(firsts)
    index = torch.arange(len(batch))
    found = adjusted(batch, logits[index, ragged].unsqueeze(1), ragged)
    assert torch.equal(found[:, 0], whole[index, ragged])


@given(st.integers(0, 3).flatmap(cases))
def test_a_request_is_the_same_alone(batch: list[Case]) -> None:
    logits = some_logits(len(batch), len(batch[0].drafted) + 1)
    together = adjusted(batch, logits)
    for index, case in enumerate(batch):
        alone = adjusted([case], logits[index : index + 1])
        assert torch.equal(alone[0], together[index])


def test_nobody_asks_for_anything() -> None:
    plain = rules()
    assert not plain.is_used
    assert RuleTable.stack([plain, None], V, CPU) is None
    assert Adjustments.stack(None, [[1]], [1]) is None


EACH: list[dict[str, Any]] = [
    {"logit_bias": {1: 1.0}},
    {"bad_words": [[0, 1]]},
    {"allowed_token_ids": [1]},
    {"min_tokens": 3},
    {"repetition_penalty": 1.5},
    {"frequency_penalty": 1.0},
    {"presence_penalty": 1.0},
]


@pytest.mark.parametrize("params", EACH, ids=[next(iter(one)) for one in EACH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_others_keep_their_bits(params: dict[str, Any], dtype: torch.dtype) -> None:
    logits = some_logits(3, 3).to(dtype)
    logits[:, :, 2] = -0.0
    batch = [
        Case(rules(), [1, 1], [2], [1, 2]),
        Case(rules(**params), [1, 0], [2], [0, 1]),
        Case(rules(), [0], [1, 2, 2], [2, 2]),
    ]
    found = adjusted(batch, logits)
    assert found.dtype == torch.float32
    kept = found[[0, 2]].view(torch.int32)
    assert torch.equal(kept, logits[[0, 2]].float().view(torch.int32))
    assert not torch.equal(found[1], logits[1].float())


@pytest.mark.parametrize("padding", [0, 1, 5, -1, V, 10**6])
def test_padding_is_harmless(padding: int) -> None:
    asked = rules(bad_words=[[1, 2]], repetition_penalty=2.0, frequency_penalty=1.0, min_tokens=4)
    logits = some_logits(1, 5)
    short = adjusted([Case(asked, [0], [1], [2, 1])], logits[:, :3])
    padded = adjusted([Case(asked, [0], [1], [2, 1, padding, padding])], logits)
    assert torch.equal(padded[:, :3], short)
    assert not padded.isnan().any()


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 2.0])
def test_repetition_is_that_of_transformers(penalty: float) -> None:
    generator = torch.Generator().manual_seed(1)
    prompt, output, drafted = (torch.randint(40, (n,), generator=generator) for n in (6, 5, 4))
    logits = torch.randn(1, 5, 40, generator=generator)
    asked = rules(repetition_penalty=penalty)
    found = adjusted([Case(asked, prompt.tolist(), output.tolist(), drafted.tolist())], logits)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    for row in range(5):
        text = torch.cat([prompt, output, drafted[:row]]).unsqueeze(0)
        torch.testing.assert_close(found[:, row], theirs(text, logits[:, row]))


def test_only_the_output_has_frequency_and_presence() -> None:
    asked = rules(frequency_penalty=0.5, presence_penalty=0.25)
    found = adjusted([Case(asked, [1, 1, 2], [2], [2, 3])], torch.zeros(1, 3, V))[0]
    assert found[:, 1].tolist() == [0, 0, 0]
    assert found[:, 2].tolist() == [-0.75, -1.25, -1.25]
    assert found[:, 3].tolist() == [0, 0, -0.75]


def test_the_end_is_open_from_min_tokens_on() -> None:
    """Two tokens of output and a draft of four: the fifth row is the first that may end."""
    asked = rules(min_tokens=5)
    found = adjusted([Case(asked, [1], [2, 2], [0, 0, 0, 0])], torch.zeros(1, 5, V))[0]
    assert found[:, EOS].tolist() == [NO, NO, NO, 0, 0]
    assert bool((found[:, :EOS] == 0).all())


@pytest.mark.parametrize(
    ("word", "banned"),
    [
        ([4], [(0, 4), (1, 4), (2, 4), (3, 4)]),  # one token: everywhere
        ([3, 0], [(0, 0)]),  # begins in the output
        ([1, 3, 0], [(0, 0)]),  # begins in the prompt
        ([3, 0, 1], [(1, 1)]),  # across the output and the draft
        ([0, 1], [(1, 1)]),  # inside the draft
        ([0, 1, 2], [(2, 2)]),
        ([0, 1, 2, 5], [(3, 5)]),
        ([5, 5, 5, 1, 3, 0], []),  # longer than the text
        ([2, 0], [(3, 0)]),
    ],
)
def test_a_bad_word_is_forbidden_where_it_would_end(
    word: list[int], banned: list[tuple[int, int]]
) -> None:
    other = Case(rules(bad_words=[[2, 2, 2, 2]]), [1], [], [0, 0, 0])
    case = Case(rules(bad_words=[word]), [1], [3], [0, 1, 2])
    found = adjusted([other, case], torch.zeros(2, 4, V))
    assert [tuple(place) for place in (found[1] == NO).nonzero().tolist()] == banned
    assert bool((found[0] == 0).all())


def test_bad_words_that_share_their_end() -> None:
    """One that applies bans the token, whatever the others say, in any order."""
    words = [[0, 2], [1, 2], [5, 2], [3, 1, 2]]
    for order in (words, words[::-1]):
        case = Case(rules(bad_words=order), [0], [1], [0, 5, 3, 1])
        found = adjusted([case], torch.ones(1, 5, V))[0]
        assert found[:, 2].tolist() == [NO, NO, NO, 1, NO]


def test_nothing_is_left() -> None:
    asked = rules(allowed_token_ids=[3], bad_words=[[3]], repetition_penalty=2.0)
    found = adjusted([Case(asked, [3], [3], [3])], torch.ones(1, 2, V))
    assert bool((found == NO).all())


def test_no_setting_leaves_float32() -> None:
    """The widest values together give numbers, so that no probability becomes NaN."""
    for bias, penalty in ((1e9, 0.01), (-1e9, 100.0), (1e9, 100.0)):
        asked = rules(logit_bias={1: bias}, repetition_penalty=penalty, frequency_penalty=-2.0)
        found = adjusted([Case(asked, [1], [1], [1])], torch.full((1, 2, V), 3e4))
        assert bool(found.isfinite().all())


def test_what_may_have_forbidden_a_token() -> None:
    asked = rules(bad_words=[[1]], allowed_token_ids=[2], min_tokens=3, logit_bias={2: NO, 3: 1.0})
    table = RuleTable.stack([None, asked, rules(presence_penalty=1.0)], V, CPU)
    adjustments = Adjustments.stack(table, [[1], [1], [1]], [1, 1, 1])
    assert adjustments is not None
    names = ["logit_bias", "bad_words", "allowed_token_ids", "min_tokens"]
    assert adjustments.bans_after(1, 2) == names
    assert adjustments.bans_after(1, 3) == names[:3]
    assert adjustments.bans_after(0, 0) == adjustments.bans_after(2, 0) == []
