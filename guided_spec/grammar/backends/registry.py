"""The grammar backends by name, and how a new one joins them.

A name is found in ``GRAMMAR_BACKENDS`` (built in, or added by ``register_grammar_backend``) or
among the entry points of the group ``guided_spec.grammar_backends``.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from operator import attrgetter
from typing import Any, Literal, TypeAlias, cast

from guided_spec.errors import ConfigError
from guided_spec.kinds import did_you_mean

GrammarBackendName = Literal["auto", "xgrammar", "llguidance"] | str  # or a registered one
# Takes a ``Vocabulary`` and returns a ``GrammarBackend``. Both stand above: a spec, which a backend
# compiles, asks here whether the backend that it names is known.
BackendFactory: TypeAlias = Callable[[Any], Any]
ENTRY_POINT_GROUP = "guided_spec.grammar_backends"

GRAMMAR_BACKENDS: dict[str, str | BackendFactory] = {
    "auto": "guided_spec.grammar.backends.auto:AutoBackend",
    "llguidance": "guided_spec.grammar.backends.llguidance:LLGuidanceBackend",
    "xgrammar": "guided_spec.grammar.backends.xgrammar:XGrammarBackend",
}

_HOW = f"""register another with guided_spec.register_grammar_backend(name, factory), or install a \
package that has an entry point of the group {ENTRY_POINT_GROUP}"""


def register_grammar_backend(name: str, factory: str | BackendFactory) -> None:
    """Add a grammar backend: a callable that takes a ``Vocabulary``, or ``"module:Callable"``.

    It may be called more than once, by several threads, and returns a ``GrammarBackend``. Raises
    ConfigError when the name is taken, and for a factory that is neither.
    """
    if not isinstance(name, str) or not name or set(name) & set(":+"):
        raise ConfigError("name", name, "must be a non-empty name without ':' and '+'")
    if name in GRAMMAR_BACKENDS:
        fix = "is taken; choose another, or delete GRAMMAR_BACKENDS[name] first"
        raise ConfigError("name", name, fix)
    is_path = isinstance(factory, str) and all(factory.partition(":"))
    if not is_path and not callable(factory):
        fix = 'must be a callable that takes a Vocabulary, or "module:Callable"'
        raise ConfigError("factory", factory, fix)
    GRAMMAR_BACKENDS[name] = factory


def grammar_backend_names() -> list[str]:
    """Every name that ``EngineConfig.grammar_backend`` takes, sorted."""
    installed = (point.name for point in entry_points(group=ENTRY_POINT_GROUP))
    return sorted({*GRAMMAR_BACKENDS, *installed})


def require_grammar_backend(argument: str, name: object) -> None:
    """Raise ConfigError, about this argument, where no backend has this name."""
    if not isinstance(name, str) or (name not in GRAMMAR_BACKENDS and _path_of_entry(name) is None):
        known = grammar_backend_names()
        fix = f"must be one of {', '.join(known)}; {_HOW}{did_you_mean(name, known)}"
        raise ConfigError(argument, name, fix)


def find_grammar_backend(argument: str, name: str) -> BackendFactory:
    """The factory of this name, imported.

    Raises ConfigError, about this argument, where the name is not known or cannot be imported.
    """
    require_grammar_backend(argument, name)
    factory = GRAMMAR_BACKENDS.get(name) or _path_of_entry(name)
    if not isinstance(factory, str):
        return cast(BackendFactory, factory)  # the name is known, so it is not None
    module, _, attribute = factory.partition(":")
    try:
        found: Any = attrgetter(attribute)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        fix = f"its factory {factory!r} cannot be imported: {error}"
        raise ConfigError(argument, name, fix) from error
    if not callable(found):
        raise ConfigError(argument, name, f"its factory {factory!r} is not callable")
    made: BackendFactory = found
    return made


def import_path(name: str) -> str | None:
    """``"module:Callable"`` of this name's factory; None where another process cannot import it.

    That is so for a factory that a script or a notebook defines, for one defined inside a function,
    and for a name that is not known.
    """
    factory = GRAMMAR_BACKENDS.get(name) or _path_of_entry(name)
    if factory is None or isinstance(factory, str):
        return factory
    module = getattr(factory, "__module__", None)
    attribute = getattr(factory, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(attribute, str) or not _is_found(module):
        return None
    try:
        found = attrgetter(attribute)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return f"{module}:{attribute}" if found is factory else None


def importable_backends() -> dict[str, str | BackendFactory]:
    """The registry as another process can use it."""
    paths = ((name, import_path(name)) for name in GRAMMAR_BACKENDS)
    return {name: path for name, path in paths if path is not None}


def _is_found(module: str) -> bool:
    """Whether an import would find the module, were it not loaded already."""
    package = module.partition(".")[0]
    if package == "__main__":
        return False
    return any(finder.find_spec(package, None) is not None for finder in sys.meta_path)


def _path_of_entry(name: str) -> str | None:
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return point.value
    return None
