"""Texts by guided speculative steps, tens of thousands at once, and the test of their law.

Everything that computes is the package's: the draft loop, bias and penalties, warp, the verifiers
and the noise. The world's tables stand for the models, ``Fields`` for the grammar's host side.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import MaskRows
from guided_spec.ops.sampling.adjust import Adjustments, Bans, Penalties, RuleTable, TokenRules
from guided_spec.ops.sampling.verify import verify as decide
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.proposers.draft_session import DraftRows
from guided_spec.types import Draft, DraftPolicy, SamplingParams, Verifier
from tests.law.fields import Fields, WideMasks
from tests.law.world import (
    EOS,
    LENGTH,
    PROMPT,
    REDUCED,
    VOCAB_SIZE,
    K,
    flat,
    law,
    number_of,
    tables,
)
from tests.toys import CPU, chi_square_p_value

POLICIES: dict[str, DraftPolicy] = {
    "one_hot": "mask",
    "sampled": "mask",
    "unmasked": "validate",
    "shorter": "mask",
    "starved": "mask",
}
ROWS_AT_ONCE = 20_000  # so that their tensors stay in the caches
UNLIKELY = 1e-6


@dataclass(frozen=True)
class Case:
    """How drafts are made, how texts are sampled, and who decides."""

    kind: str
    params: SamplingParams
    verifier: Verifier = "rejection"

    def limits(self, seeds: Tensor, nodes: Tensor) -> Tensor:
        """int64 [B]: how long the drafts after these texts may be."""
        full = torch.full_like(nodes, K)
        return (seeds + nodes) % (K + 1) if self.kind == "shorter" else full

    def drafting(self, batch: DecodeBatch) -> DecodeBatch:
        """As the drafter has it: "one_hot" drafts without randomness, as n-grams do."""
        if self.kind != "one_hot":
            return batch
        greedy = torch.zeros_like(batch.sampling.temperature)
        sampling = replace(batch.sampling, temperature=greedy, all_greedy=True)
        return replace(batch, sampling=sampling)

    def draft(self, batch: DecodeBatch, fields: Fields, nodes: Tensor) -> Draft:
        """By the package's draft loop, with the world's draft table for a model."""
        batch = self.drafting(batch)
        vocabulary = REDUCED if self.kind == "starved" else None
        lookahead = cast("Lookahead", fields)
        masks = WideMasks(DraftRows.from_batch(batch, lookahead, POLICIES[self.kind]), vocabulary)

        def logits() -> Tensor:
            found = tables().draft[nodes]
            return found if vocabulary is None else found[:, REDUCED.target_ids]

        def forward(token_ids: Tensor) -> Tensor:
            nonlocal nodes
            nodes = number_of(nodes, token_ids)
            return logits()

        masks.draft(logits(), forward)
        return masks.finish()


class Rows:
    """The texts so far, and one step of all those that go on.

    tokens: int64 [rows, LENGTH + K], -1 where there is none yet.
    """

    def __init__(self, case: Case, seeds: Tensor) -> None:
        self.case = case
        self.seeds = seeds
        self.tokens = torch.full((len(seeds), LENGTH + K), -1)
        self.lengths = torch.zeros(len(seeds), dtype=torch.int64)

    @property
    def live(self) -> Tensor:
        """Which rows have neither ended nor got all their tokens."""
        is_ended = (self.tokens == EOS).any(1)
        return ((self.lengths < LENGTH) & ~is_ended).nonzero().squeeze(1)

    def nodes(self, live: Tensor) -> Tensor:
        """The numbers of the live texts."""
        found = torch.zeros_like(live)
        for column in self.tokens[live].unbind(1):
            found = torch.where(column >= 0, number_of(found, column), found)
        return found

    def batch(self, live: Tensor) -> DecodeBatch:
        """What the engine would make of the live rows."""
        size, params = len(live), self.case.params
        one = Sampling.stack([params], [0], CPU)
        columns = {
            name: getattr(one, name).expand(size)
            for name in ("temperature", "top_k", "top_p", "min_p")
        }
        lengths = (self.lengths[live] + len(PROMPT)).tolist()
        contexts = [[0] * length for length in range(LENGTH + len(PROMPT))]  # only counted
        return DecodeBatch(
            slots=(0,) * size,
            contexts=tuple(contexts[length] for length in lengths),
            prompt_lengths=(len(PROMPT),) * size,
            constraints=(CONSTRAINED,) * size,
            limits=(K,) * size,
            sampling=replace(one, **columns, seeds=self.seeds[live]),
            mask_rows=MaskRows(1, K + 1, VOCAB_SIZE, CPU),
            num_draft_tokens=K,
            vocab_size=VOCAB_SIZE,
            device=CPU,
            verifier=self.case.verifier,
            adjustments=adjustments(params, self.tokens[live]),
        )

    def step(self) -> None:
        """What ``speculative_step`` and ``commit`` do."""
        live = self.live
        batch, nodes = self.batch(live), self.nodes(live)
        limits = self.case.limits(batch.sampling.seeds, nodes)
        batch.limits = tuple(limits.tolist())
        fields = Fields(nodes, limits)
        draft = self.case.draft(batch, fields, nodes)
        width = draft.token_ids.shape[1]
        rows = batch.verify_rows(batch.verify_noise(width))
        accepted = decide(verify(nodes, draft), fields.finish(width), draft, rows)
        assert bool((accepted.token_ids[:, 0] >= 0).all()), "a dead end"
        self._commit(live, accepted.token_ids)

    def _commit(self, live: Tensor, token_ids: Tensor) -> None:
        is_over = torch.zeros(len(live), dtype=torch.bool)
        for column in token_ids.unbind(1):
            kept = ~is_over & (column >= 0)
            at = self.lengths[live[kept]]
            self.tokens[live[kept], at] = column[kept]
            self.lengths[live[kept]] = at + 1
            is_over |= ~kept | (column == EOS)


class _Constrained:
    """Stands where the draft loop asks whether a request has a grammar."""


CONSTRAINED: Any = _Constrained()


def verify(nodes: Tensor, draft: Draft) -> Tensor:
    """The target's forward: [B, K + 1, V] logits after each prefix of the draft."""
    texts = [nodes]
    for column in draft.token_ids.unbind(1):
        texts.append(number_of(texts[-1], column))
    return tables().target[torch.stack(texts, 1)]


def emit(case: Case, seeds: Tensor) -> Tensor:
    """int64 [rows, LENGTH]: the text of each seed; one that ended goes on with EOS."""
    texts = []
    for part in seeds.split(ROWS_AT_ONCE):
        rows = Rows(case, part)
        while len(rows.live):
            rows.step()
        texts.append(rows.tokens[:, :LENGTH])
    tokens = torch.cat(texts)
    return torch.where(tokens >= 0, tokens, EOS)


def check_law(case: Case, texts: Tensor) -> None:
    """Fail if texts [rows, LENGTH] have another law; ``pytest -rP`` shows how far they are off."""
    exact = law(case.params)
    counts = torch.bincount(flat(texts), minlength=len(exact))
    variation = float((counts / len(texts) - exact).abs().sum() / 2)
    p_value = chi_square_p_value(counts, exact)
    found = f"p = {p_value:.1e}, total variation {variation:.4f}"
    sys.stdout.write(f"{found}\n")
    assert p_value > UNLIKELY, found


# --- the rules of all rows, without a Python object for each ---


def adjustments(params: SamplingParams, tokens: Tensor) -> Adjustments | None:
    """``Adjustments.stack`` after the prompt and ``tokens`` [B, N], -1 behind a text's end."""
    rules = TokenRules(params, bad_words=words(params), stop_ids=(EOS,))
    one = RuleTable.stack([rules], VOCAB_SIZE, CPU)
    if one is None:
        return None
    size, table = len(tokens), repeat(one, len(tokens))
    lengths = (tokens >= 0).sum(1)
    texts = torch.cat([torch.tensor(PROMPT).expand(size, -1), tokens], 1)
    ends = (lengths + len(PROMPT)).unsqueeze(1) + torch.arange(-table.depth, 0)
    tails = torch.where(ends >= 0, texts.gather(1, ends.clamp_min(0)), -1)
    in_prompt = counts = None
    if table.penalties is not None:
        is_token = (tokens >= 0).float()
        counts = torch.zeros(size, VOCAB_SIZE).scatter_add_(1, tokens.clamp_min(0), is_token)
        in_prompt = torch.zeros(size, VOCAB_SIZE).index_fill_(1, torch.tensor(PROMPT), 1.0) > 0
    return Adjustments(table, lengths, tails, in_prompt, counts)


def words(params: SamplingParams) -> tuple[tuple[int, ...], ...]:
    """Bad words that were given as tokens."""
    return tuple(tuple(word) for word in params.bad_words if not isinstance(word, str))


def repeat(table: RuleTable, size: int) -> RuleTable:
    """The table of ``size`` requests that ask for the same as the only one of ``table``."""
    bans, penalties = table.bans, table.penalties
    if bans is not None:
        count = len(bans.owners)
        owners = torch.arange(size).repeat_interleave(count)
        bans = Bans(
            owners, bans.tokens.repeat(size), bans.prefixes.repeat(size, 1), bans.until.repeat(size)
        )
    if penalties is not None:
        penalties = Penalties(*(column.expand(size, 1, 1) for column in penalties))
    return replace(
        table,
        rules=table.rules * size,
        requests=tuple(range(size)),
        index=torch.arange(size),
        batch_size=size,
        bias=None if table.bias is None else table.bias.expand(size, -1),
        bans=bans,
        penalties=penalties,
    )
