"""The shape of the repository: imports point down, files and functions stay small."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tools.house import circles, import_graph, module_name

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "guided_spec"
MODULES = sorted(PACKAGE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
BESIDE = sorted(path for name in ("benchmarks", "tools") for path in (ROOT / name).rglob("*.py"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

LAYERS = (
    {"bundled", "errors", "config", "home", "kinds", "types"},
    {"ops", "grammar", "models"},
    {"masks", "core", "guide", "step"},
    {"proposers", "trace"},
    {"engine"},
    {"batch", "integrations", "training", "evaluate", "server", "cli"},
)
# The package itself re-exports the engine: only what stands above the engine may use it.
LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts} | {"": 5}
SIBLINGS = {("grammar", "ops"), ("models", "ops")}  # imports between packages of layer 1

LONGEST_FUNCTION = 40
LONGEST_KERNEL = 120
LONGEST_EXAMPLE = 40

Function = ast.FunctionDef | ast.AsyncFunctionDef


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below ``node`` but the bodies of ``if TYPE_CHECKING:``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for branch in child.orelse:
                yield branch
                yield from runtime_nodes(branch)
            continue
        yield child
        yield from runtime_nodes(child)


def imported_parts(source: str) -> set[str]:
    """The parts of guided_spec that the source imports when it runs: "ops", "core" and so on."""
    names: list[str] = []
    for node in runtime_nodes(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            if node.module == "guided_spec":
                names.extend(_named_by_root(alias.name) for alias in node.names)
            else:
                names.append(node.module or "")
    parts = (name.split(".") for name in names)
    return {part[1] if len(part) > 1 else "" for part in parts if part[0] == "guided_spec"}


def _named_by_root(name: str) -> str:
    return f"guided_spec.{name}" if name in LAYER else "guided_spec"


def is_allowed(part: str, imported: str) -> bool:
    if part == imported or LAYER[imported] < LAYER[part]:
        return True
    if (part, imported) == ("types", "grammar"):
        return True  # of it nothing but the spec, see below
    if LAYER[part] == 1:
        return (part, imported) in SIBLINGS
    return LAYER[imported] == LAYER[part]


def test_import_rule() -> None:
    source = """
import guided_spec.engine.llm
from guided_spec import LLM, ops
if TYPE_CHECKING:
    from guided_spec.cli import app
def late():
    from guided_spec.grammar.spec import GrammarSpec
"""
    assert imported_parts(source) == {"engine", "", "ops", "grammar"}
    assert is_allowed("grammar", "ops")
    assert not is_allowed("ops", "grammar")
    assert not is_allowed("models", "grammar")
    assert not is_allowed("engine", "")


def test_imports_point_down() -> None:
    found = {}
    for path in MODULES:
        if path == PACKAGE / "__init__.py":
            continue  # it re-exports every layer
        part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        imported = imported_parts(path.read_text())
        wrong = sorted(other for other in imported if not is_allowed(part, other))
        if wrong:
            found[f"{label(path)} (layer {LAYER[part]})"] = wrong
    assert not found, f"imports of layers above: {found}"


def test_the_finder_of_circles() -> None:
    sources = {
        "p": "from p.a import x",
        "p.a": "def late():\n    from p import b",
        "p.b": "if TYPE_CHECKING:\n    from p.c import y",
        "p.c": "import p.a, json",
        "p.d": "from p import a, x",
    }
    assert circles(import_graph(sources)) == {frozenset({"p.a", "p.b", "p.c"})}


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = import_graph({module_name(path): path.read_text() for path in MODULES})
    found = [sorted(circle) for circle in circles(graph)]
    assert not found, f"move what they share down, or the caller up: {found}"


def test_specs_stand_below_the_sampling_parameters() -> None:
    """``SamplingParams`` takes what ``GrammarSpec.of`` takes."""
    source = (PACKAGE / "types.py").read_text()
    assert "from guided_spec.grammar.spec import GrammarSpec" in source
    assert source.count("guided_spec.grammar") == 2  # one of them for type checkers
    assert imported_parts((PACKAGE / "grammar" / "spec.py").read_text()) == {
        "errors",
        "grammar",
        "kinds",
    }


def functions(tree: ast.AST) -> Iterator[Function]:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def length(function: Function) -> int:
    """Physical lines, the docstring and the decorators not counted."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_functions_are_short() -> None:
    found = []
    for path in [*MODULES, *BESIDE, *TESTS]:
        limit = LONGEST_KERNEL if path.stem.endswith("_triton") else LONGEST_FUNCTION
        found += [
            f"{label(path)}: {function.name} has {length(function)} lines, at most {limit}"
            for function in functions(ast.parse(path.read_text()))
            if length(function) > limit
        ]
    assert not found, "\n".join(found)


def test_examples_are_short() -> None:
    lines = {label(path): len(path.read_text().splitlines()) for path in EXAMPLES}
    assert {name: count for name, count in lines.items() if count > LONGEST_EXAMPLE} == {}


def repository_texts() -> Iterator[Path]:
    suffixes = {".py", ".md", ".toml", ".yaml", ".yml", ".svg", ".json", ".jsonl"}
    folders = [
        ROOT / name
        for name in (
            "guided_spec",
            "benchmarks",
            "tools",
            "tests",
            "docs",
            "examples",
            ".ci",
            ".github",
        )
    ]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    for path in sorted(files):
        is_ours = "data" not in path.parts and "__pycache__" not in path.parts
        if is_ours and (path.suffix in suffixes or path.parent.name == ".ci"):
            yield path


# Put together here, so that this file does not hold them.
FORBIDDEN = ("/" + "work/", "/" + "home/", "/" + "tmp/venv", "TO" + "DO", "FIX" + "ME")


def test_nothing_points_at_one_machine() -> None:
    found = []
    for path in repository_texts():
        text = path.read_text()
        found += [f"{label(path)}: {word}" for word in FORBIDDEN if word in text]
        if "/simple" in text and "://" in text.partition("/simple")[0].rsplit(maxsplit=1)[-1]:
            found.append(f"{label(path)}: a package index")
    assert not found
