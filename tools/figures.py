"""The structure of the package as a table in a page: ``python -m tools.figures PAGE``.

Measures each figure, and writes the table between two comments of the page, such as
``docs/contributing.md``, that name it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools.entered import engine_steps, entered, fill_row
from tools.house import ROOT, WIDE, circles, import_graph, module_name, single_importers

BEGIN, END = "<!-- figures of the structure -->", "<!-- end of the figures -->"
CORE = ("grammar", "masks", "ops", "models", "proposers", "engine", "integrations/transformers")


class Figure(NamedTuple):
    """One row. before: when the redesign of the core began. goal: of that."""

    name: str
    before: str
    goal: str
    now: str
    command: str


class Package(NamedTuple):
    """sources: by module. packages: modules that are folders."""

    sources: dict[str, str]
    packages: set[str]

    @classmethod
    def read(cls, folder: Path) -> Package:
        """The package in a folder."""
        paths = {module_name(path, folder.parent): path for path in folder.rglob("*.py")}
        sources = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
        return cls(sources, {name for name, path in paths.items() if path.name == "__init__.py"})

    def lines(self, *folders: str) -> int:
        """Of these folders, or of all."""
        parts = [f"{folder.replace('/', '.')}." for folder in folders] or [""]
        prefixes = tuple(f"guided_spec.{part}" for part in parts)
        own = (source for name, source in self.sources.items() if f"{name}.".startswith(prefixes))
        return sum(source.count("\n") for source in own)

    def root_lines(self) -> int:
        """Of the files next to the folders."""
        own = (s for n, s in self.sources.items() if n.count(".") == 1 and n not in self.packages)
        return sum(source.count("\n") for source in own) + self.sources["guided_spec"].count("\n")


def structure() -> Iterator[Figure]:
    """What the syntax trees say."""
    package, house = Package.read(ROOT / "guided_spec"), "`python -m tools.house`"
    graph = import_graph(package.sources)
    core = package.lines(*CORE) + package.root_lines()
    modules = [name.rpartition(".")[0] for name in package.sources if name not in package.packages]
    wide = sum(modules.count(folder) > WIDE for folder in set(modules))
    single = single_importers(graph, package.packages)
    yield Figure("lines", "65,285", "57,000", f"{package.lines():,}", house)
    yield Figure("lines of the core", "45,450", "39,000", f"{core:,}", "`python -m tools.figures`")
    yield Figure("files", "274", "250", str(len(package.sources)), house)
    yield Figure("import circles", "0", "0", str(len(circles(graph))), house)
    yield Figure("modules with a single importer", "42", "30", str(len(single)), house)
    yield Figure(f"folders of more than {WIDE} modules", "1", "0", str(wide), house)


def ways() -> Iterator[Figure]:
    """What a schema and a step go through."""
    command = "`python -m tools.entered`"
    now = str(len(entered(fill_row)))
    yield Figure("files from a schema to a mask row", "23", "15", now, command)
    for name, before, goal in (("ngram", (44, 323), (20, 108)), ("eagle3", (53, 787), (28, 262))):
        step = engine_steps(name)
        kinds = ("files of a step", "changes of file in a step")
        found = zip(kinds, before, goal, (len(step.files), step.changes), strict=True)
        for kind, was, wanted, is_now in found:
            yield Figure(f"{kind} of `{name}`", str(was), str(wanted), str(is_now), command)


def main() -> None:
    """The command."""
    page = Path(sys.argv[1])
    text = page.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise SystemExit(f"{page} lacks {BEGIN!r} or {END!r} after it")
    rows = ["| Figure | Before | Goal | Now | Command |", "|---|---|---|---|---|"]
    rows += [f"| {' | '.join(figure)} |" for figure in (*structure(), *ways())]
    page.write_text("\n".join([head + BEGIN, *rows, END + tail]), encoding="utf-8")


if __name__ == "__main__":
    main()
