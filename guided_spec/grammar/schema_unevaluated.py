"""``unevaluatedProperties`` and ``unevaluatedItems``: what surely is evaluated, and the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from guided_spec.grammar.schema_dialect import spell
from guided_spec.grammar.schema_place import At

if TYPE_CHECKING:
    from guided_spec.grammar.schema_lower import Lowering

__all__ = ["unevaluated_items", "unevaluated_properties"]

_DEPTH = 16
_BRANCHING = frozenset(
    {"anyOf", "oneOf", "if", "dependentSchemas", "not", "$dynamicRef", "$recursiveRef"}
)


class _Keys(NamedTuple):
    """Names and patterns that are evaluated."""

    names: list[str]
    patterns: list[str]


def unevaluated_properties(
    lowering: Lowering, node: Any, words: dict[str, Any], at: At
) -> list[Any]:
    """Closed around the keys that surely are evaluated."""
    if "object" not in at.types:
        return []
    if words["unevaluatedProperties"] is True:
        return [{"additionalProperties": True}]
    seen = _evaluated(lowering, node, 0)
    if seen is None:
        return []
    rest = lowering.positive(words["unevaluatedProperties"], at.inside("unevaluatedProperties"))
    if _branches(lowering, node, _BRANCHING, 0):
        reason = "keys that only a branch evaluates count as unevaluated"
        fix = "list all keys under properties"
        lowering.report.note(at.pointer, "unevaluatedProperties", reason, fix)
    properties, patterns = seen
    schema: dict[str, Any] = {"additionalProperties": rest}
    schema |= {"properties": dict.fromkeys(properties, True)} if properties else {}
    schema |= {"patternProperties": dict.fromkeys(patterns, True)} if patterns else {}
    return [schema]


def _evaluated(lowering: Lowering, node: Any, depth: int) -> _Keys | None:
    """The keys and patterns of ``node`` and what always holds with it; None for all keys."""
    if not isinstance(node, dict) or depth > _DEPTH:
        return _Keys([], [])
    words = spell(node, lowering.document.draft)
    if "additionalProperties" in words or (depth and "unevaluatedProperties" in words):
        return None
    names, patterns = list(words.get("properties", ())), list(words.get("patternProperties", ()))
    parts = _always(lowering, node, words)
    for part in parts:
        found = _evaluated(lowering, part, depth + 1)
        if found is None:
            return None
        names += found.names
        patterns += found.patterns
    return _Keys(list(dict.fromkeys(names)), list(dict.fromkeys(patterns)))


def unevaluated_items(lowering: Lowering, node: Any, words: dict[str, Any], at: At) -> list[Any]:
    if "array" not in at.types or words["unevaluatedItems"] is True:
        return []
    count = _evaluated_items(lowering, node, 0)
    if count is None:
        return []
    rest = lowering.positive(words["unevaluatedItems"], at.inside("unevaluatedItems"))
    if _branches(lowering, node, _BRANCHING | {"contains"}, 0):
        reason = "items that only a branch evaluates count as unevaluated"
        fix = "list all items under prefixItems"
        lowering.report.note(at.pointer, "unevaluatedItems", reason, fix)
    prefix = {"prefixItems": [True] * count} if count else {}
    return [{**prefix, "items": rest}]


def _evaluated_items(lowering: Lowering, node: Any, depth: int) -> int | None:
    if not isinstance(node, dict) or depth > _DEPTH:
        return 0
    words = spell(node, lowering.document.draft)
    if "items" in words or (depth and "unevaluatedItems" in words):
        return None
    counts: list[int | None] = [len(words.get("prefixItems", ()))]
    parts = _always(lowering, node, words)
    counts += [_evaluated_items(lowering, part, depth + 1) for part in parts]
    known = [count for count in counts if count is not None]
    return max(known) if len(known) == len(counts) else None


def _always(lowering: Lowering, node: Any, words: dict[str, Any]) -> list[Any]:
    """The schemas that hold wherever ``node`` does."""
    parts = list(words.get("allOf", ()))
    if "$ref" in words:
        target = lowering.document.resolve(node)
        parts += [] if target is None else [target.schema]
    return parts


def _branches(lowering: Lowering, node: Any, keywords: frozenset[str], depth: int) -> bool:
    """Whether something that holds only at times could evaluate more."""
    if not isinstance(node, dict) or depth > _DEPTH:
        return False
    words = spell(node, lowering.document.draft)
    return not keywords.isdisjoint(words) or any(
        _branches(lowering, part, keywords, depth + 1) for part in _always(lowering, node, words)
    )
