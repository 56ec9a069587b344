"""Each folder keeps its budget of lines: over it, something goes before something else comes."""

from __future__ import annotations

from pathlib import Path

import pytest

import guided_spec

PACKAGE = Path(guided_spec.__file__).parent
# Lines of Python, sub-folders included. A lower number is always welcome; a higher one says why.
BUDGETS = {
    "batch": 820,  # 10 more: lines with one id, adapters
    "cli": 2_345,  # 395 more: messages name options, images, quick ends, full disks, adapters
    "engine": 8_625,  # 2,120 more: switches, refusals, pictures, videos, experts, fp8 keys
    "evaluate": 1_295,  # 35 more: requests that fail, engines that load for each proposer
    "grammar": 22_490,  # 700 more: arguments, listed items, vast counts, surrogates, functions
    "integrations": 8_200,  # 10 more: options that are suggested, fp8 keys
    "masks": 1_845,  # 95 more: what a device drew freely, rows of two libraries, undrafted steps
    "models": 14_960,  # 3,925 more: latents, experts, MTP, pictures, int4, heads, fp8 keys
    "ops": 9_160,  # 1,590 more: latent and two-way attention, experts, norms, int4, fp8 keys
    "proposers": 3_260,
    "server": 5_220,  # 310 more: usual fields of clients, faults, pictures, adapters as models
    "trace": 810,  # 50 more: axes with numbers, thumbnails
    "training": 7_090,  # 660 more: answers written together, forced tokens in numpy, pictures
    ".": 2_370,  # 260 more: ends, room, reasons, nearest names, pictures, adapters, fp8 keys
}
MOST_LINES, MOST_MODULES = 600, 16


def lines(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def folders() -> list[Path]:
    return sorted(one for one in PACKAGE.iterdir() if one.is_dir() and any(one.rglob("*.py")))


def test_every_folder_has_a_budget() -> None:
    assert {folder.name for folder in folders()} == {*BUDGETS} - {"."}


@pytest.mark.every_case
@pytest.mark.parametrize("name", BUDGETS)
def test_no_folder_is_over_its_budget(name: str) -> None:
    found = (
        lines(PACKAGE / name)
        if name != "."
        else sum(
            len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.glob("*.py")
        )
    )
    assert found <= BUDGETS[name], f"{name} has {found:,} lines: take something out first"


def test_files_and_folders_are_small() -> None:
    for path in PACKAGE.rglob("*.py"):
        count = len(path.read_text(encoding="utf-8").splitlines())
        assert count <= MOST_LINES, f"{path.relative_to(PACKAGE)} has {count} lines"
    for folder in {path.parent for path in PACKAGE.rglob("*.py")}:
        name = folder.relative_to(PACKAGE).as_posix()
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= MOST_MODULES, f"{name} has {len(modules)} modules"
