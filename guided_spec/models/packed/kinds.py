"""Which class of transformers' a module is, by its name: to import all families takes time."""

from __future__ import annotations

from collections.abc import Collection


def is_kind(module: object, names: Collection[str]) -> bool:
    """Whether the module's own class is one of transformers' with one of these names."""
    return _name(type(module)) in names


def is_a_kind(module: object, names: Collection[str]) -> bool:
    """Whether its class, or one that this comes from, is one of them."""
    return any(_name(kind) in names for kind in type(module).__mro__)


def _name(kind: type) -> str:
    """ "" of a class that is not transformers', such as one that comes with a checkpoint."""
    return kind.__name__ if kind.__module__.startswith("transformers.models.") else ""
