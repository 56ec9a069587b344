"""What speculation emits has the law of plain constrained sampling, token by token written out.

The joint law of the first four tokens is known in closed form (``world.law``, in plain floats). It
is held against 200,000 texts a case, for every kind of draft, every filter and both verifiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from guided_spec import core
from guided_spec.core import DecodeBatch, DraftInFlight, TargetOutput, from_propose
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.sampling import noise
from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.ops.sampling.noise import Stream, exponential_noise, uniform_noise
from guided_spec.ops.sampling.rejection import dense_probs
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.proposers.host_masks import draft_autoregressively
from guided_spec.step import commit, speculative_step
from guided_spec.types import Draft, Verifier
from tests.cases import pairwise
from tests.law.fields import Fields
from tests.law.harness import (
    POLICIES,
    ROWS_AT_ONCE,
    Case,
    Rows,
    adjustments,
    check_law,
    emit,
    verify,
    words,
)
from tests.law.world import (
    EOS,
    LENGTH,
    MIXED,
    PROMPT,
    REDUCED,
    SETTINGS,
    VOCAB_SIZE,
    K,
    legal_tokens,
    number,
    number_of,
    tables,
)
from tests.toys import CPU, ToyCompiled

ROWS = 200_000  # the bugs of test_mutations.py show at half of them
ROWS_BY_HAND = 8_000
BATCH = 80  # of the whole step; fewer mask rows than would go to a thread
VERIFIERS: tuple[Verifier, ...] = ("rejection", "coupled")
LAST = LENGTH + K + 1  # the largest position that noise is asked for


class Remembered:
    """The package's noise of seeds 0 to ROWS - 1, drawn once for all cases."""

    def __init__(self) -> None:
        parts = torch.arange(ROWS).split(ROWS_AT_ONCE)
        self.sample = {
            stream: torch.stack([self._sample(parts, at, stream) for at in range(LAST + 1)])
            for stream in (Stream.SAMPLE, Stream.DRAFT)
        }
        positions = torch.arange(LAST + 1).expand(ROWS_AT_ONCE, -1)
        self.accept = torch.cat([uniform_noise(part, positions, Stream.ACCEPT) for part in parts])

    def _sample(self, parts: Sequence[Tensor], position: int, stream: Stream) -> Tensor:
        at = torch.full((ROWS_AT_ONCE,), position)
        return torch.cat([exponential_noise(part, at, stream, VOCAB_SIZE) for part in parts])

    def exponential(self, seeds: Tensor, positions: Tensor, stream: Stream, size: int) -> Tensor:
        assert size == VOCAB_SIZE
        return self.sample[stream][positions, seeds]

    def uniform(self, seeds: Tensor, positions: Tensor, stream: Stream) -> Tensor:
        assert stream == Stream.ACCEPT
        return self.accept[seeds.unsqueeze(1), positions]


@pytest.fixture(scope="module")
def remembered() -> Remembered:
    return Remembered()


@pytest.fixture
def _quick(remembered: Remembered, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(core, "exponential_noise", remembered.exponential)
    monkeypatch.setattr(noise, "exponential_noise", remembered.exponential)
    monkeypatch.setattr(noise, "uniform_noise", remembered.uniform)
    with torch.inference_mode():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("kind", "setting", "verifier"), pairwise([*POLICIES], [*SETTINGS], VERIFIERS)
)
def test_the_law_of_four_tokens(kind: str, setting: str, verifier: Verifier) -> None:
    case = Case(kind, SETTINGS[setting], verifier)
    check_law(case, emit(case, torch.arange(ROWS)))


@pytest.mark.parametrize("setting", SETTINGS)
def test_coupled_texts_do_not_depend_on_the_draft(setting: str) -> None:
    seeds = torch.arange(2000)
    texts = [emit(Case(kind, SETTINGS[setting], "coupled"), seeds) for kind in POLICIES]
    assert all(torch.equal(texts[0], other) for other in texts[1:])
    assert len(texts[0].unique(dim=0)) > 20


# --- the same by the whole step: matchers, lookahead, commit ---


class Tables:
    """Target and proposer that read the world's tables by the text."""

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, case: Case) -> None:
        self.case = case

    def verify(self, batch: DecodeBatch, flight: DraftInFlight) -> TargetOutput:
        return TargetOutput(verify(nodes_of(batch), flight.draft))

    def propose(self, batch: DecodeBatch, lookahead: Lookahead) -> Draft:
        batch = self.case.drafting(batch)
        vocabulary = REDUCED if self.case.kind == "starved" else None
        texts = [nodes_of(batch)]

        def logits() -> Tensor:
            table = tables().draft[texts[-1]]
            return table if vocabulary is None else table[:, vocabulary.target_ids]

        def forward(token_ids: Tensor) -> Tensor:
            texts.append(number_of(texts[-1], token_ids))
            return logits()

        policy = POLICIES[self.case.kind]
        return draft_autoregressively(logits(), forward, batch, lookahead, policy, vocabulary)

    def release(self, slots: object) -> None:
        del slots


def nodes_of(batch: DecodeBatch) -> Tensor:
    return torch.tensor([number(context[len(PROMPT) :]) for context in batch.contexts])


def whole_batch(
    case: Case, texts: list[list[int]], constraints: list[Constraint], seeds: list[int]
) -> DecodeBatch:
    size, params = len(texts), case.params
    contexts = tuple([*PROMPT, *text] for text in texts)
    prompts = (len(PROMPT),) * size
    rules = [TokenRules(params, bad_words=words(params), stop_ids=(EOS,))] * size
    batch = DecodeBatch(
        slots=tuple(range(size)),
        contexts=contexts,
        prompt_lengths=prompts,
        constraints=tuple(constraints),
        limits=(K,) * size,
        sampling=Sampling.stack([params] * size, seeds, CPU),
        mask_rows=MaskRows(size, K + 1, VOCAB_SIZE, CPU),
        num_draft_tokens=K,
        vocab_size=VOCAB_SIZE,
        device=CPU,
        verifier=case.verifier,
        adjustments=Adjustments.stack(RuleTable.stack(rules, VOCAB_SIZE, CPU), contexts, prompts),
    )
    batch.limits = tuple(case.limits(batch.sampling.seeds, nodes_of(batch)).tolist())
    return batch


def grammar() -> ToyCompiled:
    texts = (*(b"abcde"[at : at + 1] for at in range(EOS)), b"")
    return ToyCompiled(legal_tokens, Vocabulary(texts, (EOS,), VOCAB_SIZE))


def emit_by_hand(case: Case, rows: int) -> Tensor:
    """``emit`` by ``speculative_step`` and ``commit``, a hundred requests a batch."""
    found: list[list[int]] = []
    for start in range(0, rows, BATCH):
        compiled, models = grammar(), Tables(case)
        constraints = [Constraint(compiled) for _ in range(BATCH)]
        texts: list[list[int]] = [[] for _ in range(BATCH)]
        live = list(range(BATCH))
        while live:
            batch = whole_batch(
                case,
                [texts[row] for row in live],
                [constraints[row] for row in live],
                [start + row for row in live],
            )
            step = speculative_step(models, from_propose(models), batch)
            for row, committed in zip(live, commit(batch, step.accepted), strict=True):
                assert committed.error is None
                texts[row] += committed.token_ids
            live = [row for row in live if len(texts[row]) < LENGTH and EOS not in texts[row]]
        found += [[*text, *[EOS] * LENGTH][:LENGTH] for text in texts]
    return torch.tensor(found)


@pytest.mark.slow
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kind", POLICIES)
def test_the_law_of_the_whole_step(kind: str, verifier: Verifier) -> None:
    case = Case(kind, MIXED, verifier)
    texts = emit_by_hand(case, ROWS_BY_HAND)
    assert torch.equal(texts[:1000], emit(case, torch.arange(1000)))
    check_law(case, texts)


@pytest.mark.parametrize("setting", [*SETTINGS, "mixed"])
@pytest.mark.parametrize("kind", POLICIES)
def test_the_harness_drafts_as_the_package_does(kind: str, setting: str) -> None:
    """One step of both: the same drafts, masks, probabilities and rules, to the bit."""
    size = 300
    case = Case(kind, {**SETTINGS, "mixed": MIXED}[setting])
    rows = Rows(case, torch.arange(size))
    rows.step()
    live = rows.live
    texts = [[token for token in row if token >= 0] for row in rows.tokens[live].tolist()]
    constraints = [Constraint(grammar()) for _ in texts]
    for constraint, text in zip(constraints, texts, strict=True):
        constraint.commit(text)
    real = whole_batch(case, texts, constraints, live.tolist())
    lookahead = Lookahead.fork(real.constraints, real.mask_rows, real.limits)
    expected = lookahead.advance(Tables(case).propose(real, lookahead))
    nodes, wide = rows.nodes(live), rows.batch(live)
    wide.limits = real.limits
    fields = Fields(nodes, torch.tensor(real.limits))
    found = case.draft(wide, fields, nodes)
    assert torch.equal(found.num_tokens, expected.num_tokens)
    expected = expected.cut(found.token_ids.shape[1])
    is_drafted = torch.arange(found.token_ids.shape[1]) < found.num_tokens.unsqueeze(1)
    assert torch.equal(found.token_ids[is_drafted], expected.token_ids[is_drafted])
    assert (found.probs is None) == (expected.probs is None)
    if found.probs is not None:
        both = (dense_probs(draft, VOCAB_SIZE)[is_drafted] for draft in (found, expected))
        assert torch.equal(*both)
    width = found.token_ids.shape[1]
    check_masks(fields.finish(width), cast("Tensor", lookahead.finish(width)))
    check_rules(adjustments(case.params, rows.tokens[live]), real.adjustments)


def check_masks(found: Tensor, expected: Tensor) -> None:
    used = (1 << VOCAB_SIZE) - 1
    assert torch.equal(found & used, expected & used)


def check_rules(found: Adjustments | None, expected: Adjustments | None) -> None:
    assert (found is None) == (expected is None)
    if found is None or expected is None:
        return
    for name in ("num_output", "tails", "in_prompt", "counts"):
        one, other = getattr(found, name), getattr(expected, name)
        assert one is other is None or torch.equal(one, other)
    logits = torch.randn(len(found.num_output), K + 1, VOCAB_SIZE)
    drafted = torch.arange(K).expand(len(logits), -1)
    assert torch.equal(found.apply(logits, drafted), expected.apply(logits, drafted))
