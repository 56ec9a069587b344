"""The decisions of steps once for every kernel they have, so that no step compiles one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.adjust import Adjustments, RuleTable, TokenRules
from guided_spec.ops.sampling.noise import DraftNoise, NoiseKeys, Stream
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


class Choices(NamedTuple):
    """What the steps of a drafter choose.

    target_ids: int64 [D] on the device, which target token each draft token is; None: the target's
    own ``vocab_size``. dtype: of the drafter's logits, which are float32 where they are adjusted.
    """

    target_ids: Tensor | None
    vocab_size: int
    verifier: Verifier
    dtype: torch.dtype
    device: torch.device


def launch_choices(choices: Choices) -> None:
    """Launch each kernel that ``choose_draft`` may need, over anything. Needs Triton."""
    from guided_spec.ops.sampling.draft_choice import choose_draft  # as above
    from guided_spec.ops.sampling.draft_choice_triton import choose_draft as choose_fused

    target_ids, vocab_size, verifier, dtype, device = choices
    columns = vocab_size if target_ids is None else len(target_ids)
    words = num_mask_words(vocab_size)
    mask = torch.full((1, words), -1, dtype=torch.int32, device=device)
    for params, kind, given in product(SAMPLINGS, {dtype, torch.float32}, (None, mask)):
        logits = torch.zeros(1, columns, dtype=kind, device=device)
        sampling = Sampling.stack([params], [0], device)
        noise, stream = None, Stream.of_drafts(verifier)
        if not sampling.all_greedy:
            noise = DraftNoise(sampling.seeds, sampling.seeds, stream, vocab_size)
        choose = choose_draft if params.top_k else choose_fused
        choose(logits, given, target_ids, sampling, noise)


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
