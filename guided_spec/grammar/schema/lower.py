"""Any JSON schema of drafts 4 to 2020-12, in fewer keywords: those that grammars can be made of.

The result admits no value that the schema does not. It has no ``$schema``, ``$id``, ``not``,
``oneOf``, ``if``, ``dependent…``, ``contains``, ``propertyNames``, ``unevaluated…``, no format
without a pattern of its own, and refers to nothing but ``#/$defs/...``. Where it admits fewer
values, a note says so; where a keyword has no such spelling, an error does.
"""

from __future__ import annotations

from typing import Any

from guided_spec.grammar.schema.closed import AdditionalProperties, close_objects
from guided_spec.grammar.schema.lowering import Applicator, At, Lowered, Lowering, Rules
from guided_spec.grammar.schema.negate import negate
from guided_spec.grammar.schema.special import SPECIAL
from guided_spec.grammar.schema.values import any_of, join_all

__all__ = ["lower", "needs_lowering"]

_CAUSES = frozenset(
    {"not", "if", "oneOf", "dependentRequired", "dependentSchemas", "dependencies", "contains"}
    | {"propertyNames", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef"}
    | {"$id", "id", "$anchor", "$dynamicAnchor", "additionalItems", "format"}
    | {"minProperties", "maxProperties", "uniqueItems"}
)
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def _without(node: dict[str, Any], *keywords: str) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name not in keywords}


def _dynamic(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    target = lowering.document.resolve_dynamic(node)
    if target is None:
        keyword = "$dynamicRef" if "$dynamicRef" in words else "$recursiveRef"
        reason = "what it refers to depends on where it is reached from"
        lowering.report.error(at.pointer, keyword, reason, "use $ref")
        return []
    return [lowering.refer(target, at)]


def _all_of(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    del node
    return [
        lowering.positive(part, at.below("allOf", index))
        for index, part in enumerate(words["allOf"])
    ]


def _any_of(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    rest = _without(node, "anyOf")
    parts = [
        lowering.positive(part, at.below("anyOf", index))
        for index, part in enumerate(words["anyOf"])
        if not lowering.disjoint.apart(part, rest)
    ]
    return [any_of(parts)]


def _one_of(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    """Each branch with the negations of the others, save those that it excludes anyway."""
    rest = _without(node, "oneOf")
    apart = lowering.disjoint.apart
    branches = [pair for pair in enumerate(words["oneOf"]) if not apart(pair[1], rest)]
    chosen = []
    for index, branch in branches:
        parts = [lowering.positive(branch, at.below("oneOf", index))]
        here = at._replace(types=at.types & lowering.disjoint.types(branch))
        for other, rival in branches:
            shared = lowering.disjoint.shared_types(branch, rival, rest) & here.types
            if other != index and shared:
                parts.append(lowering.exclude(rival, branch, "oneOf", here, shared))
        chosen.append(join_all(parts))
    return [any_of(chosen)]


def _not(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    rest = _without(node, "not")
    if lowering.disjoint.apart(words["not"], rest):
        return []
    return [lowering.exclude(words["not"], rest, "not", at)]


def _if(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    if "then" not in words and "else" not in words:
        return []
    rest = _without(node, "if", "then", "else")
    condition, then, otherwise = words["if"], words.get("then", True), words.get("else", True)
    options = []
    if then is not False and not lowering.disjoint.apart(condition, rest):
        parts = [lowering.positive(condition, at.below("if"))]
        options.append(join_all([*parts, lowering.positive(then, at.below("then"))]))
    if otherwise is not False:
        without = lowering.exclude(condition, rest, "if", at)
        options.append(join_all([without, lowering.positive(otherwise, at.below("else"))]))
    return [any_of(options)]


def _dependent_required(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    del lowering
    required = set(node.get("required", ()))
    parts: list[Any] = []
    for name, names in words["dependentRequired"].items():
        if "object" in at.types and not required.issuperset(names):
            without = [] if name in required else [{"properties": {name: False}}]
            parts.append(any_of([*without, {"required": list(names)}]))
    return parts


def _dependent_schemas(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    required = set(node.get("required", ()))
    parts = []
    for name, schema in words["dependentSchemas"].items():
        if "object" in at.types:
            if isinstance(schema, dict) and "$ref" not in schema:
                # The key is there, which may be what keeps the branches of a oneOf apart.
                schema = {**schema, "required": [*schema.get("required", ()), name]}
            needed = lowering.positive(schema, at.below("dependentSchemas", name))
            without = [] if name in required else [{"properties": {name: False}}]
            parts.append(any_of([*without, needed]))
    return parts


_APPLICATORS: dict[str, Applicator] = {
    "$dynamicRef": _dynamic,
    "$recursiveRef": _dynamic,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "dependentRequired": _dependent_required,
    "dependentSchemas": _dependent_schemas,
}
_RULES = Rules({**_APPLICATORS, **SPECIAL}, negate)


def lower(
    schema: Any, *, harder: bool = False, additional: AdditionalProperties = "schema"
) -> Lowered:
    """``schema``, which must be valid under its metaschema, in fewer keywords.

    harder: admits less, however little is left, where there would be an error otherwise.
    additional: "closed" closes objects, see ``closed``.
    """
    lowered = Lowered(schema, ())
    if needs_lowering(schema):
        lowered = Lowering(schema, _RULES, harder=harder).run()
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
