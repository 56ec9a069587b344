"""Training algorithms by name, and how a new one joins them.

A name is found in ``ALGORITHMS`` (built in, or added by ``register``) or among the entry points of
the group ``guided_spec.algorithms``, which name a class.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

from guided_spec.errors import ConfigError

__all__ = [
    "ALGORITHMS",
    "ENTRY_POINT_GROUP",
    "algorithm_names",
    "find_algorithm",
    "find_config",
    "register",
]

ENTRY_POINT_GROUP = "guided_spec.algorithms"
_Class = TypeVar("_Class", bound=type)
_BUILT_IN = "guided_spec.training.algorithms."

# name: the class, or the module that registers it when it is imported
ALGORITHMS: dict[str, type | str] = {
    "dflash": "guided_spec.training.algorithms.blocks",
    "draft_model": "guided_spec.training.algorithms.draft_model",
    "dspark": "guided_spec.training.algorithms.blocks",
    "eagle": "guided_spec.training.algorithms.heads",
    "eagle3": "guided_spec.training.algorithms.heads",
    "mtp": "guided_spec.training.algorithms.heads",
    "p_eagle": "guided_spec.training.algorithms.blocks",
}
# Their options, in a module that loads no torch.
_CONFIGS = {
    "dflash": "DFlashConfig",
    "draft_model": "DraftModelConfig",
    "dspark": "DSparkConfig",
    "eagle": "EagleConfig",
    "eagle3": "Eagle3Config",
    "mtp": "MtpConfig",
    "p_eagle": "PEagleConfig",
}


def register(name: str) -> Callable[[_Class], _Class]:
    """A decorator that adds a ``DraftAlgorithm`` under ``name``.

    Raises ConfigError when the name is taken by a class of another module.
    """

    def add(algorithm: _Class) -> _Class:
        known = ALGORITHMS.get(name, algorithm)
        module = known if isinstance(known, str) else known.__module__
        if module != algorithm.__module__:
            fix = "is taken; choose another, or delete ALGORITHMS[name] first"
            raise ConfigError("name", name, fix)
        ALGORITHMS[name] = algorithm
        return algorithm

    return add


def algorithm_names() -> list[str]:
    """Every name that ``find_algorithm`` knows, sorted."""
    points = entry_points(group=ENTRY_POINT_GROUP)
    return sorted({*ALGORITHMS, *(point.name for point in points)})


def find_algorithm(name: str) -> Any:
    """The class registered under ``name``. Raises ConfigError, listing the names, for another."""
    found = ALGORITHMS.get(name)
    if isinstance(found, str):
        importlib.import_module(found)
        found = ALGORITHMS[name]
    if found is None:
        for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
            return point.load()
        raise ConfigError("algorithm", name, f"must be one of {', '.join(algorithm_names())}")
    return found


def find_config(name: str) -> type:
    """The class of the options of ``name``: of a built-in one without torch. Raises ConfigError."""
    found = ALGORITHMS.get(name)
    if isinstance(found, str) and found.startswith(_BUILT_IN):
        options = importlib.import_module(f"{_BUILT_IN}options")
        config: type = vars(options)[_CONFIGS[name]]
    else:
        config = find_algorithm(name).config_class
    return config
