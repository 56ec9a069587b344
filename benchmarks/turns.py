"""Processes that take turns, so that whatever else a machine does meanwhile hits all of them alike.

Two that are measured one behind the other meet another machine each, where it is shared.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

PAUSE = 0.01  # seconds between two looks at whose turn it is


class Turns(NamedTuple):
    """One of those that take turns. folder: where they agree on whose it is. name: its own."""

    folder: Path
    name: str

    @classmethod
    def begin(cls, folder: Path, names: Sequence[str]) -> None:
        """The first of them has the first turn, whenever it comes."""
        _write(folder, names)

    def wait(self) -> None:
        """Until it is its turn, which it has until it passes it on."""
        while self._others_first():
            time.sleep(PAUSE)

    def pass_on(self) -> None:
        """To the next one that is still there."""
        names = _read(self.folder)
        at = names.index(self.name)
        _write(self.folder, [*names[at + 1 :], *names[: at + 1]])

    def leave(self) -> None:
        """For good; those who end otherwise are waited for, so whoever started them leaves too."""
        self._mark(self.name).touch()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, it is its turn."""
        self.wait()
        try:
            yield
        finally:
            self.pass_on()

    def _others_first(self) -> bool:
        names = _read(self.folder)
        before = names[: names.index(self.name)]
        return not all(self._mark(name).exists() for name in before)

    def _mark(self, name: str) -> Path:
        return self.folder / f"{name} has left"


def _read(folder: Path) -> list[str]:
    found: list[str] = json.loads((folder / "order.json").read_text(encoding="utf-8"))
    return found


def _write(folder: Path, names: Sequence[str]) -> None:
    """At once, since others read it at any time; only who has the turn writes."""
    new = folder / "order.new"
    new.write_text(json.dumps([*names]), encoding="utf-8")
    new.replace(folder / "order.json")
