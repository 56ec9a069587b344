"""Lowers one schema: the traversal, what keyword rules may ask, and what ``not`` means."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from guided_spec.grammar.formats import FORMATS
from guided_spec.grammar.languages import outside
from guided_spec.grammar.schema.dialect import objects
from guided_spec.grammar.schema.document import Document, Target
from guided_spec.grammar.schema.joining import any_of, holds, join_all, text_of
from guided_spec.grammar.schema.key_patterns import overlapping, pattern_of, split_patterns
from guided_spec.grammar.schema.lowered import Lowered, Report, change_parts, escape
from guided_spec.grammar.schema.values import (
    ALL_TYPES,
    Disjointness,
    Disjuncts,
    other_characters,
    others,
)
from guided_spec.grammar.steps import spend, spend_on_value

_MAX_DEPTH = 64
_OF_SCHEMA = 12  # steps of one schema, besides those of its keywords
_LARGEST = 1_000_000  # characters
TOO_LONG = "written out, what excludes what is far too long"
"""The reason why a lowered schema is given up."""
_PLAIN = frozenset(
    {"type", "enum", "const", "multipleOf", "minimum", "maximum", "exclusiveMinimum"}
    | {"exclusiveMaximum", "minLength", "maxLength", "pattern", "minItems", "maxItems", "required"}
)
# As they come in the result: to llguidance the order matters.
_STRUCTURE = ("properties", "patternProperties", "items", "additionalProperties", "prefixItems")
_MAX_NEGATED = 24
# What a value beyond the bound fulfils instead; a length's bound moves by one.
_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}
_KNOWN = frozenset(
    {"type", "enum", "const", "$ref", "allOf", "anyOf", "oneOf", "not", "if", "properties"}
    | {"required", "items", "prefixItems", "contains", "dependentRequired", "dependentSchemas"}
    | {"pattern", "propertyNames", *_BOUNDS}
)
# Without a negation, and the type of the values that they are about.
_INEXACT = {
    **dict.fromkeys(("patternProperties", "additionalProperties"), "object"),
    **dict.fromkeys(("uniqueItems", "unevaluatedItems"), "array"),
    **{"unevaluatedProperties": "object", "multipleOf": "number", "format": "string"},
    **dict.fromkeys(("$dynamicRef", "$recursiveRef")),
}


class At(NamedTuple):
    """pointer: JSON pointer of the schema. types: those of the values that matter here.

    beside: schemas that hold for the same values.
    """

    pointer: str = ""
    types: frozenset[str] = ALL_TYPES
    depth: int = 0
    beside: tuple[Any, ...] = ()

    def below(self, *path: str | int) -> At:
        """A subschema for the same value."""
        tail = "".join(f"/{escape(str(token))}" for token in path)
        return At(self.pointer + tail, self.types, self.depth + 1, self.beside)

    def among(self, rest: dict[str, Any]) -> At:
        """Where ``rest`` holds besides."""
        return self._replace(beside=(*self.beside, rest)) if rest else self

    def context(self, rest: dict[str, Any]) -> dict[str, Any]:
        """``rest`` and all that holds besides."""
        return {"allOf": [rest, *self.beside]} if self.beside else rest

    def inside(self, *path: str | int) -> At:
        """A subschema for a part of the value, of whose type nothing is known."""
        return self.below(*path)._replace(types=ALL_TYPES, beside=())


Applicator = Callable[["Lowering", Any, dict[str, Any], At], list[Any]]
"""Takes a schema, its keywords as draft 2020-12 spells them, and where it stands."""


class Lowering:
    """One pass over one document.

    applicators: how each keyword that applies schemas is lowered. harder, filtered: see
    ``lower.lower``. closed: whether objects that do not say so get no further keys afterwards.
    most_ways: in which what is excluded is written out; None for all.
    """

    def __init__(
        self,
        root: Any,
        applicators: Mapping[str, Applicator],
        *,
        harder: bool = False,
        filtered: bool = False,
        closed: bool = False,
        most_ways: int | None = None,
    ) -> None:
        self._most_ways = most_ways
        self.harder, self.filtered, self._closed = harder, filtered, closed
        self._applicators = applicators
        self._asserting = _PLAIN | {*_STRUCTURE, "format"} | applicators.keys()
        self.document = Document(root)
        self.disjoint = Disjointness(self.document)
        self.report = Report()
        # By the id of a schema that is referred to, and the types of values that matter.
        self.negated: dict[tuple[int, frozenset[str]], Disjuncts] = {}
        self._names: dict[str, str] = {}
        self._definitions: dict[str, Any] = {}
        defs = root.get("$defs") if isinstance(root, dict) else None
        self.has_unique_items = _has_unique_items(root)
        self._reserved = set(defs) if isinstance(defs, dict) else set()

    def run(self) -> Lowered:
        """The root's result."""
        schema = self.positive(self.document.root, At())
        spend_on_value([schema, self._definitions])
        if len(json.dumps([schema, self._definitions])) > _LARGEST:
            reason = TOO_LONG
            self.report.error("", "oneOf", reason, "give each branch a const property of its own")
            return Lowered({}, tuple(self.report.entries))
        if self._definitions:
            rest = schema if isinstance(schema, dict) else {} if schema else {"enum": []}
            schema = {**rest, "$defs": self._definitions}
        return Lowered(schema, tuple(self.report.entries))

    def positive(self, node: Any, at: At) -> Any:
        """A schema for values of ``node``; it need not admit any but those of ``at.types``.

        Without siblings that say more, a reference stays one.
        """
        if not isinstance(node, dict):
            return node
        if at.depth > _MAX_DEPTH:
            self.report.error(at.pointer, "", "it is nested too deeply", "flatten the schema")
            return {}
        words = self.document.spell(node)
        if "$ref" in words:
            target = self.document.resolve(node)
            if target is None:
                reason = f"{words['$ref']!r} is not found in the schema, and nothing is fetched"
                fix = "move the target under $defs, or pass it with resources={uri: schema}"
                self.report.error(at.pointer, "$ref", reason, fix)
                return {}
            if any(name in words for name in self._asserting):
                return self._refer_with(target, node, words, at)
            return self.refer(target, at)
        return join_all(self._parts(node, words, at))

    def _parts(self, node: Any, words: dict[str, Any], at: At) -> list[Any]:
        at = at._replace(types=at.types & self.disjoint.types(node))
        parts: list[Any] = [self._plain(words, at)]
        for keyword, apply in self._applicators.items():
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
                at = at._replace(beside=())  # elsewhere something else may hold
                rest = {key: value for key, value in words.items() if key != "$ref"}
                parts = self._parts(node, rest, at)
                names = list(words)
                last = "properties" in words and names.index("$ref") > names.index("properties")
                # Properties are generated in the order in which they are written.
                below = at._replace(depth=at.depth + 1)
                referred = self.positive(self.dereference(target.schema), below)
                parts.insert(len(parts) if last else 0, referred)
                self._definitions[name] = join_all(parts)
        return {"$ref": f"#/$defs/{escape(name)}"}

    def dereference(self, schema: Any) -> Any:
        """What ``schema`` refers to, where it is nothing but a reference; else itself."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            words = self.document.spell(schema)
            target = self.document.resolve(schema)
            if target is None or any(name in words for name in self._asserting):
                break
            schema = target.schema
        return schema

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

    def names_pattern(self, words: dict[str, Any], at: At) -> str | None:
        """``propertyNames`` as a pattern; None where it is none. See ``pattern_of``."""
        names = self.dereference(words["propertyNames"])
        if isinstance(names, dict) and names:
            names = self.positive(names, At(f"{at.pointer}/propertyNames", frozenset({"string"})))
        return pattern_of(names, self._definitions) if isinstance(names, dict) and names else None

    def split_keys(self, words: dict[str, Any], at: At) -> dict[str, Any] | None:
        """The keywords with patterns of which no two match the same key, all within the names.

        None where nothing has to be changed, or it cannot be.
        """
        patterns, listed = words.get("patternProperties"), words.get("properties", {})
        if not patterns or "object" not in at.types:
            return None
        names = self.names_pattern(words, at) if "propertyNames" in words else None
        if names is None and not overlapping(patterns):
            return None
        parts = split_patterns(patterns, list(listed), names)
        if parts is None:
            return None
        found = {
            pattern: own[0] if len(own) == 1 else {"allOf": own}
            for pattern, own in parts.schemas.items()
        }
        changed = words | {"patternProperties": found}
        if "additionalProperties" in words or not self._closed:
            extra = words.get("additionalProperties", True)
            if extra is not False and parts.rest is not None:
                found[parts.rest] = extra
            changed["additionalProperties"] = False
        elif not found:  # an object that lists no keys at all would not be closed
            changed["additionalProperties"] = False
        if names is not None and listed:
            own = {name: part if holds(names, name) else False for name, part in listed.items()}
            changed["properties"] = own
        return changed

    def _plain(self, words: dict[str, Any], at: At) -> dict[str, Any]:
        words = self.split_keys(words, at) or words
        kept = {name: words[name] for name in words if name in _PLAIN}
        kept |= {name: words[name] for name in _STRUCTURE if name in words}
        spend(_OF_SCHEMA)
        plain = change_parts(
            kept,
            lambda part, path: self.positive(part, At(f"{at.pointer}/{path}", depth=at.depth + 1)),
        )
        if words.get("nullable") is True and "null" not in at.types:
            reason = "a keyword of OpenAPI 3.0 that JSON Schema does not have: null is not admitted"
            self.report.note(at.pointer, "nullable", reason, 'add "null" to type')
        if words.get("format") in FORMATS:
            plain["format"] = words["format"]
        elif "format" in words and "string" in at.types:
            reason = "an annotation, which is not checked"
            fix = "use pattern to have it enforced"
            self.report.note(at.pointer, "format", reason, fix)
        return plain

    def complement(self, node: Any, at: At) -> Any:
        """A schema for exactly the values of ``at.types`` that ``node`` does not admit, or None."""
        found = _negate(self, node, at)
        return any_of(found.schemas) if found.exact else None

    def exclude(
        self, node: Any, beside: Any, keyword: str, at: At, shared: frozenset[str] = ALL_TYPES
    ) -> Any:
        """A schema for values of ``at.types`` that ``node`` does not admit.

        What cannot be together with ``other`` is left out. ``at`` is the position of ``keyword``.
        shared: types of the values that ``node`` may admit; all others are none of its.
        """
        types = at.types & self.disjoint.types(beside)
        found = _negate(self, node, at._replace(types=types & shared))
        own = sorted(types - shared)
        schemas = [{"type": own}, *found.schemas] if own else found.schemas
        if self._most_ways is not None and len(schemas) > self._most_ways:
            schemas = sorted(schemas, key=lambda schema: len(text_of(schema)))[: self._most_ways]
            found = found._replace(exact=False)
        if not found.exact:
            if not schemas and not self.harder:
                reason = "there is no positive spelling of what it excludes"
                fix = "list what is allowed, with enum or anyOf"
                self.report.error(at.pointer, keyword, reason, fix)
                return {}
            reason = "more is excluded than it asks for"
            self.report.note(at.pointer, keyword, reason, "list what is allowed, with anyOf")
        return any_of(schemas)


def _has_unique_items(root: Any) -> bool:
    return any(one.get("uniqueItems") is True for one in objects(root))


def _negate(lowering: Lowering, node: Any, at: At) -> Disjuncts:
    """Schemas of which each admits only values of ``at.types`` that ``node`` does not admit.

    They admit all of them where the result is exact.
    """
    if isinstance(node, bool):
        return Disjuncts([] if node else [{"type": sorted(at.types)}])
    if at.depth > _MAX_NEGATED:
        return Disjuncts([], exact=False)
    words = lowering.document.spell(node, strict=True)
    spend(_OF_SCHEMA)
    found: list[Any] = []
    exact = True
    for keyword in words:
        if keyword in _INEXACT:
            kind = _INEXACT[keyword]
            is_void = kind is not None and kind not in at.types
            exact = exact and (is_void or _is_void(keyword, words[keyword]))
        elif keyword in _KNOWN:
            part = _negate_keyword(lowering, node, words, keyword, at)
            found += part.schemas
            exact = exact and part.exact
    return Disjuncts([schema for schema in found if not _is_held(schema, found)], exact)


def _is_held(schema: Any, others: Sequence[Any]) -> bool:
    """Whether it asks for a key to be absent, where another one lets it be."""
    name = _absent(schema)
    return name is not None and any(
        one is not schema and one.keys() == schema.keys() and one["properties"].keys() == {name}
        for one in others
        if isinstance(one, dict) and "properties" in one
    )


def _absent(schema: Any) -> str | None:
    if not isinstance(schema, dict) or schema.keys() != {"type", "properties"}:
        return None
    names = [name for name, part in schema["properties"].items() if part is False]
    return names[0] if names and len(schema["properties"]) == 1 else None


def _is_void(keyword: str, value: Any) -> bool:
    if keyword == "uniqueItems":
        return value is False
    return keyword not in ("format", "multipleOf") and (value is True or value == {})


def _negate_keyword(
    lowering: Lowering, node: Any, words: dict[str, Any], keyword: str, at: At
) -> Disjuncts:
    value = words[keyword]
    if keyword in _BOUNDS:
        kind, other, shift = _BOUNDS[keyword]
        if kind not in at.types or value + shift < 0 and shift:
            return Disjuncts([])
        if keyword == "maxProperties" and value > 0:
            return Disjuncts([], exact=False)  # a key written twice would count twice
        return Disjuncts([{"type": kind, other: value + shift}])
    method = _METHODS.get(keyword)
    if method is None:
        return _of_branches(lowering, words, keyword, at)
    if keyword == "$ref":
        words = node  # where it is, it means what it means
    return method(lowering, words, keyword, at)


def _of_values(_lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    value = words[keyword]
    if keyword == "type":
        return _not_of_type(value, at)
    return others([value] if keyword == "const" else value, at.types)


def _of_pattern(_lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    if "string" not in at.types:
        return Disjuncts([])
    short = other_characters(words[keyword])
    written = short or outside(words[keyword])
    schemas = [{"type": "string", "pattern": written}] if written else []
    return Disjuncts(schemas, exact=written is not None and short is None)


def _of_not(lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    return Disjuncts([_typed(lowering.positive(words[keyword], at.below(keyword)), at)])


def _of_reference(lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    target = lowering.document.resolve(words, keyword)
    if target is None:
        return Disjuncts([], exact=False)
    known, key = lowering.negated, (id(target.schema), at.types)
    if key not in known:
        known[key] = Disjuncts([], exact=False)  # within itself, where it has no end
        alone = at._replace(depth=at.depth + 1, beside=())
        known[key] = _negate(lowering, target.schema, alone)
    return known[key]


def _of_names(_lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    if words[keyword] is False and "object" in at.types:
        return Disjuncts([{"type": "object", "minProperties": 1}])
    return Disjuncts([], exact="object" not in at.types or words[keyword] in (True, {}))


def _typed(schema: Any, at: At) -> Any:
    """``schema`` for ``at.types`` only."""
    if at.types == ALL_TYPES:
        return schema
    return join_all([schema, {"type": sorted(at.types)}])


def _not_of_type(value: Any, at: At) -> Disjuncts:
    named = set(value) if isinstance(value, list) else {value}
    fractions = "integer" in named and "number" not in named and "number" in at.types
    named |= {"number"} if "integer" in named else set()
    rest = sorted(at.types - named)
    # What is a number but no integer has no spelling.
    return Disjuncts([{"type": rest}] if rest else [], exact=not fractions)


def _of_object(lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    value = words[keyword]
    if "object" not in at.types:
        return Disjuncts([])
    schemas: list[Any] = []
    exact = True
    if keyword == "required":
        schemas = [{"type": "object", "properties": {name: False}} for name in value]
    elif keyword == "properties":
        for name, part in value.items():
            found = _negate(lowering, part, at.inside("properties", name))
            exact = exact and found.exact
            if found.schemas:
                schema = {"type": "object", "properties": {name: any_of(found.schemas)}}
                # Where it is required, its absence is excluded as well.
                is_asked = name in words.get("required", ())
                schemas.append(schema if is_asked else {**schema, "required": [name]})
    elif keyword == "dependentRequired":
        schemas = [
            {"type": "object", "properties": {name: False}, "required": [key]}
            for key, names in value.items()
            for name in names
        ]
    else:
        for key, part in value.items():
            found = _negate(lowering, part, at.below("dependentSchemas", key))
            exact = exact and found.exact
            has_key = {"type": "object", "required": [key]}
            schemas += [join_all([has_key, schema]) for schema in found.schemas]
    return Disjuncts(schemas, exact)


def _of_array(lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    if "array" not in at.types:
        return Disjuncts([])
    value = words[keyword]
    if keyword == "contains":
        found = _negate(lowering, value, at.inside("contains"))
        plain = words.get("minContains", 1) == 1 and "maxContains" not in words
        if words.get("minContains", 1) < 1:
            return Disjuncts([], exact="maxContains" not in words)
        return Disjuncts([{"type": "array", "items": any_of(found.schemas)}], found.exact and plain)
    if keyword == "items":
        first = len(words.get("prefixItems", ()))
        found = _negate(lowering, value, at.inside("items"))
        # Only the first item is put right: any may break the rule.
        exact = value is False or not found.schemas
        return Disjuncts(_at_index(first, found), found.exact and exact)
    schemas: list[Any] = []
    exact = True
    for index, part in enumerate(value):
        found = _negate(lowering, part, at.inside("prefixItems", index))
        schemas += _at_index(index, found)
        exact = exact and found.exact
    return Disjuncts(schemas, exact)


def _at_index(index: int, found: Disjuncts) -> list[Any]:
    if not found.schemas:
        return []
    prefix = [True] * index + [any_of(found.schemas)]
    return [{"type": "array", "prefixItems": prefix, "minItems": index + 1}]


def _of_branches(lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    value = words[keyword]
    if keyword == "if":
        return _of_condition(lowering, words, at)
    founds = [_negate(lowering, part, at.below(keyword, index)) for index, part in enumerate(value)]
    exact = all(found.exact for found in founds)
    if keyword == "allOf":
        return Disjuncts([schema for found in founds for schema in found.schemas], exact)
    none = join_all([any_of(found.schemas) for found in founds])
    schemas = [] if none is False else [none]
    if keyword == "oneOf":  # none, or two of them
        pairs = [(i, j) for i in range(len(value)) for j in range(i)]
        for i, j in pairs:
            if not lowering.disjoint.apart(value[i], value[j]):
                both = [lowering.positive(value[k], at.below(keyword, k)) for k in (i, j)]
                schemas.append(_typed(join_all(both), at))
    return Disjuncts(schemas, exact)


def _of_condition(lowering: Lowering, words: dict[str, Any], at: At) -> Disjuncts:
    schemas: list[Any] = []
    exact = True
    if "then" in words:
        found = _negate(lowering, words["then"], at.below("then"))
        exact = found.exact
        condition = lowering.positive(words["if"], at.below("if"))
        schemas += [join_all([condition, schema]) for schema in found.schemas]
    if "else" in words:
        found = _negate(lowering, words["else"], at.below("else"))
        without = _negate(lowering, words["if"], at.below("if"))
        exact = exact and found.exact and without.exact
        schemas += [join_all([one, other]) for one in without.schemas for other in found.schemas]
    return Disjuncts(schemas, exact)


_METHODS: dict[str, Callable[[Lowering, dict[str, Any], str, At], Disjuncts]] = {
    **dict.fromkeys(("type", "enum", "const"), _of_values),
    "pattern": _of_pattern,
    "not": _of_not,
    "$ref": _of_reference,
    **dict.fromkeys(("required", "properties"), _of_object),
    **dict.fromkeys(("dependentRequired", "dependentSchemas"), _of_object),
    "propertyNames": _of_names,
    **dict.fromkeys(("items", "prefixItems", "contains"), _of_array),
}
