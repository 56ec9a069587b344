"""``python -m tests.ops.warmed_up``: what decisions compile after the warm-up, as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import product

import torch

from guided_spec.ops import launch_triton
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.draft_choice_triton import choose_draft
from guided_spec.ops.sampling.noise import DraftNoise, Stream
from guided_spec.ops.sampling.warm_up import Choices, Decisions, launch_all, launch_choices
from guided_spec.ops.sampling.warp import Sampling
from guided_spec.types import SamplingParams
from tests.ops.ahead import CPU, LONGEST, VOCAB_SIZE, Hopper, compile_for, decide_all

DRAFT_VOCABULARIES = (None, torch.arange(32_000))


def choose_all() -> None:
    """Under masks and without, of logits as they are and as adjusted ones are."""
    for batch, target_ids in product((1, 2, 48), DRAFT_VOCABULARIES):
        columns = VOCAB_SIZE if target_ids is None else len(target_ids)
        mask = torch.empty(batch, num_mask_words(VOCAB_SIZE), dtype=torch.int32)
        for dtype, temperature in product((torch.bfloat16, torch.float32), (0.0, 0.7)):
            params = [SamplingParams(temperature=temperature)] * batch
            sampling = Sampling.stack(params, [0] * batch, CPU)
            noise = DraftNoise(sampling.seeds, sampling.seeds, Stream.DRAFT, VOCAB_SIZE)
            logits = torch.empty(batch, columns, dtype=dtype)
            for given in (None, mask):
                choose_draft(logits, given, target_ids, sampling, noise)


def main() -> None:
    made = compile_for(Hopper())
    launch_triton._is_served = lambda _: True  # type: ignore[assignment]
    with launch_triton.compiling_ahead():
        launch_all(
            Decisions(
                batch_size=2,
                longest_draft=LONGEST,
                vocab_size=VOCAB_SIZE,
                has_own_vocabulary=False,
                verifier="rejection",
                dtype=torch.bfloat16,
                device=CPU,
            )
        )
        for target_ids in DRAFT_VOCABULARIES:
            launch_choices(Choices(target_ids, VOCAB_SIZE, "rejection", torch.bfloat16, CPU))
    known = Counter(made)
    assert known["_decide_kernel"]
    assert sum(known.values()) > known["_decide_kernel"]
    with launch_triton.compiling_ahead():
        decide_all()
        choose_all()
    sys.stdout.write(json.dumps(made - known) + "\n")


if __name__ == "__main__":
    main()
