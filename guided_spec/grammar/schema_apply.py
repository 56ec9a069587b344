"""Keywords that apply schemas to the same value, in lowered ones that hold all together."""

from __future__ import annotations

from typing import Any

from guided_spec.grammar.schema_join import any_of, join_all
from guided_spec.grammar.schema_lowering import Applicator, At, Lowering

__all__ = ["APPLICATORS"]


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
            if other != index and not apart(branch, rival, rest):
                parts.append(lowering.exclude(rival, branch, "oneOf", here))
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
            needed = lowering.positive(schema, at.below("dependentSchemas", name))
            without = [] if name in required else [{"properties": {name: False}}]
            parts.append(any_of([*without, needed]))
    return parts


APPLICATORS: dict[str, Applicator] = {
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
"""How each keyword is lowered."""
