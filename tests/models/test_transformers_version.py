"""Which versions of transformers are taken, warned about and refused."""

from __future__ import annotations

import importlib.metadata
import logging
import tomllib
from pathlib import Path

import pytest

from guided_spec.errors import ModelError
from guided_spec.models.transformers_version import NEWEST, OLDEST, check_transformers

ROOT = Path(__file__).resolve().parent.parent.parent


def pretend(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)


@pytest.mark.parametrize(
    ("version", "is_tested"),
    [
        ("5.17.0", True),
        ("5.24.1", True),
        ("5.25.0.dev0", False),
        ("5.16.9", False),
        ("4.57.1", False),
    ],
)
def test_what_was_not_tested_is_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: str,
    is_tested: bool,  # noqa: FBT001
) -> None:
    pretend(monkeypatch, version)
    with caplog.at_level(logging.WARNING, "guided_spec"):
        check_transformers()
    warned = [record.getMessage() for record in caplog.records]
    assert (warned == []) is is_tested
    assert all(f"transformers 5.17 to 5.24; {version} is installed" in text for text in warned)


def test_the_next_major_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "6.0.0")
    with pytest.raises(ModelError, match=r"cannot run 6\.0\.0.*'transformers>=5\.17,<6'"):
        check_transformers()


def test_the_package_and_the_readme_name_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"transformers>={OLDEST},<{NEWEST.major + 1}" in project["dependencies"]
    assert f"transformers {OLDEST} and {NEWEST}" in (ROOT / "README.md").read_text().replace(
        "\n", " "
    )
