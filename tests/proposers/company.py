"""Requests over toys that come and go in one batch, and what each of them drafts and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from guided_spec.config import EngineConfig
from guided_spec.core import DecodeBatch, DraftInFlight, Proposer
from guided_spec.guide import Batches, GuidedText
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.lookahead import Lookahead
from guided_spec.proposers.draft_session import DraftRows
from guided_spec.proposers.host_masks import HostMasks
from guided_spec.step import commit, speculative_step
from guided_spec.types import DraftPolicy, SamplingParams
from tests.toys import CPU, VOCAB_SIZE, VOCABULARY, Rule, ToyCompiled, ToyTarget

CONFIG = EngineConfig(num_draft_tokens=4, max_forced_tokens=4)
PROMPT = (0, 1, 2, 0, 1)  # in which an n-gram finds something
Logits = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True)
class Member:
    """A request of a company.

    rule: its grammar; None for free text. params: of its sampling. joins: the step before which it
    comes.
    """

    rule: Rule | None
    params: Mapping[str, Any] = field(default_factory=dict)
    joins: int = 0


class Written(NamedTuple):
    """What became of a member: the draft of each of its steps, and the tokens of its text."""

    drafts: list[list[int]]
    token_ids: list[int]


class ToyModel(Proposer):
    """Drafts with a model as ``DraftModel`` does: the draft may be in flight when it is handed out.

    logits: of the token behind a text, [V].
    """

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, logits: Logits, policy: DraftPolicy = "mask") -> None:
        self._logits, self._policy = logits, policy

    @property
    def ends_chains(self) -> bool:
        """As of a draft model."""
        return self._policy == "validate"

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """Up to K tokens behind each draft."""
        del carry
        pairs = zip(batch.contexts, lookahead.drafted, strict=True)
        texts = [[*context, *drafted] for context, drafted in pairs]

        def logits() -> Tensor:
            return torch.stack([self._logits(text) for text in texts])

        def forward(token_ids: Tensor) -> Tensor:
            for text, token in zip(texts, token_ids.tolist(), strict=True):
                text.append(token)
            return logits()

        masks = HostMasks(DraftRows.from_batch(batch, lookahead, self._policy), None)
        masks.draft(logits(), forward)
        return masks.in_flight()

    def release(self, slots: Sequence[int]) -> None:
        """Nothing is kept."""


@cache
def _target() -> ToyTarget:
    return ToyTarget(3, scale=0.5)


class Company:
    """Members that write in one batch, all of them with the same noise.

    So a member whose draft depends on another one foretells what its own noise decides.
    """

    def __init__(
        self, members: Sequence[Member], seed: int, target: ToyTarget | None = None
    ) -> None:
        self._members, self._target = members, target or _target()
        self._batches = Batches(CONFIG, len(members), VOCAB_SIZE, CPU)
        self.texts = [self._text(slot, member, seed) for slot, member in enumerate(members)]
        self.drafts: list[list[list[int]]] = [[] for _ in members]
        self._number = 0

    def write(self, proposer: Proposer) -> list[Written]:
        """All texts, up to their ends."""
        while any(text.ended is None for text in self.texts):
            self.step(proposer)
        pairs = zip(self.drafts, self.texts, strict=True)
        return [Written(drafts, text.output_ids) for drafts, text in pairs]

    def step(self, proposer: Proposer) -> None:
        """One step of those that have joined and have not ended."""
        texts = [
            text
            for text, member in zip(self.texts, self._members, strict=True)
            if text.ended is None and member.joins <= self._number
        ]
        self._number += 1
        if not texts:
            return
        batch = self._batches.make(texts, CONFIG.num_draft_tokens)
        step = speculative_step(self._target, proposer, batch)
        lengths = step.draft.num_tokens.tolist()
        rows = zip(step.draft.token_ids.tolist(), lengths, strict=True)
        for text, (tokens, length) in zip(texts, rows, strict=True):
            self.drafts[text.slot].append(tokens[:length])
        for text, committed in zip(texts, commit(batch, step.accepted), strict=True):
            text.append(committed)
        proposer.release([text.slot for text in texts if text.ended is not None])

    def _text(self, slot: int, member: Member, seed: int) -> GuidedText:
        params = SamplingParams(**{"temperature": 1.0, "max_tokens": 9, **member.params})
        text = GuidedText.begin(PROMPT, params, VOCABULARY, max_length=40, seed=seed)
        text.slot, text.noise_key = slot, seed
        if member.rule is not None:
            text.constraint = Constraint(ToyCompiled(member.rule))
        return text


def alone(member: Member, seed: int, proposer: Proposer) -> Written:
    """What a member writes by itself."""
    (written,) = Company([replace(member, joins=0)], seed).write(proposer)
    return written
