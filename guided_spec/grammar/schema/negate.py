"""The values that a schema does not admit, as schemas without ``not``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from guided_spec.grammar.schema.dialect import spell
from guided_spec.grammar.schema.lowering import At, Lowering
from guided_spec.grammar.schema.values import (
    ALL_TYPES,
    Disjuncts,
    any_of,
    join_all,
    other_characters,
    others,
)

__all__ = ["negate"]

_MAX_DEPTH = 24
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


def negate(lowering: Lowering, node: Any, at: At) -> Disjuncts:
    """Schemas of which each admits only values of ``at.types`` that ``node`` does not admit.

    They admit all of them where the result is exact.
    """
    if isinstance(node, bool):
        return Disjuncts([] if node else [{"type": sorted(at.types)}])
    if at.depth > _MAX_DEPTH:
        return Disjuncts([], exact=False)
    words = spell(node, lowering.document.draft, strict=True)
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
    return Disjuncts(found, exact)


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


def _of_values(lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    del lowering
    value = words[keyword]
    if keyword == "type":
        return _not_of_type(value, at)
    return others([value] if keyword == "const" else value, at.types)


def _of_pattern(lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    del lowering
    if "string" not in at.types:
        return Disjuncts([])
    written = other_characters(words[keyword])
    schemas = [{"type": "string", "pattern": written}] if written else []
    return Disjuncts(schemas, exact=False)


def _of_not(lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    return Disjuncts([_typed(lowering.positive(words[keyword], at.below(keyword)), at)])


def _of_reference(lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    target = lowering.document.resolve(words, keyword)
    if target is None:
        return Disjuncts([], exact=False)
    return negate(lowering, target.schema, at._replace(depth=at.depth + 1))


def _of_names(lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    del lowering
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
            found = negate(lowering, part, at.inside("properties", name))
            exact = exact and found.exact
            if found.schemas:
                properties = {name: any_of(found.schemas)}
                schemas.append({"type": "object", "properties": properties, "required": [name]})
    elif keyword == "dependentRequired":
        schemas = [
            {"type": "object", "properties": {name: False}, "required": [key]}
            for key, names in value.items()
            for name in names
        ]
    else:
        for key, part in value.items():
            found = negate(lowering, part, at.below("dependentSchemas", key))
            exact = exact and found.exact
            has_key = {"type": "object", "required": [key]}
            schemas += [join_all([has_key, schema]) for schema in found.schemas]
    return Disjuncts(schemas, exact)


def _of_array(lowering: Lowering, words: dict[str, Any], keyword: str, at: At) -> Disjuncts:
    if "array" not in at.types:
        return Disjuncts([])
    value = words[keyword]
    if keyword == "contains":
        found = negate(lowering, value, at.inside("contains"))
        plain = words.get("minContains", 1) == 1 and "maxContains" not in words
        if words.get("minContains", 1) < 1:
            return Disjuncts([], exact="maxContains" not in words)
        return Disjuncts([{"type": "array", "items": any_of(found.schemas)}], found.exact and plain)
    if keyword == "items":
        first = len(words.get("prefixItems", ()))
        found = negate(lowering, value, at.inside("items"))
        # Only the first item is put right: any may break the rule.
        exact = value is False or not found.schemas
        return Disjuncts(_at_index(first, found), found.exact and exact)
    schemas: list[Any] = []
    exact = True
    for index, part in enumerate(value):
        found = negate(lowering, part, at.inside("prefixItems", index))
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
    founds = [negate(lowering, part, at.below(keyword, index)) for index, part in enumerate(value)]
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
        found = negate(lowering, words["then"], at.below("then"))
        exact = found.exact
        condition = lowering.positive(words["if"], at.below("if"))
        schemas += [join_all([condition, schema]) for schema in found.schemas]
    if "else" in words:
        found = negate(lowering, words["else"], at.below("else"))
        without = negate(lowering, words["if"], at.below("if"))
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
