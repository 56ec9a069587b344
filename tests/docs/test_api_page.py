"""docs/api.md has every public name, every option with its default, and the errors."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

import guided_spec
from guided_spec import EngineConfig, SamplingParams, errors
from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "api.md").read_text()


def test_it_has_every_public_name() -> None:
    missing = [name for name in guided_spec.__all__ if not re.search(rf"\b{name}\b", PAGE)]
    assert not missing, "not in docs/api.md"


def test_it_draws_the_error_tree() -> None:
    tree = (errors.__doc__ or "").split("\n\n", 1)[1].strip()
    assert tree in PAGE


@pytest.mark.parametrize("record", [SamplingParams, EngineConfig])
def test_it_has_every_option_and_its_default(record: Any) -> None:
    rows = [f"| `{f.name}` | `{f.default!r}` |" for f in dataclasses.fields(record)]
    assert [row for row in rows if row not in PAGE] == []
