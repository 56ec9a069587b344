"""Every package that is imported by name is declared, where the part that imports it needs it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "guided_spec"
MODULES = sorted(PACKAGE.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# The extras that parts of the package may ask for, besides what all of it depends on.
EXTRAS = {
    "batch": ("batch",),
    "cli": ("cli",),
    "engine": ("vision",),
    "evaluate": ("plots",),
    "models": ("lora", "parallel"),
    "server": ("serve", "telemetry"),
    "trace": ("vision",),
    "training": ("train",),
}
# Engines with environments of their own: they load this package, or are measured.
ENGINES = {"lmdeploy", "sglang", "vllm"}
HOSTS = {"integrations": ENGINES | {"prometheus_client"}}  # that is a dependency of vLLM


def declared(*extras: str) -> set[str]:
    """The import names of the dependencies: those of the distributions, with two exceptions."""
    requirements = list(PROJECT["dependencies"])
    for extra in extras:
        requirements += PROJECT["optional-dependencies"][extra]
    names = (re.match(r"[\w.-]+", requirement) for requirement in requirements)
    found = {name[0].lower().replace("-", "_") for name in names if name is not None}
    found |= {"PIL"} if "pillow" in found else set()
    return found | {"opentelemetry" for name in found if name.startswith("opentelemetry_")}


def imported(source: str) -> set[str]:
    """Top-level names of other packages, late imports and ``import_module("name")`` included."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names += [each.value for each in node.args if _is_text(each)]  # type: ignore[attr-defined]
    known = {*sys.stdlib_module_names, "guided_spec"}
    return {name.partition(".")[0] for name in names} - known


def imported_at_once(source: str) -> set[str]:
    """Those of the names that stand outside of every function and block."""
    nodes = ast.parse(source).body
    at_once = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return imported("\n".join(map(ast.unparse, at_once)))


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_what_counts_as_an_import() -> None:
    source = """
import os, numpy.typing as npt
def late():
    from rich.table import Table
    importlib.import_module("llguidance.hf")
    import_module(name)
"""
    assert imported(source) == {"numpy", "rich", "llguidance"}


def test_imports_are_declared() -> None:
    found = {}
    for path in MODULES:
        part = path.relative_to(PACKAGE).parts[0]
        allowed = declared(*EXTRAS.get(part, ())) | HOSTS.get(part, set())
        if undeclared := sorted(imported(path.read_text()) - allowed):
            found[path.relative_to(ROOT).as_posix()] = undeclared
    assert found == {}


@pytest.mark.parametrize("part", ["evaluate", "models", "training"])
def test_an_extra_is_imported_where_it_is_used(part: str) -> None:
    """What does without it runs without it, and the rest says which extra is missing."""
    there = declared() | {"huggingface_hub"}  # transformers brings it
    found = {
        path.name: sorted(imported_at_once(path.read_text()) - there)
        for path in (PACKAGE / part).rglob("*.py")
    }
    assert {name: extras for name, extras in found.items() if extras} == {}


def test_dependencies_are_imported() -> None:
    found = set().union(*(imported(path.read_text()) for path in MODULES))
    assert sorted(declared("cli") - found) == []


def test_the_readme_runs_with_the_extras_that_it_names() -> None:
    page = (ROOT / "README.md").read_text()
    named = re.findall(r"\[((?:cli|serve)(?:,[a-z]+)*)\]", page)
    extras = set(",".join(named).split(","))
    assert extras == {"cli", "serve"}
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    needed = set().union(*map(imported, blocks))
    assert "openai" in needed
    assert needed <= declared(*extras)


_INSTALLED = re.compile(
    r"pip install (?:-e )?'?(?:\.|guided-spec)\[([a-z,]+)\]|pip install ([a-z]\w+)"
)


def test_pages_run_with_the_extras_that_they_name() -> None:
    """And with other packages that they say how to install."""
    missing = {}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        page = path.read_text()
        found = _INSTALLED.findall(page)
        extras = {name for listed, _ in found for name in listed.split(",") if name}
        blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        needed = set().union(*map(imported, filter(_is_python, blocks)))
        if absent := needed - declared(*extras) - {other for _, other in found}:
            missing[path.name] = sorted(absent)
    assert missing == {}


def _is_python(block: str) -> bool:
    try:
        return ast.parse(block) is not None
    except SyntaxError:  # a part of one
        return False
