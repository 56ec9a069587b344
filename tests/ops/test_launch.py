"""Every kernel is launched in the one way that can also compile it ahead."""

from __future__ import annotations

import re
from pathlib import Path

import guided_spec

LAUNCH = re.compile(r"\b_\w+\[.+\]\($", re.MULTILINE)  # kernel[grid](


def test_no_kernel_is_launched_by_itself() -> None:
    files = sorted(Path(guided_spec.__file__).parent.rglob("*_triton.py"))
    assert len(files) > 9
    assert LAUNCH.search("    _store[(1, 2)](\n")
    found = [(file.name, line) for file in files for line in LAUNCH.findall(file.read_text())]
    assert found == []
