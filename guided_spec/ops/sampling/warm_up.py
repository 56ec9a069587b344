"""The verify decision once for every kernel it has, so that no step compiles one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.ops.sampling.noise import NoiseKeys
from guided_spec.ops.sampling.warp import Sampling, VerifyRows
from guided_spec.types import Draft, SamplingParams, Verifier

# What has kernels of its own: greedy or not, and filters.
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9),
)
_RULES = TokenRules(SamplingParams(logit_bias={0: 1.0}), bad_words=((0,),))  # stand for all others
_COLUMNS = 16  # of a draft's probabilities: kernels ask whether they are a multiple of 16


class Decisions(NamedTuple):
    """What the steps of an engine decide.

    batch_size: requests at most. longest_draft: tokens at most. vocab_size: of the target.
    has_own_vocabulary: whether the drafter draws from fewer tokens; None: both may be.
    dtype, device: of the target's logits.
    """

    batch_size: int
    longest_draft: int
    vocab_size: int
    has_own_vocabulary: bool | None
    verifier: Verifier
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor on the device of the warm-up."""
        return torch.empty(shape, dtype=dtype, device=self.device)


def launch_all(decisions: Decisions) -> None:
    """Launch each kernel that ``verify`` may need, over anything. Needs Triton.

    To be called where launches only compile: what the kernels would read is undefined.
    """
    from guided_spec.ops.sampling.verify_tiles_triton import WIDTHS  # imported here: needs triton

    lengths = [min(width - 1, decisions.longest_draft) for width in WIDTHS]
    sizes = {(1, length) for length in lengths} | {(decisions.batch_size, min(lengths))}
    for (batch_size, length), params in product(sizes, SAMPLINGS):
        for draft in drafts_of_every_kind(decisions, batch_size, length):
            _verify(decisions, draft, params)


def drafts_of_every_kind(decisions: Decisions, batch_size: int, length: int) -> Iterator[Draft]:
    """Drafts [B, K] without probabilities, and of a whole and a reduced vocabulary."""
    token_ids = decisions.empty(batch_size, length, dtype=torch.int64)
    draft = Draft(token_ids, decisions.empty(batch_size, dtype=torch.int64))
    yield draft
    if length == 0:
        return
    draft = draft._replace(probs=decisions.empty(batch_size, length, _COLUMNS, dtype=torch.float32))
    if decisions.has_own_vocabulary is not True:
        yield draft
    if decisions.has_own_vocabulary is not False:
        yield draft._replace(columns=decisions.empty(decisions.vocab_size, dtype=torch.int32))


def _verify(decisions: Decisions, draft: Draft, params: SamplingParams) -> None:
    """With rules for single tokens, and without."""
    from guided_spec.ops.sampling.verify_triton import verify  # as above

    batch_size, length = draft.token_ids.shape
    vocab_size, device = decisions.vocab_size, decisions.device
    logits = decisions.empty(batch_size, length + 1, vocab_size, dtype=decisions.dtype)
    sampling = Sampling.stack([params] * batch_size, [0] * batch_size, device)
    noise = NoiseKeys(sampling.seeds, sampling.seeds)
    table = RuleTable.stack([_RULES, *[None] * (batch_size - 1)], vocab_size, device)
    adjustments = Adjustments.stack(table, [[]] * batch_size, [0] * batch_size)
    for rules in (None, adjustments):
        verify(logits, None, draft, VerifyRows(sampling, noise, decisions.verifier, rules))
