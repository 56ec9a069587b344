"""Any JSON schema of drafts 4 to 2020-12, in fewer keywords: those that grammars can be made of.

The result admits no value that the schema does not. It has no ``$schema``, ``$id``, ``not``,
``oneOf``, ``if``, ``dependent…``, ``contains``, ``propertyNames``, ``unevaluated…``, no format
without a pattern of its own, and refers to nothing but ``#/$defs/...``. Where it admits fewer
values, a note says so; where a keyword has no such spelling, an error does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from guided_spec.grammar.schema_apply import APPLICATORS
from guided_spec.grammar.schema_closed import AdditionalProperties, close_objects
from guided_spec.grammar.schema_dialect import Document, Target, spell
from guided_spec.grammar.schema_disjoint import Disjointness
from guided_spec.grammar.schema_formats import FORMATS
from guided_spec.grammar.schema_join import any_of, join_all
from guided_spec.grammar.schema_negate import negate
from guided_spec.grammar.schema_place import At
from guided_spec.grammar.schema_report import Report, Unenforced, escape
from guided_spec.grammar.schema_special import SPECIAL

__all__ = ["Lowered", "Lowering", "lower", "needs_lowering"]

_MAX_DEPTH = 64
_LARGEST = 1_000_000  # characters
_CAUSES = frozenset(
    {"not", "if", "oneOf", "dependentRequired", "dependentSchemas", "dependencies", "contains"}
    | {"propertyNames", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"}
    | {"$id", "id", "$anchor", "$dynamicAnchor", "additionalItems", "format"}
    | {"minProperties", "maxProperties", "uniqueItems"}
)
_PLAIN = frozenset(
    {"type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum"}
    | {"exclusiveMaximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "required"}
)
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


class Lowered(NamedTuple):
    """A schema in fewer keywords, and what could not be kept as it is."""

    schema: Any
    entries: tuple[Unenforced, ...]


def lower(
    schema: Any, *, harder: bool = False, additional: AdditionalProperties = "schema"
) -> Lowered:
    """``schema``, which must be valid under its metaschema, in fewer keywords.

    harder: admits less, however little is left, where there would be an error otherwise.
    additional: "closed" closes objects, see ``schema_closed``.
    """
    lowered = Lowered(schema, ())
    if needs_lowering(schema):
        lowered = Lowering(schema, harder=harder).run()
    if additional == "closed":
        return lowered._replace(schema=close_objects(lowered.schema).schema)
    return lowered


def needs_lowering(schema: Any) -> bool:
    """Whether ``schema`` holds more than the backends' own preparations know."""
    if isinstance(schema, dict) and schema.get("$schema", _DRAFT) != _DRAFT:
        return True
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            if not _CAUSES.isdisjoint(node) or isinstance(node.get("items"), list):
                return True
            if "$ref" in node and not _is_local(node["$ref"]):
                return True
            stack.extend(node.values())
    return False


def _is_local(reference: Any) -> bool:
    text = str(reference)
    return text == "#" or (text.startswith("#/$defs/") and text.count("/") == 2 and "%" not in text)


class Lowering:
    """One pass over one document. harder: see ``lower``."""

    def __init__(self, root: Any, *, harder: bool = False) -> None:
        self.harder = harder
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
            if any(name in words for name in _ASSERTING):
                return self._refer_with(target, node, words, at)
            return self.refer(target, at)
        return join_all(self._parts(node, words, at))

    def _parts(self, node: Any, words: dict[str, Any], at: At) -> list[Any]:
        at = at._replace(types=at.types & self.disjoint.types(node))
        parts: list[Any] = [self._plain(words, at)]
        for keyword, apply in _ALL.items():
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
            if following is None or any(name in words for name in _ASSERTING):
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

    def exclude(self, node: Any, beside: Any, keyword: str, at: At) -> Any:
        """A schema for values of ``at.types`` that ``node`` does not admit.

        What cannot be along with ``beside`` is left out. ``at`` is where ``keyword`` stands.
        """
        at = at._replace(types=at.types & self.disjoint.types(beside))
        found = negate(self, node, at)
        if not found.exact:
            if not found.schemas and not self.harder:
                reason = "there is no positive spelling of what it excludes"
                fix = "list what is allowed, with enum or anyOf"
                self.report.error(at.pointer, keyword, reason, fix)
                return {}
            reason = "more is excluded than it asks for"
            self.report.note(at.pointer, keyword, reason, "list what is allowed, with anyOf")
        return any_of(found.schemas)


_ALL = {**APPLICATORS, **SPECIAL}
_ASSERTING = (
    _PLAIN
    | _ALL.keys()
    | {
        *(
            "properties",
            "patternProperties",
            "additionalProperties",
            "items",
            "prefixItems",
            "format",
        )
    }
)
