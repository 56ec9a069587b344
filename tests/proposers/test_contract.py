"""What every proposer must do, whoever wrote it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guided_spec import proposers
from guided_spec.core import DecodeBatch, Proposer, ProposerContext, from_propose
from guided_spec.errors import ConfigError, UnknownProposerError
from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.bitmask import unpack_bitmask
from guided_spec.ops.sampling.rejection import dense_probs
from guided_spec.proposers import build_proposer, register_proposer
from guided_spec.step import commit, speculative_step
from guided_spec.types import DRAFT_POLICIES, Draft, SamplingParams
from tests.learned_heads import TARGETS, HeadedTarget, write_head
from tests.loops import plain_greedy, speculate, toy_states
from tests.models.tiny import build
from tests.toys import (
    VOCAB_SIZE,
    Rule,
    ToyCompiled,
    ToyDrafter,
    ToyMatcher,
    ToyTarget,
    hashed_rule,
    text_rule,
    toy_batch,
    toy_context,
)

# "toy_registered" and "toy_entry_point" are other people's; a new built-in joins by itself.
NAMES = sorted(name for name in proposers.PROPOSERS if name != "chain")
OTHERS = ["toy_registered", "toy_entry_point"]
CHAINS = [
    "chain:grammar_forced+ngram",
    "chain:ngram+grammar_forced",
    "chain:grammar_forced+suffix",
    "chain:grammar_forced+ngram+toy_registered",
    "chain:grammar_forced+draft_model",
    "chain:grammar_forced+eagle3:validate",
    "chain:grammar_forced:start+eagle3",
    "chain:grammar_forced+ngram+deepseek_mtp",
    "chain:auto+draft_model:validate",
    "chain:none+none",
]
POLICIES = [
    f"{name}:{policy}"
    for name in ("draft_model", "eagle3", "dflash", "pard")
    for policy in DRAFT_POLICIES
]
SPECS = [*NAMES, *OTHERS, *CHAINS, *POLICIES, "chain:grammar_forced+dspark"]
TARGET = ToyTarget(2)
RULES: list[Rule | None] = [
    text_rule([b'{"ab":1}', b'{"ab":0,"cd":1}']),
    hashed_rule(3),
    None,
    hashed_rule(4),
    None,
    text_rule([b"abcd"]),
]
LIMITS = [6, 6, 6, 0, 0, 2]
CONTEXTS = [[4], [0, 1, 2, 0, 1], [0, 1, 2, 0, 1], [0], [1], [3]]


class EntryPoint:
    name = "toy_entry_point"

    def load(self) -> Any:
        return lambda _: ToyDrafter(ToyTarget(8))


def fake_entry_points(*, group: str, name: str = EntryPoint.name) -> list[EntryPoint]:
    assert group == proposers.ENTRY_POINT_GROUP
    return [EntryPoint()] if name == EntryPoint.name else []


@pytest.fixture(autouse=True)
def _others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(proposers, "entry_points", fake_entry_points)
    register_proposer("toy_registered", lambda _: ToyDrafter(ToyTarget(7)))
    yield
    del proposers.PROPOSERS["toy_registered"]


Make = Callable[[str], Proposer]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, HeadedTarget]:
    return {
        method: write_head(tmp_path_factory.mktemp("heads") / method, method, VOCAB_SIZE)
        for method in TARGETS
    }


@pytest.fixture
def make(heads: dict[str, HeadedTarget]) -> Make:
    """Builds a proposer by its spec, with the target and the draft that its name asks for."""

    def build_it(spec: str) -> Proposer:
        headed = next((heads[name] for name in re.split("[:+]", spec) if name in heads), None)
        if headed is not None:
            return build_proposer(spec, toy_context(target=headed.target, draft=headed.draft))
        draft: Any = None
        if "draft_model" in spec or "pard" in spec:
            draft = build("llama", vocab_size=VOCAB_SIZE)
            draft.config.pard_token = 3
        return build_proposer(spec, toy_context(draft=draft))

    return build_it


def make_batch(proposer: Proposer, k: int, temperature: float) -> DecodeBatch:
    constraints = [None if rule is None else Constraint(ToyCompiled(rule)) for rule in RULES]
    params = [SamplingParams(temperature=temperature)] * len(RULES)
    batch = toy_batch(CONTEXTS, constraints, k=k, limits=LIMITS, params=params)
    batch.states = toy_states(proposer, batch)
    return batch


def count_fills(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, int]]:
    fills: Counter[tuple[int, int]] = Counter()
    fill = MaskRows.fill

    def counting(rows: MaskRows, matcher: GrammarMatcher, request: int, depth: int) -> None:
        fills[request, depth] += 1
        fill(rows, matcher, request, depth)

    monkeypatch.setattr(MaskRows, "fill", counting)
    return fills


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_contract(
    monkeypatch: pytest.MonkeyPatch, make: Make, spec: str, k: int, temperature: float
) -> None:
    fills = count_fills(monkeypatch)
    proposer = make(spec)
    batch = make_batch(proposer, k, temperature)
    with torch.inference_mode():
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        draft = proposer.begin(batch, lookahead).finish()
    check_shapes(draft, batch)
    lists = [
        row[:length]
        for row, length in zip(draft.token_ids.tolist(), draft.num_tokens.tolist(), strict=True)
    ]
    for drafted, refused, row in zip(lookahead.drafted, lookahead.refused, lists, strict=True):
        assert row == drafted or ("validate" in spec and row == [*drafted, refused])
    lookahead.start()
    bitmask = lookahead.finish(draft.token_ids.shape[1])
    assert bitmask is not None
    check_probs(draft, None if "validate" in spec else bitmask)
    assert set(fills.values()) <= {1}
    for rule, constraint, row in zip(RULES, batch.constraints, lookahead.drafted, strict=True):
        if rule is not None and constraint is not None:
            original, fork = constraint._original.own_matcher, constraint._fork.text.own_matcher
            assert isinstance(original, ToyMatcher)
            assert isinstance(fork, ToyMatcher)
            assert original.tokens == []
            assert fork.tokens == row
            assert all(token in rule(tuple(row[:at])) for at, token in enumerate(row))
    proposer.release(batch.slots)


def check_shapes(draft: Draft, batch: DecodeBatch) -> None:
    size, width = draft.token_ids.shape
    assert size == len(batch)
    assert width < batch.mask_rows.depths
    assert draft.token_ids.dtype == draft.num_tokens.dtype == torch.int64
    assert draft.num_tokens.shape == (size,)
    assert bool(((draft.token_ids >= 0) & (draft.token_ids < VOCAB_SIZE)).all())
    assert bool((draft.num_tokens <= torch.tensor(batch.limits)).all())
    assert bool((draft.num_tokens <= width).all())
    if draft.probs is not None:
        assert draft.probs.shape[:2] == (size, width)
        assert draft.columns is not None or draft.probs.shape[2] == VOCAB_SIZE
        assert draft.columns is None or draft.columns.shape == (VOCAB_SIZE,)
        assert draft.is_certain is None or draft.is_certain.shape == (size, width)


def check_probs(draft: Draft, bitmask: torch.Tensor | None) -> None:
    """Every drafted token could be drawn from its probabilities, which keep to the mask if any."""
    if draft.probs is None:
        return
    dense = dense_probs(draft, VOCAB_SIZE)
    everything = torch.ones_like(dense, dtype=torch.bool)
    legal = everything if bitmask is None else unpack_bitmask(bitmask, VOCAB_SIZE)
    for row, length in enumerate(draft.num_tokens.tolist()):
        for at in range(length):
            probs = dense[row, at]
            assert probs[draft.token_ids[row, at]] > 0
            assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
            assert bool((probs[~legal[row, at]] == 0).all())


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("spec", SPECS)
def test_greedy_text_is_the_targets(make: Make, spec: str, k: int) -> None:
    with torch.inference_mode():
        found = speculate(TARGET, make(spec), RULES, [4], length=12, k=k)
    assert found == [plain_greedy(TARGET, rule, [4], 12) for rule in RULES]


@pytest.mark.parametrize("spec", SPECS)
def test_sampled_text_is_legal(make: Make, spec: str) -> None:
    proposer = make(spec)
    batch = make_batch(proposer, 4, 1.0)
    with torch.inference_mode():
        step = speculative_step(TARGET, proposer, batch)
    for rule, committed in zip(RULES, commit(batch, step.accepted), strict=True):
        assert committed.error is None
        assert committed.token_ids
        for at, token in enumerate(committed.token_ids):
            assert rule is None or token in rule(tuple(committed.token_ids[:at]))


def test_draft_model_drafts(make: Make) -> None:
    proposer = make("draft_model")
    batch = make_batch(proposer, 4, 0.0)
    with torch.inference_mode():
        lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
        draft = proposer.begin(batch, lookahead).finish()
    assert draft.num_tokens.tolist()[2:] == [4, 0, 0, 2]


def test_names() -> None:
    assert {*NAMES, *OTHERS, "chain"} == set(proposers.proposer_names())
    with pytest.raises(UnknownProposerError, match="must be one of .*toy_entry_point"):
        build_proposer("nobody", toy_context())
    for name in ("ngram", "toy_registered", "", "a:b", "a+b"):
        with pytest.raises(ConfigError, match="name="):
            register_proposer(name, lambda _: ToyDrafter(TARGET))


def test_the_argument_stands_behind_the_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def factory(context: ProposerContext) -> Proposer:
        seen.append(context.argument)
        return from_propose(ToyDrafter(TARGET))

    monkeypatch.setitem(proposers.PROPOSERS, "toy", factory)
    build_proposer("toy:one:two", toy_context())
    build_proposer("toy", toy_context())
    assert seen == ["one:two", ""]


def test_the_first_draft_row_is_the_models_own(make: Make) -> None:
    batch = make_batch(from_propose(ToyDrafter(TARGET)), 1, 1.0)
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    draft = make("toy_registered").begin(batch, lookahead).finish()
    logits = ToyTarget(7).logits(CONTEXTS[1])
    assert draft.probs is not None
    rule = RULES[1]
    assert rule is not None
    legal = torch.tensor([token in rule(()) for token in range(VOCAB_SIZE)])
    expected = torch.softmax(logits.masked_fill(~legal, float("-inf")), -1)
    torch.testing.assert_close(draft.probs[1, 0], expected)


def test_what_has_begin_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    begins = SimpleNamespace(aux_hidden_layers=(), begin=print, release=print)
    monkeypatch.setitem(proposers.PROPOSERS, "begins", lambda _: begins)
    with pytest.raises(ConfigError, match="with begin, also Proposer as its base"):
        build_proposer("begins", toy_context())


def test_what_is_optional_has_a_default() -> None:
    proposer = from_propose(ToyDrafter(TARGET))
    batch = make_batch(proposer, 1, 0.0)
    lookahead = Lookahead.fork(batch.constraints, batch.mask_rows, batch.limits)
    assert list(proposer.capture()) == []
    assert not proposer.learns
    assert proposer.interrupts(batch, lookahead) is None
