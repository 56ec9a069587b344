"""What a grammar was compiled from: enough to compile it again without reading its document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable


class KeyRules(NamedTuple):
    """What a grammar of JSON texts needs to know to keep keys unique, see ``UniqueKeysGrammar``."""

    run_out: bool
    required: tuple[str, ...]


class ItemRule(NamedTuple):
    """What holds of the values at one place of a schema, as far as arrays of unique items go.

    is_unique: whether no two items of an array here are equal. is_free: whether there are
    infinitely many values, more of them than can be known to run out. has_free_strings: whether
    every string that has begun can go on to infinitely many.
    The places of what is inside: keys, by their UTF-8; other, of all further keys; prefix and
    items, of an array's items. Place 0 is where no array of unique items can follow.
    """

    is_unique: bool = False
    is_free: bool = False
    has_free_strings: bool = False
    keys: Mapping[bytes, int] = {}
    other: int = 0
    prefix: tuple[int, ...] = ()
    items: int = 0


ItemRules: TypeAlias = tuple[ItemRule, ...]
"""By place; the whole value is at place 1."""


class Recipe(NamedTuple):
    """The backend's own source of one grammar; it can be handed to another process.

    backend: the name of the backend. source: a record of that one's. keys: None where the grammar
    keeps them unique by itself. items: None where no array's items have to be unique.
    """

    backend: str
    source: Any
    keys: KeyRules | None = None
    items: ItemRules | None = None


@runtime_checkable
class RecipeGrammar(Protocol):
    """A compiled grammar that tells what it was compiled from."""

    def recipe(self) -> Recipe | None:
        """What ``DocumentCompiler.rebuild`` takes; None where that is not known."""
        ...
