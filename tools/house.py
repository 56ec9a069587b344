"""The structure of the package in figures: ``python -m tools.house [FOLDER] [--list]``.

Prints sizes, import circles, modules with a single importer, folders of many modules, and files
that share a prefix. It reads the syntax trees and imports nothing.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WIDE = 16  # modules of a folder
FAMILY = 4  # files that share a prefix


def module_name(path: Path, root: Path = ROOT) -> str:
    """The dotted name of a file below ``root``."""
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(source: str) -> set[str]:
    """Every module that may be named: by type checkers and inside functions as well."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            # The module itself only where a name is not a module of its own.
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which modules each module imports; what a package re-exports of its own is left out."""
    graph = {}
    for name, source in sources.items():
        found = {n if n in sources else n.rpartition(".")[0] for n in imported_modules(source)}
        own = {other for other in found if f"{other}.".startswith(f"{name}.")}
        graph[name] = (found & sources.keys()) - own
    return graph


def reached(graph: dict[str, set[str]], start: str) -> frozenset[str]:
    """What ``start`` imports, directly or not."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return frozenset(found)


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The largest groups of modules that import each other, directly or not."""
    below = {name: reached(graph, name) for name in graph}
    return {
        frozenset(other for other in below[name] if name in below[other])
        for name in graph
        if name in below[name]
    }


def single_importers(graph: dict[str, set[str]], packages: set[str]) -> dict[str, str]:
    """Modules that exactly one other imports; kernels, which stand beside their definition, not."""
    found: dict[str, list[str]] = {name: [] for name in graph}
    for name in sorted(set(graph) - packages):
        for other in graph[name]:
            found[other].append(name)
    return {
        name: by[0]
        for name, by in found.items()
        if len(by) == 1 and name not in packages and not name.endswith("_triton")
    }


def code_lines(source: str) -> int:
    """Lines that are not blank, and neither a comment's nor a docstring's."""
    lines = {
        at
        for at, line in enumerate(source.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):  # or an attribute's
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def report(folder: Path, *, lists: bool = False) -> list[str]:
    """The lines that the command prints."""
    paths = {module_name(path, folder.parent): path for path in sorted(folder.rglob("*.py"))}
    sources = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    packages = {name for name, path in paths.items() if path.name == "__init__.py"}
    lines = {name: source.count("\n") for name, source in sources.items()}
    graph = import_graph(sources)
    rings, single = circles(graph), single_importers(graph, packages)
    names = [name.rpartition(".") for name in paths if name not in packages]
    wide = Counter(parent for parent, _, _ in names)
    families = Counter((parent, own.split("_")[0]) for parent, _, own in names if "_" in own)
    code = sum(map(code_lines, sources.values()))
    whole = f"{len(paths)} files, {sum(lines.values()):,} lines, {code:,} of code"
    out = [f"{whole}; longest {max(lines.values())}"]
    out += [f"import circles: {len(rings)}", *(f"  {' '.join(sorted(ring))}" for ring in rings)]
    total = sum(lines[name] for name in single)
    out.append(f"imported by exactly one module: {len(single)} files, {total:,} lines")
    if lists:
        out += [f"  {lines[name]:4} {name} <- {by}" for name, by in sorted(single.items())]
    many = [f"{parent} {count}" for parent, count in wide.most_common() if count > WIDE]
    out.append(f"folders of more than {WIDE} modules: {', '.join(many) or 'none'}")
    alike = [f"{p}.{own}_* ({n})" for (p, own), n in families.most_common() if n >= FAMILY]
    return [*out, f"families by prefix: {', '.join(alike) or 'none'}"]


def main() -> None:
    """The command."""
    given = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    folder = Path(given[0] if given else ROOT / "guided_spec").resolve()
    sys.stdout.write("\n".join(report(folder, lists="--list" in sys.argv)) + "\n")


if __name__ == "__main__":
    main()
