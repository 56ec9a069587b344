"""The tool that writes the table of the structure measures it, and leaves the rest of a page."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import figures
from tools.figures import BEGIN, END, Figure, structure
from tools.house import ROOT


def test_lines_and_files_are_those_of_the_package() -> None:
    paths = [*(ROOT / "guided_spec").rglob("*.py")]
    found = {figure.name: figure.now for figure in structure()}
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in paths)
    assert (found["lines"], found["files"]) == (f"{lines:,}", str(len(paths)))
    assert found["import circles"] == "0"
    core = int(found["lines of the core"].replace(",", ""))
    assert lines / 2 < core < lines


def test_the_table_replaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Above.\n\n{BEGIN}\n| old |\n{END}\n\nBelow.\n", encoding="utf-8")
    monkeypatch.setattr(figures, "structure", lambda: [Figure("lines", "9", "5", "7", "wc")])
    monkeypatch.setattr(figures, "ways", list)
    monkeypatch.setattr(sys, "argv", ["figures", str(page)])
    for _ in range(2):
        figures.main()
        text = page.read_text(encoding="utf-8")
        assert text.startswith("Above.\n")
        assert text.endswith(f"\n| lines | 9 | 5 | 7 | wc |\n{END}\n\nBelow.\n")
        assert "old" not in text


def test_a_page_without_a_place_for_it_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text("Nothing.\n", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["figures", str(page)])
    with pytest.raises(SystemExit, match="lacks"):
        figures.main()
    assert page.read_text(encoding="utf-8") == "Nothing.\n"
