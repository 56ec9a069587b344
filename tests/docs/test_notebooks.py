"""The notebooks run from the repository's root, and show what they hold."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from tools.site.notebooks import NOTEBOOKS, executed, shown


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["agent", "extraction", "train_a_head"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_holds(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")  # the kernel's own: of its transport and bars
    assert list(shown(executed(path))) == list(shown(nbformat.read(path, as_version=4)))
