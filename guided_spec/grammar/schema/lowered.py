"""A schema in fewer keywords: what of it could not be kept, its subschemas, where they stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

__all__ = [
    "HOLDS_PARTS",
    "Lowered",
    "Report",
    "Unenforced",
    "all_parts",
    "change_parts",
    "describe",
    "escape",
    "find",
    "is_narrowed",
    "narrowing",
    "parts_of",
    "unescape",
]

_SHOWN = 5


class Unenforced(NamedTuple):
    """One keyword of a schema that the backend does not enforce as it stands.

    pointer: JSON pointer of the schema that holds it; "" is the root.
    level: "error": generated text might break it. "note": it cannot, but less text is generated
        than the schema allows, or a ``format`` that is only an annotation is left unchecked.
    by_backend: whether it is this backend that cannot; else it is so for all.
    """

    pointer: str
    keyword: str
    reason: str
    fix: str
    level: Literal["error", "note"] = "error"
    by_backend: bool = True


class Lowered(NamedTuple):
    """A schema in fewer keywords, and what could not be kept as it is."""

    schema: Any
    entries: tuple[Unenforced, ...]

    @property
    def errors(self) -> list[Unenforced]:
        """What generated text might break."""
        return [entry for entry in self.entries if entry.level == "error"]


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


def is_narrowed(entries: Sequence[Unenforced]) -> bool:
    """Whether another backend might enforce more of the schema, or admit more of its values."""
    return any(entry.by_backend for entry in entries)


def narrowing(entries: Iterable[Unenforced]) -> list[Unenforced]:
    """The notes by which the grammar admits less than the schema."""
    return [entry for entry in entries if entry.level == "note" and entry.keyword != "format"]


def escape(name: str) -> str:
    """A property name as one token of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def unescape(token: str) -> str:
    """The property name that one token of a JSON pointer stands for."""
    return token.replace("~1", "/").replace("~0", "~")


def find(value: Any, pointer: str) -> Any:
    """What stands at a JSON pointer. Raises LookupError where nothing does."""
    for token in pointer.split("/")[1:]:
        name = unescape(token)
        if isinstance(value, dict):
            value = value[name]
        elif isinstance(value, list) and name.isdecimal():
            value = value[int(name)]
        else:
            raise LookupError(pointer)
    return value


def describe(errors: Sequence[Unenforced]) -> str:
    """The message about keywords that cannot be enforced."""
    lines = [f"{e.pointer or '/'}: {e.keyword}: {e.reason}; {e.fix}" for e in errors[:_SHOWN]]
    if len(errors) > _SHOWN:
        lines.append(f"and {len(errors) - _SHOWN} more (see schema.find_unenforced)")
    return "the JSON schema cannot be enforced in full:\n  " + "\n  ".join(lines)


_ONE = ("items", "additionalProperties")
_LISTS = ("allOf", "anyOf", "prefixItems")
_MAPS = ("properties", "patternProperties")
HOLDS_PARTS = frozenset({*_ONE, *_LISTS, *_MAPS})
"""Keywords of a subschema, or several."""


def parts_of(node: dict[str, Any]) -> Iterator[Any]:
    """The subschemas right below ``node``, definitions aside."""
    yield from (node[keyword] for keyword in _ONE if keyword in node)
    for keyword in _LISTS:
        yield from node.get(keyword, ())
    for keyword in _MAPS:
        yield from node.get(keyword, {}).values()


def all_parts(schema: Any) -> Iterator[Any]:
    """A schema and all below it, definitions aside."""
    stack = [schema]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, dict):
            stack += parts_of(node)


def change_parts(node: dict[str, Any], change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """A copy of ``node`` with ``change(part, path)`` for each subschema right below it.

    path: the way from ``node`` to the part, the tail of a JSON pointer.
    """
    changed = dict(node)
    for keyword in node:
        if keyword in _ONE:
            changed[keyword] = change(node[keyword], keyword)
        elif keyword in _LISTS:
            changed[keyword] = [
                change(part, f"{keyword}/{index}") for index, part in enumerate(node[keyword])
            ]
        elif keyword in _MAPS:
            changed[keyword] = {
                name: change(part, f"{keyword}/{escape(name)}")
                for name, part in node[keyword].items()
            }
    return changed
