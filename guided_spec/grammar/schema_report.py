"""The records of a schema's preparation."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

__all__ = ["PreparedSchema", "Report", "Unenforced", "escape", "join"]


class Unenforced(NamedTuple):
    """One keyword of a schema that the backend does not enforce as it stands.

    pointer: JSON pointer of the schema that holds it; "" is the root.
    level: "error": generated text might break it. "note": it cannot, but less text is generated
        than the schema allows, or a ``format`` that is only an annotation is left unchecked.
    """

    pointer: str
    keyword: str
    reason: str
    fix: str
    level: Literal["error", "note"] = "error"


class PreparedSchema(NamedTuple):
    """A schema rewritten for the backend, and what could not be kept."""

    schema: Any
    unenforced: tuple[Unenforced, ...]


class Report:
    """Collects entries during one walk, each once."""

    def __init__(self) -> None:
        self.entries: list[Unenforced] = []

    def error(self, pointer: str, keyword: str, reason: str, fix: str) -> None:
        """Add a keyword that generated text might break."""
        self._add(Unenforced(pointer, keyword, reason, fix))

    def note(self, pointer: str, keyword: str, reason: str, fix: str) -> None:
        """Add a keyword that is kept, though not as it stands."""
        self._add(Unenforced(pointer, keyword, reason, fix, "note"))

    def _add(self, entry: Unenforced) -> None:
        if entry not in self.entries:
            self.entries.append(entry)


def escape(name: str) -> str:
    """A property name as one token of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def join(pointer: str, path: str) -> str:
    """``pointer`` extended by ``path``, whose tokens are escaped already."""
    return f"{pointer}/{path}"
