"""``propertyNames`` as one pattern, and ``patternProperties`` as patterns that do not overlap.

A key must be valid under the schemas of all patterns that it matches. Backends take a key for one
pattern's alone. So patterns that overlap are written as their parts: one and the other, one without
the other.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from guided_spec.errors import GrammarCompileError
from guided_spec.grammar.formats import FORMATS
from guided_spec.grammar.languages import Texts, are_apart, in_all, searched
from guided_spec.grammar.schema.joining import holds
from guided_spec.grammar.schema.lowered import unescape

NOTHING = r"[^\s\S]"
"""A pattern that is found in no text."""

_MOST, _MOST_LISTED = 6, 64  # patterns that overlap, and keys beside them
_OF_STRINGS = frozenset(
    {"type", "pattern", "format", "minLength", "maxLength", "enum", "const", "allOf", "anyOf"}
    | {"$ref"}
)


class Parts(NamedTuple):
    """schemas: by pattern, those that apply to its keys. rest: a pattern for keys that are not
    listed and match none; None where there are none."""

    schemas: dict[str, list[Any]]
    rest: str | None


class _Part(NamedTuple):
    """sets: what the keys are in. schemas: that apply to them."""

    sets: tuple[Texts, ...]
    schemas: tuple[Any, ...]


def pattern_of(strings: Any, definitions: Mapping[str, Any]) -> str | None:
    """A pattern that ``re.search`` finds in the strings that are valid under a lowered schema.

    definitions: by name. In fewer where it is unsure, and NOTHING where there are none. None where
    the schema is no pattern, or the pattern would be very long.
    """
    try:
        return _Strings(definitions).pattern_of(strings)
    except (GrammarCompileError, RecursionError):
        return None


class _Strings:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions

    def pattern_of(self, strings: Any) -> str:
        if isinstance(strings, bool):
            return "" if strings else NOTHING
        parts = [part for part in self._patterns_of(strings) if part]
        if len(parts) < 2:
            return parts[0] if parts else ""
        return in_all([searched(part) for part in parts]) or NOTHING

    def _patterns_of(self, words: Mapping[str, Any]) -> Iterator[str]:
        """Patterns that all have to be found. Raises GrammarCompileError for other keywords."""
        if not words.keys() <= _OF_STRINGS:
            raise GrammarCompileError("a keyword that is no pattern")
        yield from _own_patterns(words)
        if "$ref" in words:
            target = self._definitions.get(unescape(words["$ref"].removeprefix("#/$defs/")))
            if not target:  # it may be one that is not finished yet
                raise GrammarCompileError("a reference to what is not known")
            yield self.pattern_of(target)
        yield from map(self.pattern_of, words.get("allOf", ()))
        if "anyOf" in words:
            options = [self.pattern_of(part) for part in words["anyOf"]]
            yield "" if "" in options else "|".join(f"(?:{option})" for option in options)


def _own_patterns(words: Mapping[str, Any]) -> Iterator[str]:
    if "string" not in words.get("type", "string"):
        yield NOTHING
    if "pattern" in words:
        yield str(words["pattern"])
    if "format" in words:
        yield FORMATS[words["format"]]
    if words.keys() & {"minLength", "maxLength"}:
        most = int(words["maxLength"]) if "maxLength" in words else ""
        yield f"^(?s:.){{{int(words.get('minLength', 0))},{most}}}$"
    for values in (words.get("enum"), [words["const"]] if "const" in words else None):
        if values is not None:
            names = [value for value in values if isinstance(value, str)]
            yield _one_of(names) if names else NOTHING


def _one_of(names: Sequence[str]) -> str:
    return f"^(?:{'|'.join(map(re.escape, names))})$"


def overlapping(patterns: Mapping[str, Any]) -> bool:
    """Whether a key may match several patterns; True where unsure."""
    return any(not are_apart(one, other) for one, other in itertools.combinations(patterns, 2))


def split_patterns(
    patterns: Mapping[str, Any], listed: Sequence[str], names: str | None = None
) -> Parts | None:
    """The parts of patterns. None where they are too many or too long to be written.

    listed: keys that the object lists. names: a pattern that all keys match, None for any key.
    """
    if len(patterns) > _MOST or len(listed) > _MOST_LISTED:
        return None
    own = _one_of(listed)
    try:
        written = dict(_written(_parts_of(patterns, names)))
        outside = [searched(one, is_in=False) for one in (*patterns, *([own] if listed else []))]
        rest = in_all([*([searched(names)] if names else []), *outside])
    except (GrammarCompileError, RecursionError):
        return None
    # What is written may match fewer keys, such as those of ASCII digits; listed ones must be told.
    for name in listed:
        wanted = [schema for pattern, schema in patterns.items() if holds(pattern, name)]
        found = [part for pattern, part in written.items() if holds(pattern, name)]
        if sum(found, []) != wanted and (names is None or holds(names, name)):
            return None
    return Parts(written, rest)


def _parts_of(patterns: Mapping[str, Any], names: str | None) -> list[_Part]:
    parts: list[_Part] = []
    before: tuple[Texts, ...] = (searched(names),) if names else ()
    for pattern, schema in patterns.items():
        held, left = searched(pattern), searched(pattern, is_in=False)
        split = [
            _Part((*part.sets, texts), schemas)
            for part in parts
            for texts, schemas in ((held, (*part.schemas, schema)), (left, part.schemas))
        ]
        parts = [*split, _Part((*before, held), (schema,))]
        before = (*before, left)
    return parts


def _written(parts: Sequence[_Part]) -> Iterator[tuple[str, list[Any]]]:
    for part in parts:
        pattern = in_all(part.sets)
        if pattern is not None:
            yield pattern, list(part.schemas)
