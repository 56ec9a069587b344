"""Where a walk over a schema stands."""

from __future__ import annotations

from typing import NamedTuple

from guided_spec.grammar.schema_report import escape
from guided_spec.grammar.schema_values import ALL_TYPES

__all__ = ["At"]


class At(NamedTuple):
    """pointer: JSON pointer of the schema. types: those of the values that matter here."""

    pointer: str = ""
    types: frozenset[str] = ALL_TYPES
    depth: int = 0

    def below(self, *path: str | int) -> At:
        """A subschema for the same value."""
        tail = "".join(f"/{escape(str(token))}" for token in path)
        return At(self.pointer + tail, self.types, self.depth + 1)

    def inside(self, *path: str | int) -> At:
        """A subschema for a part of the value, of whose type nothing is known."""
        return self.below(*path)._replace(types=ALL_TYPES)
