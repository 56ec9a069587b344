"""Small batches of different requests that come and go, under chains, by the package's own step.

Their laws are written out from the target's logits. The batches are small on purpose: in a large
one somebody always drafts all K tokens, and what one row does to another is hidden.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import torch

from guided_spec.core import DecodeBatch, Proposer
from guided_spec.masks.constraint import Constraint
from guided_spec.step import commit, speculative_step
from guided_spec.types import DraftPolicy, SamplingParams
from tests.loops import target_probs
from tests.toys import (
    EOS,
    TEXTS,
    Rule,
    ToyCompiled,
    ToyTarget,
    chi_square_p_value,
    text_rule,
    toy_batch,
)

K = 4
LONGEST = 7  # tokens of a text
SCALE = 0.2  # of target and drafter: so flat that equal noise nearly gives equal letters
SAMPLED = SamplingParams(temperature=1.0)


def letters(*parts: str) -> list[bytes]:
    """One letter of each part, in all ways: ``letters("ab", ":")`` is ``a:`` and ``b:``."""
    return ["".join(one).encode() for one in product(*parts)]


def rule(*texts: bytes) -> Rule:
    return cache(text_rule(texts))


# What was drafted decides where the grammar's turn comes: behind the first letter, behind the third
# if it is a or b, behind the first if it is a or b.
RULES = (
    rule(*letters("abcd", ":", "abcd")),
    rule(*letters("abcd", "abcd", "ab", "1", "ab"), *letters("abcd", "abcd", "cd", "ab")),
    rule(*letters("ab", '"', ",", "ab", "cd"), *letters("cd", "abcd", "ab")),
)
PROMPTS = ((1,), (3,), (2,))  # of one length, so that positions are alike


@dataclass
class Member:
    """A request of a batch.

    kind: its place in ``RULES`` and ``PROMPTS``. key: the seed of its noise. joins: the step before
    which it comes.
    """

    kind: int
    key: int
    joins: int = 0
    policy: DraftPolicy = "mask"

    def __post_init__(self) -> None:
        self.tokens = [*PROMPTS[self.kind]]
        self.constraint = Constraint(ToyCompiled(RULES[self.kind]))

    @property
    def output(self) -> list[int]:
        return self.tokens[len(PROMPTS[self.kind]) :]


@cache
def target() -> ToyTarget:
    return ToyTarget(3, scale=SCALE)


def write(members: Sequence[Member], proposer: Proposer) -> list[str]:
    """The texts of all members, who leave the batch when theirs is complete."""
    number = 0
    while left := {row: one for row, one in enumerate(members) if EOS not in one.output}:
        running = {row: one for row, one in left.items() if one.joins <= number}
        _step(running, proposer)
        proposer.release([row for row, one in running.items() if EOS in one.output])
        number += 1
    return [spelled(member.output) for member in members]


def _step(running: dict[int, Member], proposer: Proposer) -> None:
    members = list(running.values())
    limits = [LONGEST - len(member.output) for member in members]
    batch = _batch(running, limits)
    step = speculative_step(target(), proposer, batch)
    committed = commit(batch, step.accepted)
    for member, row in zip(members, committed, strict=True):
        assert row.error is None
        member.tokens += row.token_ids


def _batch(running: dict[int, Member], limits: list[int]) -> DecodeBatch:
    members = list(running.values())
    batch = toy_batch(
        [member.tokens for member in members],
        [member.constraint for member in members],
        k=K,
        limits=limits,
        params=[SAMPLED] * len(members),
        seeds=[member.key for member in members],
    )
    batch.slots = tuple(running)
    batch.policies = tuple(member.policy for member in members)
    batch.prompt_lengths = tuple(len(PROMPTS[member.kind]) for member in members)
    return batch


# --- the laws, from the target alone ---


Told = Callable[[str], str]
"""What of a text is looked at."""

TOLD: tuple[Told, ...] = (
    lambda text: text[2],
    lambda text: text[2] + text[-1],
    lambda text: text[0] + text[-1],
)


def law(kind: int, told: Told) -> dict[str, float]:
    """What is told of the texts of a kind, and its probability."""
    found: dict[str, float] = defaultdict(float)
    for text, mass in whole_law(kind).items():
        found[told(text)] += mass
    return dict(found)


@cache
def whole_law(kind: int) -> dict[str, float]:
    """All texts of a kind and their probabilities."""
    found: dict[str, float] = {}
    open_texts: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while open_texts:
        text, mass = open_texts.pop()
        if EOS in text:
            found[spelled(text)] = mass
            continue
        following = target_probs(target(), RULES[kind], PROMPTS[kind], text).tolist()
        open_texts += [((*text, token), mass * p) for token, p in enumerate(following) if p > 0]
    return found


def spelled(tokens: Sequence[int]) -> str:
    return b"".join(TEXTS[token] for token in tokens).decode()


def p_value(found: Sequence[str], exact: dict[str, float]) -> float:
    """How likely outcomes so far from their law are."""
    counts = Counter(found)
    assert set(counts) <= set(exact)
    observed = torch.tensor([counts[outcome] for outcome in exact])
    return chi_square_p_value(observed, torch.tensor(list(exact.values())))
