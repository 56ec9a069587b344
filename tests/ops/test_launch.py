"""Every kernel is launched in the one way that can also compile it ahead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import guided_spec
from tests.processes import run_compiling

LAUNCH = re.compile(r"\b_\w+\[.+\]\($", re.MULTILINE)  # kernel[grid](


def test_no_kernel_is_launched_by_itself() -> None:
    files = sorted(Path(guided_spec.__file__).parent.rglob("*_triton.py"))
    assert len(files) > 9
    assert LAUNCH.search("    _store[(1, 2)](\n")
    found = [(file.name, line) for file in files for line in LAUNCH.findall(file.read_text())]
    assert found == []


@pytest.mark.slow
def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """Few of them: neither filters nor masks, and neither batches nor rules, have their own.

    Drafts have, by their width: of 8 rows, of 32 and of 64.
    """
    pytest.importorskip("triton")
    assert run_compiling("tests.ops.ahead", tmp_path) == {
        "_ban_kernel": 1,
        "_stats_kernel": 2,  # with rules for single tokens, and without
        "_decide_kernel": 3 * 2 * 2,  # widths, filters, probabilities of the draft
        "_assemble_kernel": 3 * 3,  # sampled, with probabilities of the draft, and greedy
        "_race_kernel": 2 * 2,
        "_bracket_kernel": 1,
        "_collect_kernel": 1,
        "_threshold_kernel": 1,
        "_fp8_linear": 16,  # three tilings, one whole too, with biases and without, two widths
        "_multiply_out": 2,
        "_int4_linear": 16,  # by tokens and groups, with biases and without, in slices and whole
        "_multiply_out_int4": 1,
        "_route": 3,  # of three models with experts, of which one has one that all tokens take
        "_open": 5,  # two of them in fp8 as well
        "_close": 5,
        "_convolve": 1,
        "_fold_rows": 2,  # short rows, and long ones
        "_keep_and_gate": 1,
        "_rotate": 4,  # whole heads, by axes as well, parts beside gates, and neighbours
        "_add_branch": 3,  # with norms after it, of it, and both
        "_norm_all_heads": 1,
        "_attend": 1,
        "_score": 1,
        "_route_in_groups": 2,
        "_keep_latents": 1,
        "_attend_latents": 2,  # texts in few parts, and whole
        "combine": 2,
        "_await": 2,  # of up to 64 texts, and of more
        "_copy": 2,  # to rows that hold anything, and to others
        "_reply": 2,  # of the target's own vocabulary, and of a reduced one
        "_advance": 1,
    }


@pytest.mark.slow
def test_a_decision_compiles_nothing_after_the_warm_up(tmp_path: Path) -> None:
    """Whatever the draft's length, probabilities and forced tokens, the filters and the rules."""
    pytest.importorskip("triton")
    assert run_compiling("tests.ops.warmed_up", tmp_path) == {}
