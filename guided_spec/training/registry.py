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
from guided_spec.kinds import require_one_of
from guided_spec.training.algorithms.options import CONFIGS

ENTRY_POINT_GROUP = "guided_spec.algorithms"
_Class = TypeVar("_Class", bound=type)
_BUILT_IN = "guided_spec.training.algorithms"

# name: the class, or "module:Class"
ALGORITHMS: dict[str, type | str] = {
    "dflash": f"{_BUILT_IN}.blocks:DFlashTraining",
    "draft_model": f"{_BUILT_IN}.draft_model:DraftModelTraining",
    "dspark": f"{_BUILT_IN}.blocks:DSparkTraining",
    "eagle": f"{_BUILT_IN}.heads:EagleTraining",
    "eagle3": f"{_BUILT_IN}.heads:Eagle3Training",
    "mtp": f"{_BUILT_IN}.heads:MtpTraining",
    "p_eagle": f"{_BUILT_IN}.blocks:PEagleTraining",
}


def register(name: str) -> Callable[[_Class], _Class]:
    """A decorator that adds a ``DraftAlgorithm`` under ``name``.

    Raises ConfigError when the name is taken by a class of another module.
    """

    def add(algorithm: _Class) -> _Class:
        known = ALGORITHMS.get(name, algorithm)
        module = known.partition(":")[0] if isinstance(known, str) else known.__module__
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
        module, _, attribute = found.partition(":")
        return getattr(importlib.import_module(module), attribute)
    if found is None:
        for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
            return point.load()
        require_one_of("algorithm", name, algorithm_names())
    return found


def find_config(name: str) -> type:
    """The class of the options of ``name``: of a built-in one without torch. Raises ConfigError."""
    is_built_in = isinstance(ALGORITHMS.get(name), str)
    config: type = CONFIGS[name] if is_built_in else find_algorithm(name).config_class
    return config
