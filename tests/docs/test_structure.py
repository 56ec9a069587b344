"""docs/structure.md agrees with the package: its layers, its folders, the files it starts with."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT
from tests.test_layers import LAYERS

PACKAGE = ROOT / "guided_spec"
PAGE = (ROOT / "docs" / "structure.md").read_text()
LAYER = re.compile(r"^\| (\d) \| ([^|]+) \|", re.MULTILINE)
FOLDER = re.compile(r"^\| ((?:`[\w.]+/?`(?:, )?)+) \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)
NAME = re.compile(r"`([\w/.]+)`")


def exists(part: str) -> bool:
    return (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").is_file()


def test_layers_are_those_that_are_enforced() -> None:
    written = {int(level): set(NAME.findall(parts)) for level, parts in LAYER.findall(PAGE)}
    assert written == {
        level: {part for part in parts if exists(part)} for level, parts in enumerate(LAYERS)
    }


def test_every_folder_has_its_line() -> None:
    described = {name for names, _ in FOLDER.findall(PAGE) for name in NAME.findall(names)}
    folders = {f"{path.name}/" for path in PACKAGE.iterdir() if path.is_dir()} - {"__pycache__/"}
    assert sorted(folders - described) == []
    assert [name for name in sorted(described) if not (PACKAGE / name).exists()] == []


def test_reading_starts_at_files_that_exist() -> None:
    starts = [
        PACKAGE / (folder if folder.endswith("/") else "") / name
        for folders, files in FOLDER.findall(PAGE)
        for folder in NAME.findall(folders)[:1]
        for name in NAME.findall(files)
    ]
    assert len(starts) > 15
    assert [str(path) for path in starts if not path.is_file()] == []
