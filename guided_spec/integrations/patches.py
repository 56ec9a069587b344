"""Functions of another engine that are replaced, and whether a release of it has them.

What a release offers is read from its source files: nothing of it is imported before it is known to
fit. Before anything is replaced, all of it is checked once more as it is in this process.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError

Wrapper = Callable[[Any], Any]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_MARK = "__guided_spec_wrappers__"  # those that a function has around it


class Patch(NamedTuple):
    """One function or class that a feature uses, and what is put around it.

    module, path: where it is defined: ``"vllm.v1.core.sched.scheduler"``, ``"Scheduler.schedule"``.
    parameters: names that the function must have, in this order; ``...`` at the end stands for any
        others. Empty for a class that is not replaced.
    wrap: takes the function as its owner has it, returns its replacement; None where it is only
        used.
    importers: modules that import the function by name. Those that did so already get the
        replacement too.
    attributes: names that the class must have, ``!name`` for one that it must not have.
    """

    module: str
    path: str
    parameters: str = ""
    wrap: Wrapper | None = None
    importers: tuple[str, ...] = ()
    attributes: str = ""


class OneOf(NamedTuple):
    """Ways that releases differ in: the first that fits is taken."""

    ways: tuple[tuple[Patch, ...], ...]


class Probed(NamedTuple):
    """patches: those that a release takes; lack: why it takes none, or empty."""

    patches: tuple[Patch, ...]
    lack: str


def probe(root: Path, wanted: Sequence[Patch | OneOf]) -> Probed:
    """Look for everything that a feature uses.

    root: the folder with the engine's package in it.
    """
    chosen: list[Patch] = []
    for one in wanted:
        ways = one.ways if isinstance(one, OneOf) else ((one,),)
        lacks = [next(filter(None, (_lack(root, patch) for patch in way)), "") for way in ways]
        if "" not in lacks:
            return Probed((), " and ".join(lacks))
        chosen += ways[lacks.index("")]
    return Probed(tuple(chosen), "")


class Target(NamedTuple):
    """Where a function hangs, in a module or in a class, and what is put around it."""

    owner: Any
    name: str
    function: Any
    patch: Patch

    @property
    def is_replaced(self) -> bool:
        """Whether ``replace`` has done its work already."""
        return self.patch.wrap in getattr(self.function, _MARK, ())


def find(patch: Patch, feature: str) -> Target:
    """The function in this process.

    feature: what the user asked for, named in errors.

    Raises ConfigError where it is not there, or takes other parameters.
    """
    *classes, name = patch.path.split(".")
    where = f"{patch.module}.{patch.path}"
    try:
        owner: Any = importlib.import_module(patch.module)
        for step in classes:
            owner = getattr(owner, step)
        function = getattr(owner, name)
        parameters = tuple(inspect.signature(function).parameters)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        fix = f"{feature} needs it; is it another build? ({error})"
        raise ConfigError(where, None, fix) from error
    if not _fits(parameters, patch.parameters):
        fix = f"{feature} expects {patch.parameters!r}; has another plugin changed it?"
        raise ConfigError(where, parameters, fix)
    return Target(owner, name, vars(owner).get(name, function), patch)


def replace(target: Target) -> None:
    """Put the wrapper around the function, also in modules that imported it by name."""
    assert target.patch.wrap is not None
    wrapped = target.patch.wrap(target.function)
    around = getattr(target.function, _MARK, ())
    setattr(wrapped, _MARK, (*around, target.patch.wrap))
    setattr(target.owner, target.name, wrapped)
    for importer in target.patch.importers:
        module = sys.modules.get(importer)
        if module is not None and getattr(module, target.name, None) is target.function:
            setattr(module, target.name, wrapped)


def _fits(found: Sequence[str], wanted: str) -> bool:
    """Whether parameters are those of ``Patch.parameters``."""
    names = wanted.split()
    if names[-1:] == ["..."]:
        return list(found[: len(names) - 1]) == names[:-1]
    return list(found) == names


def _lack(root: Path, patch: Patch) -> str:
    """What of it a release does not have; empty for nothing."""
    where = f"{patch.module.partition('.')[2] or patch.module}.{patch.path}"
    found = _find(root, patch.module, patch.path)
    if found is None:
        return f"there is no {where}"
    if patch.parameters:
        has = _parameters(found)
        if has is None or not _fits(has, patch.parameters):
            return f"{where} takes other parameters"
    if patch.attributes:
        has_names = {
            name for cls in _family(root, patch.module, patch.path) for name in _names(cls)
        }
        for name in patch.attributes.split():
            if name.startswith("!") and name[1:] in has_names:
                return f"{where} has {name[1:]}"
            if not name.startswith("!") and name not in has_names:
                return f"{where} has no {name}"
    return ""


@cache
def _tree(root: Path, module: str) -> ast.Module:
    """Empty where there is no such module."""
    path = root.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return ast.Module(body=[], type_ignores=[])


def _find(root: Path, module: str, path: str) -> ast.AST | None:
    found: ast.AST = _tree(root, module)
    for step in path.split("."):
        body: list[ast.stmt] = getattr(found, "body", [])
        kinds = (*_FUNCTIONS, ast.ClassDef)
        named = [node for node in body if isinstance(node, kinds) and node.name == step]
        if not named:
            return None
        found = named[-1]
    return found


def _parameters(node: ast.AST) -> list[str] | None:
    if not isinstance(node, _FUNCTIONS):
        return None
    arguments = node.args
    every = [*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs]
    return [one.arg for one in [*every, arguments.kwarg] if one is not None]


def _family(root: Path, module: str, name: str) -> Iterator[ast.ClassDef]:
    """A class and those that it inherits from, as far as they are the engine's."""
    node = _find(root, module, name)
    if isinstance(node, ast.ClassDef):
        yield node
        for base in node.bases:
            if isinstance(base, ast.Name):
                yield from _family(root, _origin(root, module, base.id), base.id)


def _origin(root: Path, module: str, name: str) -> str:
    """The module from which ``module`` has this name."""
    for node in _tree(root, module).body:
        if isinstance(node, ast.ImportFrom) and any(one.name == name for one in node.names):
            return node.module or module
    return module


def _names(cls: ast.ClassDef) -> Iterator[str]:
    """What a class declares, and what its methods set on ``self``."""
    for statement in cls.body:
        if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            yield statement.name
        elif isinstance(statement, ast.AnnAssign | ast.Assign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))
    for node in ast.walk(cls):
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.attr
