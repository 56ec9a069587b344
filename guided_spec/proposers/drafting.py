"""What proposers share: draft policies, how drafts and proposers are put together, no draft."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from guided_spec.core import (
    DecodeBatch,
    DraftInFlight,
    FinishedDraft,
    Proposer,
    ProposerContext,
)
from guided_spec.kinds import require_one_of
from guided_spec.masks.lookahead import Lookahead
from guided_spec.ops.host import pad_ids, to_device
from guided_spec.ops.sampling.rejection import dense_probs
from guided_spec.types import DRAFT_POLICIES, Draft, DraftPolicy


def host_draft(batch: DecodeBatch, token_ids: Sequence[Sequence[int]]) -> Draft:
    """A one-hot draft on the batch's device from [B] lists of token ids."""
    ids = pad_ids(token_ids, max(map(len, token_ids), default=0))
    lengths = to_device([len(row) for row in token_ids], batch.device)
    return Draft(ids.to(batch.device, non_blocking=True), lengths)


def no_draft(batch: DecodeBatch) -> Draft:
    """[B, 0] tokens."""
    return host_draft(batch, [()] * len(batch))


def draft_ends(batch: DecodeBatch, lookahead: Lookahead, rows: Sequence[int]) -> list[int]:
    """[B]: tokens that the drafts hold at most once the requests of ``rows`` have drafted."""
    ends, is_open = [len(drafted) for drafted in lookahead.drafted], lookahead.is_open
    limits, most, count = batch.limits, batch.mask_rows.depths - 1, batch.num_draft_tokens
    for row in rows:
        if is_open[row]:
            ends[row] = min(ends[row] + count, limits[row], most)
    return ends


def shared_prompts(batch: DecodeBatch) -> list[list[int]]:
    """The rows of each prompt that the target read once for several requests of the batch."""
    if len(set(batch.prefills)) == len(batch.prefills):
        return []
    groups: dict[Hashable, list[int]] = {}
    for row, prefill in enumerate(batch.prefills):
        groups.setdefault(prefill, []).append(row)
    return [rows for rows in groups.values() if len(rows) > 1]


def concatenate(first: Draft, second: Draft) -> Draft:
    """Each request's tokens of ``first``, then those of ``second``; no sync."""
    batch, left = first.token_ids.shape
    if left == 0:
        return second
    width = left + second.token_ids.shape[1]
    device = first.token_ids.device
    columns = torch.arange(width, device=device)
    index = first.num_tokens.unsqueeze(1) + columns[: width - left]
    parts = [(first, columns[:left].expand(batch, -1)), (second, index)]
    ids = torch.zeros(batch, width, dtype=torch.int64, device=device)
    for draft, at in parts:
        ids.scatter_(1, at, draft.token_ids)
    joined = Draft(ids, first.num_tokens + second.num_tokens)
    if first.probs is None and second.probs is None:
        return joined
    if first.probs is not None and second.probs is not None and first.columns is not second.columns:
        parts = [(_over_target(draft), at) for draft, at in parts]
    return _with_probs(joined, parts)


def _with_probs(joined: Draft, parts: Sequence[tuple[Draft, Tensor]]) -> Draft:
    """parts: what was joined, and where each token of it went, int64 [B, its width]."""
    source = next(draft for draft, _ in parts if draft.probs is not None)
    assert source.probs is not None
    size = source.probs.shape[-1]
    probs = torch.zeros(*joined.token_ids.shape, size, device=joined.token_ids.device)
    is_certain = torch.ones_like(joined.token_ids, dtype=torch.bool)
    for draft, at in parts:
        is_certain.scatter_(1, at, _certain(draft))
        if draft.probs is not None:
            probs.scatter_(1, at.unsqueeze(-1).expand(-1, -1, size), draft.probs)
    return joined._replace(probs=probs, columns=source.columns, is_certain=is_certain)


def _certain(draft: Draft) -> Tensor:
    if draft.probs is not None and draft.is_certain is not None:
        return draft.is_certain
    return torch.full_like(draft.token_ids, draft.probs is None, dtype=torch.bool)


def _over_target(draft: Draft) -> Draft:
    """``draft`` with probabilities [B, K, V] for each of the target's tokens."""
    if draft.columns is None:
        return draft
    probs = dense_probs(draft, len(draft.columns))
    return draft._replace(probs=probs, columns=None)


def read_policy(argument: str, default: DraftPolicy) -> DraftPolicy:
    """The policy after the colon of a proposer's name; ``default`` where there is none.

    Raises ConfigError for another word.
    """
    if argument == "":
        return default
    require_one_of("draft policy", argument, DRAFT_POLICIES)
    return argument  # type: ignore[return-value]


def used_policies(batch: DecodeBatch, policy: DraftPolicy) -> list[DraftPolicy]:
    """[B]: what each request drafts under; policy: of those that do not ask for one."""
    return [own or policy for own in batch.policies or (None,) * len(batch)]


class NoDraft(Proposer):
    """Proposes nothing, so that every step yields one token."""

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, context: ProposerContext | None = None) -> None:
        del context

    def begin(
        self, batch: DecodeBatch, lookahead: Lookahead, carry: object | None = None
    ) -> DraftInFlight:
        """An empty draft, [B, 0]."""
        del lookahead, carry
        return FinishedDraft(no_draft(batch), (0,) * len(batch))

    def may_draft(self, num_draft_tokens: int) -> bool:
        """False: it never drafts."""
        del num_draft_tokens
        return False

    def release(self, slots: Sequence[int]) -> None:
        """Does nothing: no state is kept."""
