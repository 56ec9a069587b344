"""The kernels of the verify decision decide as the reference does; here in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.ops.interpreted import run_interpreted

EXAMPLES = 40


@pytest.mark.slow
def test_the_kernels_decide_as_the_reference() -> None:
    pytest.importorskip("triton")
    arguments = ("-m", "tests.ops.sampling.verify_cases", str(EXAMPLES))
    num_cases, num_close = map(int, run_interpreted(*arguments).split())
    assert num_cases >= EXAMPLES
    assert num_close <= num_cases // 10
