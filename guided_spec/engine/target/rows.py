"""The tokens that a verify forward reads of each text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight
from guided_spec.models.hidden_states import HiddenStates
from guided_spec.models.packed.packed_lm import Rows
from guided_spec.ops.host import to_device


class FedRows(NamedTuple):
    """token_ids: int64 [B, K + 1], the last committed token and the draft. rows: where they go."""

    token_ids: Tensor
    rows: Rows


def fed_rows(batch: DecodeBatch, flight: DraftInFlight, max_length: int) -> FedRows:
    """The tokens [B, K + 1] that verify a step's drafts, and the rows they are written to.

    max_length: positions of a slot, beyond which no row is read. A shorter draft is padded: the
    padding is read like tokens, and overwritten before anything can see it. That spares a download
    of the draft's length.
    """
    last = to_device([[context[-1]] for context in batch.contexts], batch.device)
    token_ids = torch.cat([last, flight.draft.token_ids], 1)
    starts = [len(context) - 1 for context in batch.contexts]
    pairs = zip(flight.most, starts, strict=True)
    counts = [min(1 + count, max_length - start) for count, start in pairs]
    return FedRows(token_ids, Rows(batch.slots, starts, counts))


def push_verified(
    kept: HiddenStates, batch: DecodeBatch, num_kept: Sequence[int], states: Tensor
) -> None:
    """Push the hidden states of what a step keeps.

    num_kept: verified tokens of each text that stay, from its last committed one on. states: of the
    verify forward, [B, K + 1, X].
    """
    starts = [len(context) - 1 for context in batch.contexts]
    kept.push_rows(batch.slots, starts, batch.contexts, num_kept, states)
