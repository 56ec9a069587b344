"""One schema lowered: the walk, and what the rules of single keywords may ask of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from guided_spec.grammar.schema.dialect import Document, Target, spell
from guided_spec.grammar.schema.disjoint import Disjointness
from guided_spec.grammar.schema.formats import FORMATS
from guided_spec.grammar.schema.report import Report, Unenforced, escape
from guided_spec.grammar.schema.values import ALL_TYPES, Disjuncts, any_of, join_all

__all__ = ["Applicator", "At", "Lowered", "Lowering", "Rules"]

_MAX_DEPTH = 64
_LARGEST = 1_000_000  # characters
_PLAIN = frozenset(
    {"type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum"}
    | {"exclusiveMaximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "required"}
)
_STRUCTURE = frozenset(
    {"properties", "patternProperties", "additionalProperties", "items", "prefixItems", "format"}
)


class Lowered(NamedTuple):
    """A schema in fewer keywords, and what could not be kept as it is."""

    schema: Any
    entries: tuple[Unenforced, ...]


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


Applicator = Callable[["Lowering", Any, dict[str, Any], At], list[Any]]
"""Takes a schema, its keywords as draft 2020-12 spells them, and where it stands."""


class Rules(NamedTuple):
    """How keywords that apply schemas are lowered, and what a schema does not admit."""

    applicators: Mapping[str, Applicator]
    negate: Callable[[Lowering, Any, At], Disjuncts]


class Lowering:
    """One pass over one document. harder: see ``lower.lower``."""

    def __init__(self, root: Any, rules: Rules, *, harder: bool = False) -> None:
        self.harder = harder
        self._rules = rules
        self._asserting = _PLAIN | _STRUCTURE | rules.applicators.keys()
        self.document = Document(root)
        self.disjoint = Disjointness(self.document)
        self.report = Report()
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Any] = {}
        defs = root.get("$defs") if isinstance(root, dict) else None
        self._reserved = set(defs) if isinstance(defs, dict) else set()

    def run(self) -> Lowered:
        """The root's result."""
        schema = self.positive(self.document.root, At())
        if len(json.dumps([schema, self._definitions])) > _LARGEST:
            reason = "written out, what excludes what is far too long"
            self.report.error("", "oneOf", reason, "give each branch a const property of its own")
            return Lowered({}, tuple(self.report.entries))
        if self._definitions:
            rest = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
            schema = {**rest, "$defs": self._definitions}
        return Lowered(schema, tuple(self.report.entries))

    def positive(self, node: Any, at: At) -> Any:
        """A schema for values of ``node``, which need not admit any beside those of ``at.types``.

        Without siblings that say more, a reference stays one.
        """
        if not isinstance(node, dict):
            return node
        if at.depth > _MAX_DEPTH:
            self.report.error(at.pointer, "", "it is nested too deeply", "flatten the schema")
            return {}
        words = spell(node, self.document.draft)
        if "$ref" in words:
            target = self.document.resolve(node)
            if target is None:
                reason = f"{words['$ref']!r} is not found in the schema, and nothing is fetched"
                self.report.error(at.pointer, "$ref", reason, "move the target under $defs")
                return {}
            if any(name in words for name in self._asserting):
                return self._refer_with(target, node, words, at)
            return self.refer(target, at)
        return join_all(self._parts(node, words, at))

    def _parts(self, node: Any, words: dict[str, Any], at: At) -> list[Any]:
        at = at._replace(types=at.types & self.disjoint.types(node))
        parts: list[Any] = [self._plain(words, at)]
        for keyword, apply in self._rules.applicators.items():
            if keyword in words:
                parts += apply(self, node, words, at)
        return parts

    def refer(self, target: Target, at: At) -> Any:
        """A reference to the lowered target."""
        if isinstance(target.schema, bool):
            return target.schema
        place = target.key[1:] if target.key.startswith("#") else at.pointer
        with self._definition(target.key) as name:
            if name not in self._definitions:
                self._definitions[name] = {}  # for itself
                self._definitions[name] = self.positive(target.schema, At(place))
        return {"$ref": f"#/$defs/{escape(name)}"}

    def _refer_with(self, target: Target, node: Any, words: dict[str, Any], at: At) -> Any:
        """Both in one definition: a reference to itself with siblings would have no end."""
        with self._definition(f"{target.key} {id(node)}") as name:
            if name not in self._definitions:
                self._definitions[name] = {}
                rest = {key: value for key, value in words.items() if key != "$ref"}
                parts = self._parts(node, rest, at)
                names = list(words)
                last = "properties" in words and names.index("$ref") > names.index("properties")
                # Properties are generated in the order in which they are written.
                parts.insert(len(parts) if last else 0, self._inline(target, at))
                self._definitions[name] = join_all(parts)
        return {"$ref": f"#/$defs/{escape(name)}"}

    def _inline(self, target: Target, at: At) -> Any:
        for _ in range(_MAX_DEPTH):
            schema = target.schema
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            words = spell(schema, self.document.draft)
            following = self.document.resolve(schema)
            if following is None or any(name in words for name in self._asserting):
                break
            target = following
        return self.positive(target.schema, at._replace(depth=at.depth + 1))

    @contextmanager
    def _definition(self, key: str) -> Iterator[str]:
        if key not in self._names:
            prefix = "#/$defs/"
            own = key[len(prefix) :] if key.startswith(prefix) else ""
            if own not in self._reserved:
                number = len(self._names)
                while f"r{number}" in self._reserved:
                    number += 1000
                own = f"r{number}"
            self._names[key] = own
        yield self._names[key]

    def _plain(self, words: dict[str, Any], at: At) -> dict[str, Any]:
        plain = {name: words[name] for name in words if name in _PLAIN}
        for name in ("properties", "patternProperties"):
            if name in words:
                plain[name] = {
                    key: self.positive(part, at.inside(name, key))
                    for key, part in words[name].items()
                }
        for name in ("items", "additionalProperties"):
            if name in words:
                plain[name] = self.positive(words[name], at.inside(name))
        if "prefixItems" in words:
            plain["prefixItems"] = [
                self.positive(part, at.inside("prefixItems", index))
                for index, part in enumerate(words["prefixItems"])
            ]
        if words.get("format") in FORMATS:
            plain["format"] = words["format"]
        elif "format" in words and "string" in at.types:
            reason = "an annotation, which is not checked"
            fix = "use pattern to have it enforced"
            self.report.note(at.pointer, "format", reason, fix)
        return plain

    def exclude(
        self, node: Any, beside: Any, keyword: str, at: At, shared: frozenset[str] = ALL_TYPES
    ) -> Any:
        """A schema for values of ``at.types`` that ``node`` does not admit.

        What cannot be along with ``beside`` is left out. ``at`` is where ``keyword`` stands.
        shared: types of the values that ``node`` may admit; all others are none of its.
        """
        types = at.types & self.disjoint.types(beside)
        found = self._rules.negate(self, node, at._replace(types=types & shared))
        own = sorted(types - shared)
        schemas = [{"type": own}, *found.schemas] if own else found.schemas
        if not found.exact:
            if not schemas and not self.harder:
                reason = "there is no positive spelling of what it excludes"
                fix = "list what is allowed, with enum or anyOf"
                self.report.error(at.pointer, keyword, reason, fix)
                return {}
            reason = "more is excluded than it asks for"
            self.report.note(at.pointer, keyword, reason, "list what is allowed, with anyOf")
        return any_of(schemas)
