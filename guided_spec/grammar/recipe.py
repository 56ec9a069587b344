"""What a grammar was compiled from: enough to compile it again without reading its document."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable


class KeyRules(NamedTuple):
    """What a grammar of JSON texts needs to know to keep keys unique, see ``UniqueKeysGrammar``."""

    run_out: bool
    required: tuple[str, ...]


class Recipe(NamedTuple):
    """The backend's own source of one grammar; it can be handed to another process.

    backend: the name of the backend. source: a record of that one's. keys: None where the grammar
    keeps them unique by itself.
    """

    backend: str
    source: Any
    keys: KeyRules | None = None


@runtime_checkable
class RecipeGrammar(Protocol):
    """A compiled grammar that tells what it was compiled from."""

    def recipe(self) -> Recipe | None:
        """What ``DocumentCompiler.rebuild`` takes; None where that is not known."""
        ...
