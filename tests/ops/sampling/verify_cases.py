"""Verify decisions to compare: cases of every kind, and when two answers differ by rounding alone.

Run as a module under ``TRITON_INTERPRET=1`` it holds the kernels against the reference on the CPU.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import product

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.bitmask import apply_token_bitmask, pack_bitmask
from guided_spec.ops.sampling import verify as decision
from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.rejection import dense_probs, draft_at
from guided_spec.ops.sampling.verify import draw_noise, verify
from guided_spec.ops.sampling.warp import Sampling, VerifyRows, warp
from guided_spec.types import Accepted, Draft, Noise, SamplingParams, Verifier

CPU = torch.device("cpu")
NO = float("-inf")
NEAR = 1e-5  # relative: what rounding may turn


@dataclass(frozen=True)
class Case:
    """The arguments of ``verify``."""

    logits: Tensor
    bitmask: Tensor | None
    draft: Draft
    rows: VerifyRows

    def reference(self, noise: Noise | None = None, sampling: Sampling | None = None) -> Accepted:
        rows = self.rows._replace(
            noise=noise or self.noise(), sampling=sampling or self.rows.sampling
        )
        return verify(self.logits, self.bitmask, self.draft, rows)

    def noise(self) -> Noise:
        return draw_noise(self.rows, self.draft.token_ids.shape[1], self.logits.shape[-1])

    def probs(self) -> Tensor:
        logits = apply_token_bitmask(self.logits, self.bitmask)
        if self.rows.adjustments is not None:
            logits = self.rows.adjustments.apply(logits, self.draft.token_ids)
        return warp(logits, self.rows.sampling)


def unexplained(case: Case, found: Accepted, near: float = NEAR) -> tuple[int, list[int]]:
    """How many requests differ by rounding alone, and which ones differ otherwise."""
    expected = case.reference()
    differs = (found.token_ids != expected.token_ids).any(1)
    differs |= found.num_accepted != expected.num_accepted
    requests: list[int] = differs.nonzero().flatten().tolist()
    others = list(_nudged(case, near)) if requests else []
    wrong = [
        request
        for request in requests
        if not any(_agree(found, other, request) for other in others)
        and not _is_close_race(case, found, expected, request, near)
    ]
    return len(requests) - len(wrong), wrong


def _agree(one: Accepted, other: Accepted, request: int) -> bool:
    is_same = torch.equal(one.token_ids[request], other.token_ids[request])
    return is_same and bool(one.num_accepted[request] == other.num_accepted[request])


def _nudged(case: Case, near: float) -> list[Accepted]:
    """The reference's answers with thresholds and test numbers moved a little."""
    sampling, noise = case.rows.sampling, case.noise()
    return [
        case.reference(
            noise._replace(accept=noise.accept * (1 + test)),
            replace(sampling, top_p=sampling.top_p * (1 + top), min_p=sampling.min_p * (1 + least)),
        )
        for test, top, least in product((0.0, -near, near), repeat=3)
    ]


def _is_close_race(
    case: Case, found: Accepted, expected: Accepted, request: int, near: float
) -> bool:
    """Whether the token drawn is second by no more than rounding."""
    places = (found.token_ids[request] != expected.token_ids[request]).nonzero().flatten().tolist()
    if not places:
        return False
    place, token = places[0], int(found.token_ids[request, places[0]])
    probs, noise = case.probs()[request, place], case.noise().sample[request]
    if token < 0:
        return False
    if case.rows.verifier == "coupled":
        noise = noise[place]
    elif place < int(case.draft.num_tokens[request]):
        if int(found.num_accepted[request]) != place:
            return False
        at = torch.full_like(case.draft.num_tokens, place)
        q = dense_probs(draft_at(case.draft, at), len(probs))[request, 0]
        probs = (probs - q).clamp_min(0)
    values = probs / noise
    return bool(values[token] >= values.max() * (1 - near))


# --- drawn cases ---

PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5, 1e-6]),
    top_k=st.sampled_from([0, 0, 1, 3, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.4, 1.0]),
)
RULED = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    logit_bias=st.sampled_from([(), {0: 1.5, 3: NO}]),
    allowed_token_ids=st.sampled_from([None, (0, 1, 2, 4)]),
    min_tokens=st.sampled_from([0, 3]),
    bad_words=st.sampled_from([(), ((1, 2),), ((0,), (2, 1, 0), (1, 1))]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    presence_penalty=st.sampled_from([0.0, 0.3]),
)


def rules_of(params: list[SamplingParams], size: int, generator: torch.Generator) -> Adjustments:
    """What the requests ask of single tokens, after random texts of the first few tokens."""
    rules = [
        TokenRules(one, tuple(tuple(map(int, word)) for word in one.bad_words), (4,))
        for one in params
    ]
    texts = [torch.randint(0, 4, (5,), generator=generator).tolist() for _ in params]
    table = RuleTable.stack(rules, size, CPU)
    adjustments = Adjustments.stack(table, texts, [2] * len(params))
    assert adjustments is not None
    return adjustments


def make_logits(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random scores. broken: some are NaN or infinite; ties: a few values; flat: all alike."""
    logits = torch.randn(shape, generator=generator) * 3
    if kind == "ties":
        return logits.round()
    if kind == "flat":
        return logits * 0.01
    if kind == "broken":
        at = torch.rand(shape, generator=generator) * shape[-1]
        logits = logits.where(at > 0.3, torch.nan).where(at < shape[-1] - 0.3, torch.inf)
        logits[0] = NO
    return logits


def make_draft(kind: str, logits: Tensor, lengths: Tensor, generator: torch.Generator) -> Draft:
    """drawn: with probabilities. narrow: with those of some tokens, others are certain.

    likely: the argmax. random: any tokens of the vocabulary.
    """
    heads = logits[:, :-1].float().nan_to_num(0.0, 0.0, -9.0)
    batch, depth, size = heads.shape
    if depth == 0:
        return Draft(torch.zeros(batch, 0, dtype=torch.int64), lengths)
    if kind == "likely":
        return Draft(heads.argmax(-1), lengths)
    if kind == "random":
        few = min(size, 5)
        return Draft(torch.randint(0, few, (batch, depth), generator=generator), lengths)
    probs = torch.softmax(heads + torch.randn(heads.shape, generator=generator), -1)
    ids = torch.multinomial(probs.flatten(0, 1), 1, generator=generator)
    draft = Draft(ids.view(batch, depth), lengths, probs)
    return narrowed(draft, max(1, size // 3), generator) if kind == "narrow" else draft


def narrowed(draft: Draft, known: int, generator: torch.Generator) -> Draft:
    """A head's draft that knows ``known`` tokens; those beside them are certain, and others."""
    assert draft.probs is not None
    size, device = draft.probs.shape[-1], draft.probs.device
    tokens = torch.randperm(size, generator=generator, device=device)[:known]
    columns = DraftVocabulary(tokens, size).columns
    assert columns[tokens].tolist() == list(range(known))
    probs = draft.probs[..., tokens]
    probs = probs / probs.sum(-1, keepdim=True).clamp_min(1e-20)
    is_certain = columns[draft.token_ids] < 0
    is_certain |= torch.rand(is_certain.shape, generator=generator, device=device) < 0.2
    return draft._replace(probs=probs, columns=columns, is_certain=is_certain)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Small ones of every kind."""
    batch, depth = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    size = draw(st.integers(5, 200))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    has_rules = draw(st.sampled_from([False, False, True]))
    one = RULED.filter(lambda p: TokenRules(p, (), (4,)).is_used) if has_rules else PARAMS
    params = draw(st.lists(one, min_size=batch, max_size=batch))
    kind = draw(st.sampled_from(["normal", "normal", "ties", "flat", "broken"]))
    logits = make_logits(kind, (batch, depth + 1, size), generator)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    logits = logits.to(dtype)
    if draw(st.booleans()):  # rows of a wider buffer
        wide = torch.full((batch, depth + 1, size + 3), torch.nan, dtype=dtype)
        wide[..., :size] = logits
        logits = wide[..., :size]
    bitmask = None
    share = draw(st.sampled_from([None, 0.02, 0.5, 0.95]))
    if share is not None:
        bitmask = pack_bitmask(torch.rand(logits.shape, generator=generator) < share)
    lengths = torch.tensor(draw(st.lists(st.integers(0, depth), min_size=batch, max_size=batch)))
    how = draw(st.sampled_from(["drawn", "narrow", "likely", "random"]))
    draft = make_draft(how, logits, lengths, generator)
    keys = NoiseKeys(
        torch.randint(0, 2**62, (batch,), generator=generator),
        torch.randint(0, 2**33, (batch,), generator=generator),
    )
    verifier: Verifier = draw(st.sampled_from(["rejection", "coupled"]))
    sampling = Sampling.stack(params, keys.seeds.tolist(), CPU)
    adjustments = rules_of(params, size, generator) if has_rules else None
    return Case(logits, bitmask, draft, VerifyRows(sampling, keys, verifier, adjustments))


def main(max_examples: int) -> None:
    """Hold the kernels against the reference; print how many cases and close calls there were."""
    from guided_spec.ops.sampling import verify_filter_triton as filters
    from guided_spec.ops.sampling import verify_triton

    seen = {"cases": 0, "close": 0}
    capacity, sampled = verify_triton.CAPACITY, filters.SAMPLED

    @settings(
        max_examples=max_examples,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking takes long in the interpreter
        suppress_health_check=list(HealthCheck),
    )
    @given(
        case=cases(),
        is_short=st.booleans(),
        is_wide=st.booleans(),
        size=st.sampled_from([sampled, 64, 16]),
        sureness=st.sampled_from([2.0, 0.2, 0.0]),  # of 0 most brackets of a part are wrong
    )
    def compare(case: Case, size: int, sureness: float, *, is_short: bool, is_wide: bool) -> None:
        verify_triton.CAPACITY = 16 if is_short else capacity
        filters.MANY_PROGRAMS = 8192 if is_wide else 0
        filters.FEW = 3 if is_short else 128
        filters.SAMPLED, filters.SURENESS = size, sureness
        found = verify_triton.verify(case.logits, case.bitmask, case.draft, case.rows)
        close, wrong = unexplained(case, found)
        assert not wrong, (wrong, found, case.reference(), case)
        seen["cases"] += 1
        seen["close"] += close

    compare()
    sys.stdout.write(f"{seen['cases']} {seen['close']}\n")


if __name__ == "__main__":
    assert decision.verify is verify
    main(int(sys.argv[1]))
