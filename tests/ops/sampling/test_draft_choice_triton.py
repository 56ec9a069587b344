"""The kernels of the draft's token choice agree with torch; here in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreted import run_interpreted

START = """
import torch
from guided_spec.ops.sampling.draft_choice import choose_draft_reference
from guided_spec.ops.sampling.draft_choice_triton import choose_draft
from tests.draft_choices import MASKS, check_alike, make_case

torch.use_deterministic_algorithms(True)  # memory that nothing has written to holds NaN
GREEDY, MIXED = [0.0] * 6, [0.7, 1.0, 0.0, 4.0, 1.0, 0.1]

def compare(case):
    check_alike(case, choose_draft(*case), choose_draft_reference(*case))
"""

EVERY_MASK = """
for mask in MASKS:
    for temperatures in (GREEDY, MIXED):
        compare(make_case((75, 40), temperatures, mask))
        compare(make_case((75, None), temperatures, mask, torch.bfloat16))
"""

SEVERAL_CHUNKS = """
for sizes in ((1500, 1050), (1500, None), (1024, None), (40_000, 1024)):
    compare(make_case(sizes, GREEDY, "each", torch.float16))
    compare(make_case(sizes, MIXED, "each", torch.float16))
compare(make_case((1, None), MIXED, "dense"))
compare(make_case((33, 1), MIXED, "each"))
"""

ODD_LOGITS = """
nan, inf, no = float("nan"), float("inf"), float("-inf")
for temperatures in (GREEDY, MIXED):
    for ids in (1040, None):
        case = make_case((1500, ids), temperatures, "each")
        case.logits[0, 1030] = nan
        case.logits[2] = nan
        case.logits[3:, 5] = inf
        compare(case)
        compare(case._replace(bitmask=None))
        apart = torch.zeros(*case.logits.shape, 2)[:, :, 0]  # columns that are not neighbours
        compare(case._replace(logits=apart))  # and ties
"""


@pytest.mark.slow
@pytest.mark.parametrize("comparison", [EVERY_MASK, SEVERAL_CHUNKS, ODD_LOGITS])
def test_the_kernels_agree_with_torch(comparison: str) -> None:
    pytest.importorskip("triton")
    assert run_interpreted("-c", START + comparison + "print('alike')") == "alike"
