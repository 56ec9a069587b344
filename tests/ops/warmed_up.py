"""``python -m tests.ops.warmed_up``: what decisions compile after the warm-up, as JSON."""

from __future__ import annotations

import json
import sys
from collections import Counter

import torch

from guided_spec.ops import launch_triton
from guided_spec.ops.sampling.warm_up import Decisions, launch_all
from tests.ops.ahead import CPU, LONGEST, VOCAB_SIZE, Hopper, compile_for, decide_all


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
    known = Counter(made)
    assert known
    with launch_triton.compiling_ahead():
        decide_all()
    sys.stdout.write(json.dumps(made - known) + "\n")


if __name__ == "__main__":
    main()
